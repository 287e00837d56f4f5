// Growth by gradient: the wanted empty positions of largest |dy^T x|, as a choice among all positions (choice.cuh).
//
// The key of a position is its score, large ones first, then its number in slot order; taken positions and NaN have none. Every sum runs
// over the batch from its beginning, one fused multiply-add a term, wherever it is calculated, so every pass sees the same bits.
//
// A walk over all positions: a warp takes eight rows (of doubles four) of 128 columns at a time, a lane four columns. Terms of x lie in
// shared memory, as long as the columns stay the same where the batch is small. Sums that can matter are few: signs of |sum| - least are
// gathered in a word, bits of taken positions are masked, and the others are looked at 32 at a time. What is surely chosen is taken at once,
// and what the bracket holds when the bound is known, so that one walk is enough. Only where a bracket failed all is taken by a walk of its own.
// Limits: instructions, about ten a position at a batch of 4. Read: dy and x once for every 64 x 128 positions, from L2.
#pragma once

#include "../pattern.cuh"
#include "../position_bits.cuh"
#include "kept.cuh"

namespace snack::cuda {

/// dy or x: float64 where sums are double, else any other type.
struct GradientOperand {
  const void* data;
  DType dtype;
  int64_t row_stride, col_stride;

  explicit GradientOperand(const MatrixView& m) : data(m.data), dtype(m.dtype), row_stride(m.row_stride), col_stride(m.col_stride) {}
  template <class Sum>
  __device__ __forceinline__ Sum at(int64_t row, int64_t col) const {
    const int64_t i = row * row_stride + col * col_stride;
    if constexpr (sizeof(Sum) == 8) return static_cast<const double*>(data)[i];
    else if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
    else if (dtype == DType::kFloat16) return to_float(static_cast<const __half*>(data)[i]);
    else return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
};

/// Positions that are taken: kept slots, or set bits where there are bits. A walk that takes positions sets their bits, but looks at each once.
struct TakenPositions {
  PositionBits bits;  // words may be null
  DevicePattern pattern;
  const uint32_t* kept;

  __device__ __forceinline__ bool is_kept_at(int64_t row, int64_t col) const {
    bool found;
    const int64_t slot = pattern.lower_bound(row, col, &found);
    return found && is_kept(kept, slot);
  }
};

template <class SumType, class KeyType>
struct GradientKeys {
  using Sum = SumType;
  using Key = KeyType;
  static constexpr int kScoreBits = sizeof(Sum) == 8 ? 63 : 31;
  using Bits = std::conditional_t<sizeof(Sum) == 8, uint64_t, uint32_t>;
  static constexpr Bits kLargest = ~Bits(0) >> 1;
  static constexpr Bits kInfinity = sizeof(Sum) == 4 ? Bits(0x7f800000u) : Bits(0x7ff0000000000000ull);

  GradientOperand dy, x;
  int64_t batch;
  TakenPositions taken;
  int index_bits;

  __device__ const Geometry& geometry() const { return taken.pattern.geometry; }
  __device__ int64_t count() const { return geometry().out * geometry().in; }
  __device__ int key_bits() const { return kScoreBits + index_bits; }
  __device__ int class_count() const { return 1; }

