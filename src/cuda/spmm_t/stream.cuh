// spmm_t, regime stream, narrow tiles: dx (batch, in) = dy (batch, out) W.
//
// A block owns one panel (1024 columns), W batch columns and a range of strips. Every warp has column sums of its own in
// shared memory (1024 x W floats), so no atomics are needed; at the end the warps' sums are added in order.
// Phases, for kStagedStrips strips at a time:
//   stage   their rows of dy (W floats a row) and their tile pointers
//   walk    their slots are one contiguous range; warps take equal runs of it, kChunks x 32 consecutive slots at a time. Slots of
//           one row have distinct columns, so a warp adds row by row: few passes where rows are long, never a conflict
// With one split dx is written in its dtype, else float partials (splits, batch, in) are, for finish(). Every addition has a
// fixed place: results repeat bit for bit. Read: nnz * (2 + value). Limit: read-add-write of shared memory.
#pragma once

#include "../stage.cuh"
#include "args.cuh"

namespace snack::cuda {

template <class T>
struct SpmmTStream : SpmmTNarrow<T> {
  int64_t strips_a_split;
};

template <int W>
struct Vector {
  float of[W];
  __device__ __forceinline__ void load(const float* p) {
    if constexpr (W == 1) {
      of[0] = *p;
    } else {
      static_assert(W == 4);
      const float4 v = *reinterpret_cast<const float4*>(p);
      of[0] = v.x, of[1] = v.y, of[2] = v.z, of[3] = v.w;
    }
  }
  __device__ __forceinline__ void store(float* p) const {
    if constexpr (W == 1) *p = of[0];
    else *reinterpret_cast<float4*>(p) = make_float4(of[0], of[1], of[2], of[3]);
  }
  __device__ __forceinline__ void add(float value, const Vector& v) {
#pragma unroll
    for (int b = 0; b < W; ++b) of[b] = fmaf(value, v.of[b], of[b]);
  }
};

// kAtOnce chunks of 32 slots, as loaded.
template <int kAtOnce>
struct Chunks {
  int word[kAtOnce];
  float value[kAtOnce];

  template <class T>
  __device__ __forceinline__ void load(const uint16_t* index, const T* values, int base, int end) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int slot = base + 32 * u + int(threadIdx.x) % 32;
      word[u] = slot < end ? int(index[slot]) : 0;
      value[u] = slot < end ? to_float(values[slot]) : 0.f;
    }
  }
};

// A warp's share of the slots [lo, lo + offsets[strips]), kChunks chunks of 32 at a time, one pass a row of them. Rows ascend with
// the slots, so the next row is the smallest above the last one. The next four chunks are loaded meanwhile.
template <int W, int kChunks, class T>
__device__ __forceinline__ void walk(const SpmmTStream<T>& a, int64_t lo, const int* offsets, int strips, const float* dy, float* sums) {
  constexpr int kNone = 1 << 30, kAtOnce = 4;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int slots = offsets[strips], all = (slots + 31) / 32;
  const int begin = all * warp / warps * 32, end = min(slots, all * (warp + 1) / warps * 32);
  int strip = 0;
  Chunks<kAtOnce> loaded;
  loaded.load(a.index + lo, a.values + lo, begin, end);
  for (int base = begin; base < end; base += 32 * kAtOnce) {
    const Chunks<kAtOnce> now = loaded;
    loaded.load(a.index + lo, a.values + lo, base + 32 * kAtOnce, end);
#pragma unroll
    for (int group = 0; group < kAtOnce; group += kChunks) {
      int rows[kChunks], row = kNone;
#pragma unroll
      for (int u = 0; u < kChunks; ++u) {
        const int slot = base + 32 * (group + u) + lane;
        if (slot < end)
          while (offsets[strip + 1] <= slot) ++strip;
        rows[u] = slot < end ? strip * kStripRows + (now.word[group + u] >> kTileColBits) : kNone;
        row = min(row, rows[u]);
      }
      for (row = __reduce_min_sync(~0u, row); row != kNone;) {
        Vector<W> sum[kChunks], scale;
        scale.load(dy + row * W);
        int next = kNone;
#pragma unroll
        for (int u = 0; u < kChunks; ++u)
          if (rows[u] == row) sum[u].load(sums + (now.word[group + u] & (kPanelCols - 1)) * W);
#pragma unroll
        for (int u = 0; u < kChunks; ++u) {
          if (rows[u] == row) {
            sum[u].add(now.value[group + u], scale);
            sum[u].store(sums + (now.word[group + u] & (kPanelCols - 1)) * W);
          }
          if (rows[u] > row) next = min(next, rows[u]);
        }
        row = __reduce_min_sync(~0u, next);
        __syncwarp();
      }
    }
  }
}

template <class T, int W, int kChunks>
__global__ void __launch_bounds__(384) spmm_t_stream(const SpmmTStream<T> a) {
  await_stream();
  extern __shared__ float4 shared[];
  __shared__ int offsets[kStagedStrips + 1];
  float* dy = reinterpret_cast<float*>(shared);
  float* sums = dy + kStagedStrips * kStripRows * W;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;

  // 32-bit division: a 64-bit one is a call, and costs registers
  const uint32_t group = blockIdx.x / a.panels;
  const int64_t panel = blockIdx.x % a.panels, split = group % a.splits, b0 = int64_t(group / a.splits) * W;
  const int64_t count = min(int64_t(W), a.batch - b0), stop = min(a.strips, (split + 1) * a.strips_a_split);
  for (int i = threadIdx.x; i < warps * kPanelCols * W; i += blockDim.x) sums[i] = 0.f;

  for (int64_t strip = split * a.strips_a_split; strip < stop; strip += kStagedStrips) {
    const int strips = int(min(int64_t(kStagedStrips), stop - strip));
    __syncthreads();
    const int64_t lo = stage_pointers(offsets, a.tile_ptr + panel * a.strips + strip, strips);
    // One plane: the W numbers of a row lie together, and all lanes of a pass read the same row.
    for (int i = threadIdx.x; i < strips * kStripRows * W; i += blockDim.x) {
      const int64_t row = strip * kStripRows + i % (strips * kStripRows);
      const int b = i / (strips * kStripRows);
      dy[(i % (strips * kStripRows)) * W + b] = row < a.out && b < count ? a.dy(a.b0 + b0 + b, row) : 0.f;
    }
    __syncthreads();
    walk<W, kChunks>(a, lo, offsets, strips, dy, sums + warp * kPanelCols * W);
  }
  __syncthreads();
  const int cols = int(min(int64_t(kPanelCols), a.in - panel * kPanelCols));
  for (int i = threadIdx.x; i < cols * count; i += blockDim.x) {
    const int b = i / cols, c = i % cols;
    float sum = 0.f;
    for (int w = 0; w < warps; ++w) sum += sums[(w * kPanelCols + c) * W + b];
    const int64_t at = panel * kPanelCols + c;
    if (a.partials != nullptr) a.partials[(split * a.batch + b0 + b) * a.in + at] = sum;
    else a.dx[(a.b0 + b0 + b) * a.in + at] = from_float<T>(sum);
  }
}

}  // namespace snack::cuda
