// spmm, regime stream, narrow tiles: y (batch, out) = x (batch, in) W^T + bias.
//
// A block owns a run of strips (64 rows each) and W batch columns; it walks the panels of its split. Phases of a panel:
//   stage   the panel's window of x (1024 columns x W, float) and the tile pointers of the run
//   walk    the run's slots are one contiguous range; warps take equal numbers of 256-slot blocks, a lane eight consecutive
//           slots (16-byte loads where the arrays allow it). A row that ends inside a lane is added to the row sums at once;
//           the rows that are open at lane ends are joined by a segmented warp sum
//   join    the first row of a warp's range, which the warp before may share, waits in an edge and is added here
// Sums are float; every addition has a fixed place, so results repeat bit for bit. With one split y is written in its dtype,
// else float partials (splits, batch, out) are, for finish().
// Read: nnz * (2 + value), 4 KB of x a (panel, run, column). Written: batch * out. Limit: random reads of shared memory.
#pragma once

#include "../stage.cuh"

namespace snack::cuda {

template <class T>
struct SpmmStream {
  const uint16_t* index;
  const int64_t* tile_ptr;
  const T* values;
  Strided<T> x;
  const T* bias;
  T* y;
  float* partials;  // null: y is written
  int64_t out, in, nnz, batch, b0;  // of this launch: batch columns [b0, b0 + batch)
  int64_t strips, panels, panels_a_block;
  uint32_t runs, splits;
  int strips_a_block;
  bool aligned;  // index and values lie on 16 bytes
};

// Adds to the sums of `row`; the warp's first row goes to its edge.
template <int W>
struct RowSums {
  float* sums;
  float* edge;
  int first_row;

  __device__ __forceinline__ void add(int row, const float (&part)[W]) const {
    float* to = row == first_row ? edge : sums + row * W;
#pragma unroll
    for (int b = 0; b < W; ++b) to[b] += part[b];
  }
};

// One 256-slot block, the lane's slots [begin, end) of one tile whose first row is row0; kWhole: all eight.
template <int W, bool kWhole, class T>
__device__ __forceinline__ void add_block(const Eight<uint16_t>& index, const Eight<T>& values, int begin, int end, int row0,
                                          const float* window, const RowSums<W>& rows) {
  int row = -1;
  float sum[W] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    if (!kWhole && (k < begin || k >= end)) continue;
    const int word = index[k], at = word >> kTileColBits;
    if (at != row) {
      if (row >= 0) rows.add(row0 + row, sum);  // this lane holds the row's last slot
      row = at;
#pragma unroll
      for (int b = 0; b < W; ++b) sum[b] = 0.f;
    }
    float x[W];
    Window<W>::read(window, kPanelCols, word & (kPanelCols - 1), x);
    const float value = to_float(values[k]);
#pragma unroll
    for (int b = 0; b < W; ++b) sum[b] = fmaf(value, x[b], sum[b]);
  }
  __syncwarp();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, row, d);  // by all lanes, whatever follows
    const bool joins = lane >= d && other == row;
    if (!__any_sync(~0u, joins)) break;  // rows ascend: no row spans more lanes than this
#pragma unroll
    for (int b = 0; b < W; ++b) {
      const float from = __shfl_up_sync(~0u, sum[b], d);
      if (joins) sum[b] += from;
    }
  }
  const int next = __shfl_down_sync(~0u, row, 1);
  if (row >= 0 && (lane == 31 || next != row)) rows.add(row0 + row, sum);
  __syncwarp();
}

