// Growth by gradient: the wanted empty positions of largest |dy^T x|, as a choice among all positions (choice.cuh).
//
// The key of a position is its score, large ones first, then its number in slot order; taken positions and NaN have none. Every sum runs
// over the batch from its beginning, one fused multiply-add a term, wherever it is calculated, so every pass sees the same bits.
//
// A walk over all positions: a block takes 16 rows (of doubles 8) of a panel of 1,024 columns at a time, a thread four columns of them.
// Eight rows of the batch of x lie in shared memory, as long as the panel stays the same. Sums that can matter are few: a warp gathers them
// in shared memory, and looks at 32 at a time whether their position is empty.
// Limits: a compare and a vote for every position, and its multiply-adds. Read: x once a block and panel, dy once a panel, from L2.
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

/// Positions that are taken: set bits, or kept slots where there are no bits.
struct TakenPositions {
  PositionBits bits;  // words may be null
  DevicePattern pattern;
  const uint32_t* kept;

  __device__ __forceinline__ bool contains(int64_t row, int64_t col) const {
    if (bits.words != nullptr) return (*bits.word(row, col) >> (col & 31)) & 1;
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
    const int64_t panel = number / (geometry().out * kPanelCols), inside = number - panel * geometry().out * kPanelCols, columns = panel_columns(panel);
    *row = inside / columns;
    *col = panel * kPanelCols + inside % columns;
  }
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
    for (int64_t b = 0; b < batch; ++b) sum = fma(dy.at<Sum>(b, row), x.at<Sum>(b, col), sum);
    *key = key_of(sum, row, col);
    *which = 0;
    return !isnan(sum) && !taken.contains(row, col);
  }
};

template <class Sum>
struct GradientShared {
  static constexpr int kCols = kPanelCols / kThreads;            // of a thread
  static constexpr int kRows = 64 / int(sizeof(Sum));            // of a unit of work
  static constexpr int kBatch = 32 / int(sizeof(Sum));           // rows of the batch at a time
  static constexpr int kRowsAtOnce = 16 / int(sizeof(Sum));      // between two looks whether hits must be visited
  static constexpr int kMostHits = 1024 / int(sizeof(Sum));      // that a warp keeps over a look
  static constexpr int kHits = kMostHits + 32 * kCols * kRowsAtOnce;
  Sum x[kBatch][kPanelCols];
  Sum dy[kBatch][kRows];
  Sum sum[kThreads / 32][kHits];
  uint32_t place[kThreads / 32][kHits];  // row in unit << 10 | column in panel
};

// Calls visit(exists, sum, row, col), all lanes of a warp together, for every position with |sum| >= least.
template <class Keys, class Visit>
__device__ void walk_gradient(const Keys& keys, typename Keys::Sum least, GradientShared<typename Keys::Sum>& s, const Visit& visit) {
  using Sum = typename Keys::Sum;
  using Shared = GradientShared<Sum>;
  constexpr int kRows = Shared::kRows, kCols = Shared::kCols;
  const Geometry& g = keys.geometry();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t groups = (g.out + kRows - 1) / kRows, units = g.panels() * groups;
  const int64_t last = units * (blockIdx.x + 1) / gridDim.x;
  int64_t staged_panel = -1;
  for (int64_t unit = units * blockIdx.x / gridDim.x; unit < last; ++unit) {
    const int64_t panel = unit / groups, row0 = unit % groups * kRows, col0 = panel * kPanelCols;
    Sum sum[kRows][kCols];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) sum[r][c] = 0;
    for (int64_t b0 = 0; b0 < keys.batch; b0 += Shared::kBatch) {
      const int terms = int(min(int64_t{Shared::kBatch}, keys.batch - b0));
      __syncthreads();
      if (panel != staged_panel || keys.batch > Shared::kBatch)
        for (int i = threadIdx.x; i < terms * kPanelCols; i += kThreads) {
          const int b = i / kPanelCols, c = i % kPanelCols;
          s.x[b][c] = col0 + c < g.in ? keys.x.template at<Sum>(b0 + b, col0 + c) : Sum(0);
        }
      for (int i = threadIdx.x; i < terms * kRows; i += kThreads) {
        const int b = i / kRows, r = i % kRows;
        s.dy[b][r] = row0 + r < g.out ? keys.dy.template at<Sum>(b0 + b, row0 + r) : Sum(0);
      }
      staged_panel = panel;
      __syncthreads();
      for (int b = 0; b < terms; ++b) {
        Sum x[kCols];
#pragma unroll
        for (int c = 0; c < kCols; ++c) x[c] = s.x[b][c * kThreads + threadIdx.x];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const Sum dy = s.dy[b][r];
#pragma unroll
          for (int c = 0; c < kCols; ++c) sum[r][c] = fma(dy, x[c], sum[r][c]);
        }
      }
    }

    int hits = 0;
    const auto visit_hits = [&] {
      __syncwarp();
      for (int i = lane; i - lane < hits; i += 32) {
        const bool exists = i < hits;
        const uint32_t place = exists ? s.place[warp][i] : 0u;
        visit(exists, exists ? s.sum[warp][i] : Sum(0), row0 + (place >> kTileColBits), col0 + (place & (kPanelCols - 1)));
      }
      __syncwarp();
      hits = 0;
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r % Shared::kRowsAtOnce == 0 && hits > Shared::kMostHits) visit_hits();
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        const int col = c * kThreads + int(threadIdx.x);
        const bool is_hit = fabs(sum[r][c]) >= least && row0 + r < g.out && col0 + col < g.in;
        const uint32_t found = __ballot_sync(~0u, is_hit);
        if (found == 0) continue;
        if (is_hit) {
          const int at = hits + __popc(found & ((1u << lane) - 1));
          s.sum[warp][at] = sum[r][c];
          s.place[warp][at] = uint32_t(r << kTileColBits | col);
        }
        hits += __popc(found);
      }
    }
    visit_hits();
  }
}

