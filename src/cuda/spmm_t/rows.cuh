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

#include "../shared.cuh"
#include "args.cuh"
#include "plan/cuda_layout.hpp"

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
  uint32_t dy;  // address of the row's; 0: there is no such step
  int count;    // of the lane's slots and those behind them

  __device__ __forceinline__ bool has(int u) const { return 32 * u < count; }

  /// sums: address of the warp's.
  template <int W>
  __device__ __forceinline__ void add(uint32_t sums) const {
    float scale[W], sum[kAtOnce][W];
    uint32_t at[kAtOnce];
    read_shared<W>(dy, scale);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      at[u] = sums + (word[u] & (kPanelCols - 1)) * (4 * W);  // of any word where there is no slot, and then not used
      if (has(u)) read_shared<W>(at[u], sum[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (!has(u)) continue;
      const float v = to_float(value[u]);
#pragma unroll
      for (int b = 0; b < W; ++b) sum[u][b] = fmaf(v, scale[b], sum[u][b]);
      write_shared<W>(at[u], sum[u]);
    }
    __syncwarp();
  }
};

// A warp's way through consecutive rows; it begins behind the row in front of the first.
template <class T, int W, int kAtOnce>
struct RowSteps {
  const uint16_t* index;   // of slot 0, for this lane
  const T* values;
  uint32_t ends, dy;       // addresses: where the next row's slots end, the row's dy
  int rows, at, end;       // rows after this one; slots

  /// Loads the next step, if there is one.
  __device__ __forceinline__ void fetch(RowStep<T, kAtOnce>& step) {
    step.dy = 0;
    while (at >= end) {
      if (--rows < 0) return;
      end = read_shared<int>(ends);
      ends += 4, dy += 4 * W;
    }
    step.dy = dy, step.count = end - at - int(threadIdx.x % 32);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (step.has(u)) step.word[u] = index[at + 32 * u], step.value[u] = values[at + 32 * u];
    at = min(end, at + 32 * kAtOnce);
  }
};

// The warp's: the first of `rows` rows whose slots begin at `slot` or later; start[rows] is their end.
__device__ __forceinline__ int row_from(const int* start, int rows, int slot) {
  const int lane = threadIdx.x % 32;
  const int block = __popc(__ballot_sync(~0u, 32 * lane <= rows && start[min(32 * lane, rows)] < slot)) - 1;
  if (block < 0) return 0;
  const int row = 32 * block + 1 + lane;
  return 32 * block + 1 + __popc(__ballot_sync(~0u, row <= rows && start[min(row, rows)] < slot));
}
static_assert(kStagedRows <= 32 * 32);

// Steps under way: as many as registers allow at batch 1 and 2; at batch 4 more gain nothing, and fewer left warps waiting for memory.
constexpr int rows_t_ahead(int width, int at_once) { return at_once == 1 ? (width == 1 ? 6 : 8) : (width == 1 ? 8 : width == 2 ? 12 : 20) / at_once; }

template <class T, int W, int kAtOnce>
__global__ void __launch_bounds__(rows_t_threads(W)) spmm_t_rows(const __grid_constant__ SpmmTRows<T> a) {
  constexpr int kAhead = rows_t_ahead(W, kAtOnce);
  extern __shared__ float4 shared[];
  __shared__ int start[kStagedRows + 1];
  float* sums = reinterpret_cast<float*>(shared);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  float* dy = sums + warps * kPanelCols * W;
  const uint32_t start_at = shared_address(start), dy_at = shared_address(dy);
  const uint32_t sums_at = shared_address(sums + warp * kPanelCols * W);
  const uint32_t group = blockIdx.x / a.panels, split = group % a.splits, panel = blockIdx.x % a.panels;
  const int64_t b0 = int64_t(group / a.splits) * W;
  const int count = int(min(int64_t(W), a.batch - b0));
  const int64_t last_row = min(a.out, (split + 1) * a.rows_a_split);
  for (int i = threadIdx.x; i < warps * kPanelCols * W / 4; i += blockDim.x) shared[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  await_stream();

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
    const auto row_at = [&](int number) { return number == warps ? rows : row_from(start, rows, start[rows] * number / warps); };
    const int row = row_at(warp), stop = row_at(warp + 1), lane = threadIdx.x % 32, begin = start[row];
    RowSteps<T, W, kAtOnce> steps{a.index + first + lane, a.values + first + lane, start_at + 4 * (row + 1), dy_at + 4 * W * (row - 1), stop - row, begin, begin};
    RowStep<T, kAtOnce> ahead[kAhead];
#pragma unroll
    for (int d = 0; d < kAhead; ++d) steps.fetch(ahead[d]);
    for (bool more = true; more;) {
#pragma unroll
      for (int d = 0; d < kAhead; ++d) {
        more = ahead[d].dy != 0;
        if (!more) break;
        ahead[d].template add<W>(sums_at);
        steps.fetch(ahead[d]);
      }
    }
  }
  __syncthreads();
  const int cols = int(min(int64_t(kPanelCols), a.in - int64_t(panel) * kPanelCols));
  const uint32_t all_sums = shared_address(sums);
  for (int c = threadIdx.x; c < cols; c += blockDim.x) {
    float sum[W], one[W];
    read_shared<W>(all_sums + 4 * W * c, sum);
#pragma unroll 8
    for (int w = 1; w < warps; ++w) {
      read_shared<W>(all_sums + 4 * W * (w * kPanelCols + c), one);
#pragma unroll
      for (int b = 0; b < W; ++b) sum[b] += one[b];
    }
    const int64_t at = int64_t(panel) * kPanelCols + c;
#pragma unroll
    for (int b = 0; b < W; ++b) {
      if (b >= count) break;
      if (a.partials != nullptr) a.partials[(split * a.batch + b0 + b) * a.in + at] = sum[b];
      else a.dx[(a.b0 + b0 + b) * a.in + at] = from_float<T>(sum[b]);
    }
  }
}

}  // namespace snack::cuda