  __device__ static __forceinline__ Bits magnitude(Sum sum) {
    if constexpr (sizeof(Sum) == 8) return Bits(__double_as_longlong(sum)) & kLargest;
    else return __float_as_uint(sum) & kLargest;
  }
  __device__ int64_t panel_columns(int64_t panel) const { return min(int64_t{kPanelCols}, geometry().in - panel * kPanelCols); }
  __device__ __forceinline__ int64_t number_of(int64_t row, int64_t col) const {
    const int64_t panel = col >> kTileColBits;
    return panel * geometry().out * kPanelCols + row * panel_columns(panel) + (col & (kPanelCols - 1));
  }
  __device__ void position_of(int64_t number, int64_t* row, int64_t* col) const {
    const int64_t of_panel = geometry().out * kPanelCols;
    int64_t panel, inside;
    if (index_bits <= 32) panel = uint32_t(number) / uint32_t(min(of_panel, int64_t(~0u))), inside = number - panel * of_panel;
    else panel = number / of_panel, inside = number - panel * of_panel;
    const int64_t columns = panel_columns(panel);
    *row = index_bits <= 32 ? int64_t(uint32_t(inside) / uint32_t(columns)) : inside / columns;
    *col = panel * kPanelCols + (inside - *row * columns);
  }
  __device__ int64_t number_in(Key key) const { return int64_t(key & ((Key(1) << index_bits) - 1)); }
  __device__ __forceinline__ Key key_of(Sum sum, int64_t row, int64_t col) const {
    return (Key(Bits(kLargest - magnitude(sum))) << index_bits) | Key(number_of(row, col));
  }
  /// The smallest |sum| whose key may be `key` or less.
  __device__ Sum least(Key key) const {
    const Bits bits = kLargest - Bits(key >> index_bits), number = bits < kInfinity ? bits : kInfinity;
    if constexpr (sizeof(Sum) == 8) return __longlong_as_double(int64_t(number));
    else return __uint_as_float(number);
  }
  __device__ bool at(int64_t number, Key* key, int* which) const {
    int64_t row, col;
    position_of(number, &row, &col);
    Sum sum = 0;
#pragma unroll 1
    for (int64_t b = 0; b < batch; ++b) sum = fma(dy.at<Sum>(b, row), x.at<Sum>(b, col), sum);
    *key = key_of(sum, row, col);
    *which = 0;
    return !isnan(sum) && !taken.is_kept_at(row, col);
  }
};

/// Four numbers that are read at once.
template <class Sum>
struct alignas(16) Quad {
  Sum at[4];
};

template <class Sum>
struct GradientShared {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRows = 32 / int(sizeof(Sum));  // of a warp
  static constexpr int kUnitRows = kWarps * kRows, kUnitCols = 128;
  static constexpr int kTerms = 64 / int(sizeof(Sum));  // of the batch at a time
  Quad<Sum> x[kTerms][32];             // a lane's four columns
  Quad<Sum> dy[kWarps][kRows];         // four terms of each row
  Quad<Sum> sums[kWarps][kRows][32];
  uint16_t place[kWarps][128 * kRows];  // of a sum that matters: lane << 5 | row of the warp << 2 | column of the lane
};

/// A sum that matters, and where it stands.
template <class Sum>
struct Hit {
  Sum sum;
  int row, col;
};

/// One warp's walk over positions: 128 columns, four of them a lane's, by the rows of a warp.
template <class Keys>
class GradientWalk {
 public:
  using Sum = typename Keys::Sum;
  using Shared = GradientShared<Sum>;
  static constexpr int kRows = Shared::kRows;

  __device__ GradientWalk(const Keys& keys, Sum least, Shared& s) : keys_(keys), least_(least), s_(s) {}

  __device__ __forceinline__ void begin(int64_t row0, int64_t col0) {
    row0_ = row0, col0_ = col0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum_[r][c] = 0;
  }

  /// Adds `terms` products of the batch from b0 on; those of x lie in shared memory, and behind the last are zeros.
  __device__ __forceinline__ void add(int64_t b0, int terms) {
    Quad<Sum>(&dy)[kRows] = s_.dy[warp()];
#pragma unroll 1
    for (int t0 = 0; t0 < terms; t0 += 4) {
      const int r = lane() / 4, t = lane() % 4;
      if (r < kRows) dy[r].at[t] = row0_ + r < keys_.geometry().out && t0 + t < terms ? keys_.dy.template at<Sum>(b0 + t0 + t, row0_ + r) : Sum(0);
      __syncwarp();
      Quad<Sum> x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = s_.x[t0 + i][lane()];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const Quad<Sum> of_row = dy[row];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) sum_[row][c] = fma(of_row.at[i], x[i].at[c], sum_[row][c]);
      }
      __syncwarp();
    }
  }

  /// Gathers the sums that matter, and gives them to visit(exists, hit) 32 at a time; fewer wait for those of other rows.
  template <class Visit>
  __device__ __forceinline__ void finish(const Visit& visit) {
    const uint32_t hits = ~(below() | taken());
    int upto = __popc(hits);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane() >= d) upto += other;
    }
    const int found = __shfl_sync(~0u, upto, 31);
    if (found == 0) return;
    int at = upto - __popc(hits);