template <class Keys>
struct SiftShared {
  GradientShared<typename Keys::Sum> walk;
  typename Keys::Key staged[kThreads / 32][kStaged<typename Keys::Key>];
};
static_assert(sizeof(SiftShared<GradientKeys<float, Key64>>) <= kLeastShared && sizeof(SiftShared<GradientKeys<float, Key128>>) <= kLeastShared &&
              sizeof(SiftShared<GradientKeys<double, Key128>>) <= kLeastShared);

template <class Keys>
__global__ void __launch_bounds__(kThreads, sizeof(typename Keys::Sum) == 8 ? 1 : 2)
    sift_gradient(Keys keys, Choice<typename Keys::Key>* choice, typename Keys::Key* list, int64_t capacity) {
  using Key = typename Keys::Key;
  extern __shared__ float4 shared[];
  auto& s = *reinterpret_cast<SiftShared<Keys>*>(shared);
  await_stream();
  if (choice->is_settled) return;
  Sieve<Key> sieve(choice, list, capacity, s.staged[threadIdx.x / 32]);
  walk_gradient(keys, keys.least(choice->hi[0]), s.walk, [&](bool exists, typename Keys::Sum sum, int64_t row, int64_t col) {
    sieve.offer(exists && !keys.taken.contains(row, col), keys.key_of(sum, row, col), 0);
  });
  sieve.finish();
}

/// Gives every chosen position to the taker, all lanes of a warp together: take(is_chosen, key, row, col).
template <class Keys, class Taker>
__global__ void __launch_bounds__(kThreads, sizeof(typename Keys::Sum) == 8 ? 1 : 2) take_gradient(Keys keys, const Choice<typename Keys::Key>* choice, Taker take) {
  using Key = typename Keys::Key;
  extern __shared__ float4 shared[];
  auto& s = *reinterpret_cast<GradientShared<typename Keys::Sum>*>(shared);
  await_stream();
  const Key bound = choice->bound[0];
  if (bound == 0) return;
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

inline constexpr int64_t kMostSamples = 1 << 16;
/// Keys that a choice by gradient asks room for at least; more of them make a second look less likely.
inline int64_t gradient_capacity() { return 2 * kMostSamples; }

/// What to look at for k of `positions`: the fewest samples whose bracket is likely to hold no more than a 64th of the positions and the list.
inline ChoicePlan gradient_plan(int64_t positions, int64_t k, int64_t batch, int64_t capacity) {
  ChoicePlan plan;
  plan.few = std::clamp<int64_t>((1 << 18) / std::max<int64_t>(1, batch), 1 << 11, kFewThings);
  for (plan.samples = 1 << 14;; plan.samples *= 2) {
    const double part = double(plan.samples) / double(positions), expected = part * double(k), margin = 6 * std::sqrt(expected) + 8;
    const double inside = (margin + std::min(expected, margin)) / part;
    const bool fits = 1.3 * inside <= double(capacity - plan.samples);
    if (fits && inside <= double(positions) / 64) return plan;
    if (plan.samples < kMostSamples) continue;
    plan.looks = fits ? 1 : 3;
    return plan;
  }
}

inline int64_t gradient_blocks(const Geometry& g, bool is_double) {
  const int64_t units = g.panels() * ceil_div(g.out, is_double ? GradientShared<double>::kRows : GradientShared<float>::kRows);
  return std::min<int64_t>(units, (is_double ? 1 : 2) * capability(current_device()).multiprocessors);
}

template <class Keys>
void choose_gradient(const char* operation, const Keys& keys, const Geometry& g, int64_t k, const int64_t* wanted, const ChoiceMemory<typename Keys::Key>& memory,
                     const Report& report, Stream stream) {
  const ChoicePlan plan = gradient_plan(g.out * g.in, k, keys.batch, memory.capacity);
  choose(operation, keys, g.out * g.in, {.of = wanted}, memory, plan, report, stream, [&](typename Keys::Key* list, int64_t capacity) {
    launch<sift_gradient<Keys>>(operation, gradient_blocks(g, sizeof(typename Keys::Sum) == 8), kThreads, int64_t(sizeof(SiftShared<Keys>)), stream, keys, memory.choice,
                                list, capacity);
  });
}

template <class Keys, class Taker>
void take_chosen(const char* operation, const Keys& keys, const Geometry& g, const Choice<typename Keys::Key>* choice, const Taker& take, Stream stream) {
  launch<take_gradient<Keys, Taker>>(operation, gradient_blocks(g, sizeof(typename Keys::Sum) == 8), kThreads, int64_t(sizeof(GradientShared<typename Keys::Sum>)), stream,
                                     keys, choice, take);
}

}  // namespace snack::cuda