// A warp's share of the slots lo + [0, offsets[strips]) of a run of tiles. Slots are counted from `origin`, the multiple of 256
// at or before lo.
template <int W, class T>
__device__ __forceinline__ void walk(const SpmmStream<T>& a, int64_t lo, const int* offsets, int strips, const float* window, float* sums,
                                     float* edge, int* edge_row) {
  constexpr int warps = kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t origin = lo / 256 * 256;
  const int first = int(lo - origin), last = first + offsets[strips], blocks = (last + 255) / 256;
  const int begin = blocks * warp / warps * 256, end = blocks * (warp + 1) / warps * 256;
  const uint16_t* index_at = a.index + origin;
  const T* values_at = a.values + origin;
  const int limit = int(min(a.nnz - origin, int64_t(last) + 8));  // slots that exist
  RowSums<W> rows{sums, edge, -1};
  if (lane < W) edge[lane] = 0.f;
  if (begin < end) {
    Eight<uint16_t> index;
    Eight<T> values;
    const auto load = [&](int slot) {
      if (slot >= last) return;
      index.load(index_at + slot, limit - slot, a.aligned);
      values.load(values_at + slot, limit - slot, a.aligned);
    };
    // One batch column leaves registers for so many warps that they hide the loads themselves.
    constexpr bool kLoadAhead = W > 1;
    if (kLoadAhead) load(begin + lane * 8);
    int strip = 0;
    for (int block = begin; block < end; block += 256) {
      const int slot = block + lane * 8;
      if (!kLoadAhead) load(slot);
      const Eight<uint16_t> index_now = index;
      const Eight<T> values_now = values;
      if (kLoadAhead && block + 256 < end) load(slot + 256);
      int from = max(first, block);
      const int stop = min(last, block + 256);
      while (from < stop) {
        while (first + offsets[strip + 1] <= from) ++strip;
        const int to = min(stop, first + offsets[strip + 1]), row0 = strip * kStripRows;
        if (rows.first_row < 0) {
          int at = index_now[0];
#pragma unroll
          for (int k = 1; k < 8; ++k)
            if (from % 8 == k) at = index_now[k];
          rows.first_row = row0 + (__shfl_sync(~0u, at, (from - block) / 8) >> kTileColBits);
        }
        if (to - from == 256) add_block<W, true>(index_now, values_now, 0, 8, row0, window, rows);
        else add_block<W, false>(index_now, values_now, from - slot, to - slot, row0, window, rows);
        from = to;
      }
    }
  }
  if (lane == 0) *edge_row = rows.first_row;
}

template <class T, int W>
__global__ void __launch_bounds__(kThreads, spmm_resident(W)) spmm_stream(const SpmmStream<T> a) {
  await_stream();
  extern __shared__ float4 shared[];
  __shared__ int offsets[kMaxStrips + 1], edge_rows[kThreads / 32];
  float* window = reinterpret_cast<float*>(shared);
  float* sums = window + kPanelCols * W;
  constexpr int warps = kThreads / 32;
  const int warp = threadIdx.x / 32;
  float* edges = sums + a.strips_a_block * kStripRows * W;

  // 32-bit division: a 64-bit one is a call, and costs registers
  const uint32_t group = blockIdx.x / a.runs;
  const int64_t run = blockIdx.x % a.runs, split = group % a.splits, width = group / a.splits;
  const int64_t strip = run * a.strips_a_block, b0 = width * W, count = min(int64_t(W), a.batch - b0);
  const int strips = int(min(int64_t(a.strips_a_block), a.strips - strip));
  const int64_t row0 = strip * kStripRows;
  const int rows = int(min(int64_t(strips) * kStripRows, a.out - row0));
  for (int i = threadIdx.x; i < rows * W; i += blockDim.x) sums[i] = 0.f;

  const int64_t last = min(a.panels, (split + 1) * a.panels_a_block);
  for (int64_t panel = split * a.panels_a_block; panel < last; ++panel) {
    __syncthreads();
    const int64_t lo = stage_pointers(offsets, a.tile_ptr + panel * a.strips + strip, strips);
    Window<W>::stage(window, kPanelCols, a.x, panel * kPanelCols, a.in, a.b0 + b0, count);
    __syncthreads();
    walk<W>(a, lo, offsets, strips, window, sums, edges + warp * W, edge_rows + warp);
    __syncthreads();
    if (threadIdx.x < W)
      for (int w = 0; w < warps; ++w)
        if (edge_rows[w] >= 0) sums[edge_rows[w] * W + threadIdx.x] += edges[w * W + threadIdx.x];
  }
  __syncthreads();
  for (int b = 0; b < count; ++b)
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
      const float sum = sums[r * W + b];
      if (a.partials != nullptr) a.partials[(split * a.batch + b0 + b) * a.out + row0 + r] = sum;
      else a.y[(a.b0 + b0 + b) * a.out + row0 + r] = from_float<T>(a.bias == nullptr ? sum : sum + to_float(a.bias[row0 + r]));
    }
}

}  // namespace snack::cuda
