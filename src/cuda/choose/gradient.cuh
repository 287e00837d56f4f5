// Growth by gradient: the wanted empty positions of largest |dy^T x|, as a choice among all positions (choice.cuh).
//
// The key of a position is its score, large ones first, then its number in slot order; taken positions and NaN have none. Every sum runs
// over the batch from its beginning, one fused multiply-add a term, wherever it is calculated, so every pass sees the same bits.
//
// A walk over all positions: a block takes 64 rows (of doubles 32) of 128 columns at a time, a warp eight of the rows, a lane every 32nd
// column. Eight terms of the batch lie in shared memory, those of x as long as the columns stay the same. Sums that can matter are few: a warp
// gathers them in shared memory, and looks 32 at a time whether their position is empty. What is surely chosen is taken at once, and what the
// bracket holds when the bound is known, so that one walk is enough. Only where a bracket failed all is taken by a walk of its own.
// Limits: instructions, about fifteen a position at a batch of 4. Read: dy and x once for every 64 x 128 positions, from L2.
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

  __device__ __forceinline__ bool contains(int64_t row, int64_t col) const {
    if (bits.words != nullptr) return (*bits.word(row, col) >> (col & 31)) & 1;
    return is_kept_at(row, col);
  }
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

template <class Sum>
struct GradientShared {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRows = 32 / int(sizeof(Sum));  // of a warp
  static constexpr int kCols = 4;                      // of a lane
  static constexpr int kUnitRows = kWarps * kRows, kUnitCols = 32 * kCols;
  static constexpr int kTerms = 8;                     // of the batch at a time
  static constexpr int kHits = 32 * kRows * kCols;     // as many as a warp can find in a unit
  Sum x[kTerms][kUnitCols];
  Sum dy[kTerms][kUnitRows];
  Sum sum[kWarps][kHits];
  uint16_t place[kWarps][kHits];  // row of the warp << 8 | column in unit
};

// Calls visit(exists, sum, row, col), all lanes of a warp together, for every position with |sum| >= least.
template <class Keys, class Visit>
__device__ __forceinline__ void walk_gradient(const Keys& keys, typename Keys::Sum least, GradientShared<typename Keys::Sum>& s, const Visit& visit) {
  using Sum = typename Keys::Sum;
  using Shared = GradientShared<Sum>;
  constexpr int kRows = Shared::kRows, kCols = Shared::kCols;
  const Geometry& g = keys.geometry();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Sum nothing = Sum(NAN);  // of a row or column that is not there: it matters nowhere
  const int64_t strips = (g.out + Shared::kUnitRows - 1) / Shared::kUnitRows, slices = (g.in + Shared::kUnitCols - 1) / Shared::kUnitCols;
  const int64_t units = strips * slices, last = units * (blockIdx.x + 1) / gridDim.x;
  int64_t staged_slice = -1;
  for (int64_t unit = units * blockIdx.x / gridDim.x; unit < last; ++unit) {
    const int64_t slice = unit / strips, row0 = unit % strips * Shared::kUnitRows, col0 = slice * Shared::kUnitCols, warp_row0 = row0 + warp * kRows;
    Sum sum[kRows][kCols];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) sum[r][c] = (warp_row0 + r < g.out ? Sum(0) : nothing) + (col0 + 32 * c + lane < g.in ? Sum(0) : nothing);
    for (int64_t b0 = 0; b0 < keys.batch; b0 += Shared::kTerms) {
      const int terms = int(min(int64_t{Shared::kTerms}, keys.batch - b0));
      __syncthreads();
      if (slice != staged_slice || keys.batch > Shared::kTerms)
        for (int i = threadIdx.x; i < terms * Shared::kUnitCols; i += kThreads) {
          const int b = i / Shared::kUnitCols, c = i % Shared::kUnitCols;
          s.x[b][c] = col0 + c < g.in ? keys.x.template at<Sum>(b0 + b, col0 + c) : Sum(0);
        }
      for (int i = threadIdx.x; i < terms * Shared::kUnitRows; i += kThreads) {
        const int b = i / Shared::kUnitRows, r = i % Shared::kUnitRows;
        s.dy[b][r] = row0 + r < g.out ? keys.dy.template at<Sum>(b0 + b, row0 + r) : Sum(0);
      }
      staged_slice = slice;
      __syncthreads();
      for (int b = 0; b < terms; ++b) {
        Sum x[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) x[c] = s.x[b][32 * c + lane];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Sum dy = s.dy[b][warp * kRows + r];
#pragma unroll
          for (int c = 0; c < kCols; ++c) sum[r][c] = fma(dy, x[c], sum[r][c]);
        }
      }
    }

    int mine = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) mine += fabs(sum[r][c]) >= least;
    int upto = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    const int hits = __shfl_sync(~0u, upto, 31);
    if (hits == 0) continue;
    int at = upto - mine;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        if (fabs(sum[r][c]) >= least) {
          s.sum[warp][at] = sum[r][c];
          s.place[warp][at++] = uint16_t(r << 8 | (32 * c + lane));
        }
    __syncwarp();
    for (int i = lane; i - lane < hits; i += 32) {
      const bool exists = i < hits;
      const int place = exists ? s.place[warp][i] : 0;
      visit(exists, exists ? s.sum[warp][i] : Sum(0), warp_row0 + (place >> 8), col0 + (place & 0xff));
    }
    __syncwarp();
  }
}

template <class Keys>
struct SiftShared {
  GradientShared<typename Keys::Sum> walk;
  typename Keys::Key staged[kThreads / 32][kStaged<typename Keys::Key>];
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
  Sieve<Key> sieve(choice, list, capacity, s.staged[threadIdx.x / 32]);
  walk_gradient(keys, keys.least(choice->bracket[0].hi), s.walk, [&](bool exists, typename Keys::Sum sum, int64_t row, int64_t col) {
    const Key key = keys.key_of(sum, row, col);
    const bool is_below = sieve.list(exists && !keys.taken.contains(row, col), key, 0);
    sieve.count_below(is_below, false);
    if (is_taking) take(is_below, key, row, col);
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
  walk_gradient(keys, keys.least(bound - 1), s, [&](bool exists, typename Keys::Sum sum, int64_t row, int64_t col) {
    const Key key = keys.key_of(sum, row, col);
    take(exists && key < bound && !keys.taken.contains(row, col), key, row, col);
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