#pragma unroll
    for (int r = 0; r < kRows; ++r) s_.sums[warp()][r][lane()] = {{sum_[r][0], sum_[r][1], sum_[r][2], sum_[r][3]}};
    for (uint32_t left = hits; left != 0; left &= left - 1) s_.place[warp()][at++] = uint16_t(lane() << 5 | (__ffs(int(left)) - 1));
    __syncwarp();
    for (int next = -waiting_;; next += 32) {  // the first lanes keep what waited
      const int i = next + lane();
      if (i >= 0 && i < found) hit_ = read(s_.place[warp()][i]);
      if (next + 32 > found) {
        waiting_ = found - next;
        break;
      }
      visit(true, hit_);
    }
    __syncwarp();
  }

  /// Once, at the end.
  template <class Visit>
  __device__ __forceinline__ void give_rest(const Visit& visit) {
    if (waiting_ > 0) visit(lane() < waiting_, hit_);
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static uint32_t sign_word(float number) { return __float_as_uint(number); }
  __device__ static uint32_t sign_word(double number) { return uint32_t(__double2hiint(number)); }

  /// Bit 4 row + column: whether the sum lies below the least that matters; NaN does not.
  __device__ __forceinline__ uint32_t below() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 4 * kRows - 1; i >= 0; --i) bits = __funnelshift_l(sign_word(fabs(sum_[i / 4][i % 4]) - least_), bits, 1);
    return bits;
  }
  /// The same bits: whether the position is taken, as far as bits tell, or none at all.
  __device__ __forceinline__ uint32_t taken() const {
    const Geometry& g = keys_.geometry();
    const PositionBits& bits = keys_.taken.bits;
    const int64_t panel = col0_ >> kTileColBits, row = row0_ + lane() / 4;
    const int word = int((col0_ & (kPanelCols - 1)) >> 5) + lane() % 4;
    const bool exists = lane() < 4 * kRows && row < g.out && word < bits.width(panel);
    const uint32_t columns = exists ? columns_from(g.in - (panel * kPanelCols + 32 * word)) : 0u;
    const uint32_t mine = ~columns | (exists && bits.words != nullptr ? bits.row(panel, row)[word] : 0u);
    uint32_t found = kRows < 8 ? ~0u << (4 * kRows % 32) : 0u;
#pragma unroll
    for (int r = 0; r < kRows; ++r) found |= ((__shfl_sync(~0u, mine, 4 * r + lane() / 8) >> (lane() % 8 * 4)) & 15u) << (4 * r);
    return found;
  }
  __device__ static uint32_t columns_from(int64_t left) { return left >= 32 ? ~0u : (1u << left) - 1; }

  __device__ __forceinline__ Hit<Sum> read(int place) const {
    const int of_lane = place >> 5, r = (place >> 2) & 7, c = place & 3;
    return {s_.sums[warp()][r][of_lane].at[c], int(row0_) + r, int(col0_) + 4 * of_lane + c};
  }

  const Keys& keys_;
  const Sum least_;
  Shared& s_;
  Sum sum_[kRows][4];
  int64_t row0_ = 0, col0_ = 0;
  Hit<Sum> hit_{};
  int waiting_ = 0;  // lanes whose hit was not given yet
};

// Calls visit(exists, hit), all lanes of a warp together, for every empty position with |sum| >= least.
template <class Keys, class Visit>
__device__ __forceinline__ void walk_gradient(const Keys& keys, typename Keys::Sum least, GradientShared<typename Keys::Sum>& s, const Visit& visit) {
  using Sum = typename Keys::Sum;
  using Shared = GradientShared<Sum>;
  const Geometry& g = keys.geometry();
  const auto visit_empty = [&](bool exists, const Hit<Sum>& hit) {
    exists = exists && !isnan(hit.sum);
    if (keys.taken.bits.words == nullptr) exists = exists && !keys.taken.is_kept_at(hit.row, hit.col);
    visit(exists, hit);
  };
  const int64_t strips = (g.out + Shared::kUnitRows - 1) / Shared::kUnitRows, slices = (g.in + Shared::kUnitCols - 1) / Shared::kUnitCols;
  const int64_t units = strips * slices, first = units * blockIdx.x / gridDim.x, last = units * (blockIdx.x + 1) / gridDim.x;
  int64_t slice = first / strips, strip = first % strips, staged_slice = -1;
  GradientWalk<Keys> walk(keys, least, s);
  for (int64_t unit = first; unit < last; ++unit, ++strip) {
    if (strip == strips) strip = 0, ++slice;
    const int64_t col0 = slice * Shared::kUnitCols;
    walk.begin(strip * Shared::kUnitRows + threadIdx.x / 32 * Shared::kRows, col0);
    for (int64_t b0 = 0; b0 < keys.batch; b0 += Shared::kTerms) {
      const int terms = int(min(int64_t{Shared::kTerms}, keys.batch - b0));
      if (slice != staged_slice || keys.batch > Shared::kTerms) {
        __syncthreads();
        for (int i = threadIdx.x; i < (terms + 3) / 4 * 4 * Shared::kUnitCols; i += kThreads) {
          const int t = i / Shared::kUnitCols, c = i % Shared::kUnitCols;
          s.x[t][c / 4].at[c % 4] = t < terms && col0 + c < g.in ? keys.x.template at<Sum>(b0 + t, col0 + c) : Sum(0);
        }
        __syncthreads();
      }
      staged_slice = slice;
      walk.add(b0, terms);
    }
    walk.finish(visit_empty);
  }
  walk.give_rest(visit_empty);
}

