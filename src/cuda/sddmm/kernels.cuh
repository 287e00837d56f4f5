// sddmm: gradient_k = sum_b dy[b, row_k] x[b, col_k], given to a sink: sddmm stores it, sddmm_update changes the value by it.
//
// A sink has   Element                        the type of all operands
//              started()                      itself, ready for use; called once a thread
//              one(slot, gradient)
//              early(slot)                    what chunk(slot, ...) can read before it has the gradients
//              chunk(slot, gradients, early)  slots [slot, slot + n), slot a multiple of n: n elements fill 16 bytes
//
// sddmm_stream (narrow tiles, batch <= W): a block owns a run of strips of one panel, whose windows of x (1024 columns x W) and dy
// (the run's rows x W) are staged once; a thread takes kSlots slots at a time. Read: nnz * 2, and the windows once a block.
// sddmm_slots (tall tiles and the coo baseline): one thread a slot, operands from L2.
// Sums are float, in the order of the batch: results repeat bit for bit.
#pragma once

#include "../slots.cuh"
#include "../stage.cuh"

namespace snack::cuda {

template <class Sink>
struct SddmmStream {
  const uint16_t* index;
  const int64_t* tile_ptr;
  Strided<typename Sink::Element> dy, x;
  Sink sink;
  int64_t out, in, batch, strips;
  uint32_t runs;
  int strips_a_block;
};

template <class Sink, int W>
__global__ void __launch_bounds__(kThreads, sddmm_resident(W)) sddmm_stream(const SddmmStream<Sink> a) {
  await_stream();
  constexpr int kSlots = 8;  // whose loads are in flight together
  extern __shared__ float4 shared[];
  __shared__ int offsets[kMaxStrips + 1];
  float* x = reinterpret_cast<float*>(shared);
  float* dy = x + kPanelCols * W;
  const int64_t run = blockIdx.x % a.runs, panel = blockIdx.x / a.runs, strip = run * a.strips_a_block;
  const int strips = int(min(int64_t(a.strips_a_block), a.strips - strip)), rows = strips * kStripRows;
  const int64_t lo = stage_pointers(offsets, a.tile_ptr + panel * a.strips + strip, strips);
  Window<W>::stage(x, kPanelCols, a.x, panel * kPanelCols, a.in, 0, a.batch);
  Window<W>::stage(dy, rows, a.dy, strip * kStripRows, a.out, 0, a.batch);
  __syncthreads();

  const Sink sink = a.sink.started();
  const int slots = offsets[strips];
  int s = 0;
  for (int piece = 0; piece < slots; piece += kThreads * kSlots) {
    unsigned word[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) word[i] = a.index[lo + min(piece + i * kThreads + int(threadIdx.x), slots - 1)];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int slot = piece + i * kThreads + int(threadIdx.x);
      if (slot >= slots) break;
      while (offsets[s + 1] <= slot) ++s;  // a thread's slots ascend
      float from_x[W], from_dy[W], sum = 0.f;
      Window<W>::read(x, kPanelCols, word[i] & (kPanelCols - 1), from_x);
      Window<W>::read(dy, rows, s * kStripRows + (word[i] >> kTileColBits), from_dy);
#pragma unroll
      for (int b = 0; b < W; ++b) sum = fmaf(from_dy[b], from_x[b], sum);
      sink.one(lo + slot, sum);
    }
  }
}

template <class Sink, class Word>
__global__ void __launch_bounds__(kThreads) sddmm_slots(const Word* index, const int64_t* tile_ptr,
                                                        const Strided<typename Sink::Element> dy, const Strided<typename Sink::Element> x,
                                                        const Sink to, int64_t batch, int64_t strips, int64_t pieces) {
  await_stream();
  const Sink sink = to.started();
  for_slots_of_piece(index, tile_ptr, strips, pieces, blockIdx.x, [&](int64_t slot, int64_t row, int64_t col) {
    float sum = 0.f;
    for (int64_t b = 0; b < batch; ++b) sum = fmaf(dy(b, row), x(b, col), sum);
    sink.one(slot, sum);
  });
}

}  // namespace snack::cuda
