// sddmm: dvalues[k] = sum_b dy[b, row_k] x[b, col_k].
//
// sddmm_stream (narrow tiles): a block owns a run of strips of one panel. A thread keeps the sums of a few slots in
// registers, so dvalues is written once and any batch works; windows of x (1024 columns x W) and dy (the run's rows x W) are
// staged W batch columns at a time. Read: nnz * 2, and the windows once a (piece, W columns). Written: nnz * value.
// sddmm_slots (tall tiles, and the coo baseline): one thread a slot, operands from L2.
// Sums are float, in the order of the batch: results repeat bit for bit.
#pragma once

#include "../fixed.cuh"
#include "../stage.cuh"

namespace snack::cuda {

template <class T>
struct SddmmStream {
  const uint16_t* index;
  const int64_t* tile_ptr;
  Strided<T> dy, x;
  T* dvalues;
  int64_t out, in, batch, strips;
  uint32_t runs;
  int strips_a_block;
};

template <class T, int W>
__global__ void __launch_bounds__(kThreads, sddmm_resident(W)) sddmm_stream(const SddmmStream<T> a) {
  constexpr int kSlots = W == 1 ? 8 : 4;  // sums a thread keeps; more would not fit its registers
  extern __shared__ float4 shared[];
  __shared__ int offsets[kMaxStrips + 1];
  float* x = reinterpret_cast<float*>(shared);
  float* dy = x + kPanelCols * W;
  const int64_t run = blockIdx.x % a.runs, panel = blockIdx.x / a.runs, strip = run * a.strips_a_block;
  const int strips = int(min(int64_t(a.strips_a_block), a.strips - strip)), rows = strips * kStripRows;
  const auto stage = [&](int64_t b0) {
    const int64_t count = min(int64_t(W), a.batch - b0);
    Window<W>::stage(x, kPanelCols, a.x, panel * kPanelCols, a.in, b0, count);
    Window<W>::stage(dy, rows, a.dy, strip * kStripRows, a.out, b0, count);
  };
  const int64_t lo = stage_pointers(offsets, a.tile_ptr + panel * a.strips + strip, strips);
  if (a.batch <= W) stage(0);
  __syncthreads();

  const int slots = offsets[strips];
  int s = 0;
  for (int piece = 0; piece < slots; piece += kThreads * kSlots) {
    unsigned position[kSlots];  // row in the run, column in the panel
    float sum[kSlots] = {};
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int slot = min(piece + i * kThreads + int(threadIdx.x), slots - 1);
      const unsigned word = __ldg(a.index + lo + slot);
      while (offsets[s + 1] <= slot) ++s;  // a thread's slots ascend
      position[i] = unsigned(s) * kStripRows * kPanelCols + word;
    }
    for (int64_t b0 = 0; b0 < a.batch; b0 += W) {
      if (a.batch > W) {
        __syncthreads();
        stage(b0);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        float from_x[W], from_dy[W];
        Window<W>::read(x, kPanelCols, position[i] % kPanelCols, from_x);
        Window<W>::read(dy, rows, position[i] / kPanelCols, from_dy);
#pragma unroll
        for (int b = 0; b < W; ++b) sum[i] = fmaf(from_dy[b], from_x[b], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int slot = piece + i * kThreads + int(threadIdx.x);
      if (slot < slots) a.dvalues[lo + slot] = from_float<T>(sum[i]);
    }
  }
}

template <class T, class Word>
__global__ void __launch_bounds__(kThreads) sddmm_slots(const Word* __restrict__ index, const int64_t* __restrict__ tile_ptr,
                                                        const Strided<T> dy, const Strided<T> x, T* __restrict__ dvalues, int64_t batch,
                                                        int64_t strips, int64_t pieces) {
  for_slots_of_piece(index, tile_ptr, strips, pieces, blockIdx.x, [&](int64_t slot, int64_t row, int64_t col) {
    float sum = 0.f;
    for (int64_t b = 0; b < batch; ++b) sum = fmaf(dy(b, row), x(b, col), sum);
    dvalues[slot] = from_float<T>(sum);
  });
}

}  // namespace snack::cuda
