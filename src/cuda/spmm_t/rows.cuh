// spmm_t, regime stream, narrow tiles with row starts: dx (batch, in) = dy (batch, out) W.
//
// A block owns one panel (1024 columns), W batch columns and a range of rows. Every warp has column sums of its own in shared
// memory (1024 x W floats): the slots of one row have distinct columns, so a warp that takes one row at a time adds to them
// without atomics, in float, whatever Inf, NaN or outlier comes. Phases, for kStagedRows rows at a time:
//   stage   their rows of dy (W floats a row) and where their slots begin
//   walk    warps take runs of rows with equal numbers of slots; a step is up to kAtOnce x 32 slots of one row, kAhead steps are
//           under way
// At the end the warps' sums are added in order. With one split dx is written in its dtype, else float partials
// (splits, batch, in) are, for finish(). Every addition has a fixed place: results repeat bit for bit.
// Read: nnz * (2 + value). Limit: read-add-write of shared memory.
#pragma once

#include "stream.cuh"

namespace snack::cuda {

template <class T>
struct SpmmTRows : SpmmTNarrow<T> {
  const uint16_t* row_starts;
  int64_t rows_a_split;
};

// Up to kAtOnce x 32 slots of one row, as loaded.
template <class T, int kAtOnce>
struct RowStep {
  uint32_t word[kAtOnce];
  T value[kAtOnce];
  int row, count;  // row -1: none

  __device__ __forceinline__ bool has(int u) const { return 32 * u + int(threadIdx.x % 32) < count; }
};

// A warp's way through the rows [row, stop), whose slots begin at start[row].
template <class T, int kAtOnce>
struct RowSteps {
  const uint16_t* index;
  const T* values;
  const int* start;
  int row, stop, at, end;

  __device__ __forceinline__ RowSteps(const uint16_t* index, const T* values, const int* start, int first, int stop)
      : index(index), values(values), start(start), row(first), stop(stop), at(start[first]), end(first < stop ? start[first + 1] : at) {}

  __device__ __forceinline__ void fetch(RowStep<T, kAtOnce>& step) {
    while (at >= end) {
      if (++row >= stop) {
        row = stop, step.row = -1;
        return;
      }
      end = start[row + 1];
    }
    step.row = row, step.count = end - at;
    const int slot = at + threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (step.has(u)) step.word[u] = __ldg(index + slot + 32 * u), step.value[u] = values[slot + 32 * u];
    at = min(end, at + 32 * kAtOnce);
  }
};

template <int W, int kAtOnce, class T>
__device__ __forceinline__ void add_step(const RowStep<T, kAtOnce>& step, const float* dy, float* sums) {
  Vector<W> scale, sum[kAtOnce];
  scale.load(dy + step.row * W);
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u)
    if (step.has(u)) sum[u].load(sums + (step.word[u] & (kPanelCols - 1)) * W);
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    if (!step.has(u)) continue;
    sum[u].add(to_float(step.value[u]), scale);
    sum[u].store(sums + (step.word[u] & (kPanelCols - 1)) * W);
  }
  __syncwarp();
}

template <class T, int W, int kAtOnce>
__global__ void __launch_bounds__(1024) spmm_t_rows(const __grid_constant__ SpmmTRows<T> a) {
  constexpr int kAhead = 8 / kAtOnce;
  extern __shared__ float4 shared[];
  __shared__ int start[kStagedRows + 1];
  float* sums = reinterpret_cast<float*>(shared);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  float* dy = sums + warps * kPanelCols * W;
  const uint32_t group = blockIdx.x / a.panels, split = group % a.splits, panel = blockIdx.x % a.panels;
  const int64_t b0 = int64_t(group / a.splits) * W;
  const int count = int(min(int64_t(W), a.batch - b0));
  const int64_t last_row = min(a.out, (split + 1) * a.rows_a_split);
  for (int i = threadIdx.x; i < warps * kPanelCols * W / 4; i += blockDim.x) shared[i] = make_float4(0.f, 0.f, 0.f, 0.f);

  const int64_t* tiles = a.tile_ptr + int64_t(panel) * a.strips;
  const uint16_t* row_starts = a.row_starts + int64_t(panel) * a.out;
  const auto begin_of = [&](int64_t row) { return row == a.out ? tiles[a.strips] : tiles[row / kStripRows] + row_starts[row]; };
  for (int64_t row0 = split * a.rows_a_split; row0 < last_row; row0 += kStagedRows) {
    const int rows = int(min(int64_t(kStagedRows), last_row - row0));
    const int64_t first = begin_of(row0);
    __syncthreads();
    for (int i = threadIdx.x; i <= rows; i += blockDim.x) start[i] = int(begin_of(row0 + i) - first);
#pragma unroll
    for (int b = 0; b < W; ++b)
      for (int i = threadIdx.x; i < rows; i += blockDim.x) dy[i * W + b] = b < count ? a.dy(a.b0 + b0 + b, row0 + i) : 0.f;
    __syncthreads();
    // The rows in which the warp's equal share of the slots begins and ends.
    const auto row_at = [&](int number) {
      if (number == warps) return rows;
      const int slot = int(int64_t(start[rows]) * number / warps);
      int low = 0, high = rows;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (start[middle] < slot) low = middle + 1;
        else high = middle;
      }
      return low;
    };
    RowSteps<T, kAtOnce> steps(a.index + first, a.values + first, start, row_at(warp), row_at(warp + 1));
    RowStep<T, kAtOnce> ahead[kAhead];
#pragma unroll
    for (int d = 0; d < kAhead; ++d) steps.fetch(ahead[d]);
    while (ahead[0].row >= 0) {
#pragma unroll
      for (int d = 0; d < kAhead; ++d) {
        if (ahead[d].row < 0) continue;
        add_step<W>(ahead[d], dy, sums + warp * kPanelCols * W);
        steps.fetch(ahead[d]);
      }
    }
  }
  __syncthreads();
  const int cols = int(min(int64_t(kPanelCols), a.in - int64_t(panel) * kPanelCols));
  for (int c = threadIdx.x; c < cols; c += blockDim.x) {
    Vector<W> sum, one;
    sum.load(sums + c * W);
    for (int w = 1; w < warps; ++w) {
      one.load(sums + (w * kPanelCols + c) * W);
      sum.add(1.f, one);
    }
    const int64_t at = int64_t(panel) * kPanelCols + c;
#pragma unroll
    for (int b = 0; b < W; ++b) {
      if (b >= count) break;
      if (a.partials != nullptr) a.partials[(split * a.batch + b0 + b) * a.in + at] = sum.of[b];
      else a.dx[(a.b0 + b0 + b) * a.in + at] = from_float<T>(sum.of[b]);
    }
  }
}

}  // namespace snack::cuda