template <class Keys>
struct SiftShared {
  GradientShared<typename Keys::Sum> walk;
  SieveShared<typename Keys::Key> sieve;
};
static_assert(sizeof(SiftShared<GradientKeys<float, Key64>>) <= kLeastShared && sizeof(SiftShared<GradientKeys<float, Key128>>) <= kLeastShared &&
              sizeof(SiftShared<GradientKeys<double, Key128>>) <= kLeastShared);

/// take(is_taken, key, row, col), all lanes of a warp together: gets what lies below the bracket, where is_taking.
template <class Keys, class Taker>
__global__ void __launch_bounds__(kThreads, 2) sift_gradient(Keys keys, Choice<typename Keys::Key>* choice, typename Keys::Key* list, int64_t capacity, Taker take,
                                                          bool is_taking) {
  using Key = typename Keys::Key;
  extern __shared__ float4 shared[];
  auto& s = *reinterpret_cast<SiftShared<Keys>*>(shared);
  await_stream();
  if (choice->is_settled) return;
  Sieve<Key> sieve(choice, list, capacity, s.sieve);
  walk_gradient(keys, keys.least(choice->bracket[0].hi), s.walk, [&](bool exists, const Hit<typename Keys::Sum>& hit) {
    const Key key = keys.key_of(hit.sum, hit.row, hit.col);
    const bool is_below = sieve.list(exists, key, 0);
    sieve.count_below(is_below, false);
    if (is_taking) take(is_below, key, hit.row, hit.col);
  });
  sieve.finish();
}

/// Takes what the sift has not: of its list, what is below the bound; or all positions below it.
template <class Keys, class Taker>
__global__ void __launch_bounds__(kThreads, 2) take_gradient(Keys keys, const Choice<typename Keys::Key>* choice, const typename Keys::Key* list, Taker take) {
  using Key = typename Keys::Key;
  extern __shared__ float4 shared[];
  auto& s = *reinterpret_cast<GradientShared<typename Keys::Sum>*>(shared);
  await_stream();
  const Key bound = choice->bound[0];
  if (bound == 0) return;
  if (choice->is_listed) {
    const int64_t listed = int64_t(choice->listed), lane = threadIdx.x % 32;
    for (int64_t i = thread_number(); i - lane < listed; i += int64_t(gridDim.x) * kThreads) {
      const Key key = i < listed ? list[i] : ~Key{0};
      int64_t row = 0, col = 0;
      if (key < bound) keys.position_of(keys.number_in(key), &row, &col);
      take(key < bound, key, row, col);
    }
    return;
  }
  walk_gradient(keys, keys.least(bound - 1), s, [&](bool exists, const Hit<typename Keys::Sum>& hit) {
    const Key key = keys.key_of(hit.sum, hit.row, hit.col);
    take(exists && key < bound, key, hit.row, hit.col);
  });
}

/// Takes positions by setting their bits.
struct IntoBits {
  PositionBits bits;
  template <class Key>
  __device__ __forceinline__ void operator()(bool is_chosen, Key, int64_t row, int64_t col) const {
    if (is_chosen) atomicOr(bits.word(row, col), 1u << (col & 31));
  }
};

/// Takes positions into a list, in any order: their choice keys (kByKey), or their slot keys.
template <class Entry, bool kByKey>
struct IntoList {
  Entry* list;
  int64_t room;
  unsigned long long* count;
  template <class Key>
  __device__ __forceinline__ void operator()(bool is_chosen, Key key, int64_t row, int64_t col) const {
    const uint32_t chosen = __ballot_sync(~0u, is_chosen);
    if (chosen == 0) return;
    const int lane = threadIdx.x % 32;
    unsigned long long begin = 0;
    if (lane == 0) begin = atomicAdd(count, static_cast<unsigned long long>(__popc(chosen)));
    const int64_t at = int64_t(__shfl_sync(~0u, begin, 0)) + __popc(chosen & ((1u << lane) - 1));
    if (!is_chosen || at >= room) return;
    if constexpr (kByKey) list[at] = key;
    else list[at] = slot_key(row, col);
  }
};

/// Calls f with the keys of a problem: double sums for float64; keys of 64 bits where 32 tell the positions apart.
template <class F>
void with_gradient_keys(const MatrixView& dy, const MatrixView& x, const TakenPositions& taken, F&& f) {
  const Geometry& g = taken.pattern.geometry;
  const int index_bits = bits_for(g.out * g.in);
  if (x.dtype == DType::kFloat64) f(GradientKeys<double, Key128>{GradientOperand(dy), GradientOperand(x), x.rows, taken, index_bits});
  else if (index_bits > 32) f(GradientKeys<float, Key128>{GradientOperand(dy), GradientOperand(x), x.rows, taken, index_bits});
  else f(GradientKeys<float, Key64>{GradientOperand(dy), GradientOperand(x), x.rows, taken, index_bits});
}
inline bool has_wide_keys(const Geometry& g, DType dtype) { return dtype == DType::kFloat64 || bits_for(g.out * g.in) > 32; }

/// Keys that a choice by gradient asks room for at least; more of them make a second look less likely.
inline constexpr int64_t kGradientCapacity = 1 << 17;

/// Positions that one block looks at.
inline int64_t few_positions(int64_t batch) { return std::clamp<int64_t>((1 << 18) / std::max<int64_t>(1, batch), 1 << 11, kFewThings); }

/// Whether a sample's bracket for k of `positions` is likely to hold no more than the list; if not, looks narrow it.
inline bool is_list_enough(int64_t positions, int64_t k, int64_t samples, int64_t list_capacity) {
  const double part = double(samples) / double(positions), expected = part * double(k), margin = 6 * std::sqrt(expected) + 8;
  return 1.3 * (margin + std::min(expected, margin)) / part <= double(list_capacity);
}

template <class Sum>
int64_t gradient_blocks(const Geometry& g) {
  const int64_t units = ceil_div(g.out, GradientShared<Sum>::kUnitRows) * ceil_div(g.in, GradientShared<Sum>::kUnitCols);
  return std::min<int64_t>(units, 2 * capability(current_device()).multiprocessors);
}

/// The choice of k positions, or *wanted where that is fewer; they are given to `take`, which starts anew after reset(), if it must.
template <class Keys, class Taker, class Reset>
void choose_gradient(const char* operation, const Keys& keys, const Geometry& g, int64_t k, const int64_t* wanted, const ChoiceMemory<typename Keys::Key>& memory,
                     const Report& report, const Taker& take, Stream stream, const Reset& reset) {
  using Sum = typename Keys::Sum;
  const int64_t positions = g.out * g.in, blocks = gradient_blocks<Sum>(g);
  const int looks = is_list_enough(positions, k, kSamples<typename Keys::Key>, memory.list_capacity()) ? 1 : 3;
  choose(operation, keys, positions, few_positions(keys.batch), looks, {.of = wanted}, memory, report, stream, [&] {
    launch<sift_gradient<Keys, Taker>>(operation, blocks, kThreads, int64_t(sizeof(SiftShared<Keys>)), stream, keys, memory.choice, memory.list(),
                                       memory.list_capacity(), take, looks == 1);
  });
  if (positions > few_positions(keys.batch)) reset();
  launch<take_gradient<Keys, Taker>>(operation, blocks, kThreads, int64_t(sizeof(GradientShared<Sum>)), stream, keys, memory.choice, memory.list(), take);
}

}  // namespace snack::cuda
