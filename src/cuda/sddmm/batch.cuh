// sddmm, regime stream, narrow tiles, larger batches: gradient_k = sum_b dy[b, row_k] x[b, col_k], given to a sink (kernels.cuh).
//
// A block owns an equal share of one panel's slots. Its window of x lies in shared memory as lines (a chunk of the batch for each of
// 1024 columns), and so do the rows of dy of a few strips at a time. A team of lanes takes as many slots as it has lanes: every lane
// holds 16 bytes of the lines, the row of dy in registers until the row changes; then the lanes add what each has of every slot, such
// that each ends with one slot's sum, which it gives to the sink. With more than one chunk, the sums of `sums` slots at a
// time wait in shared memory while the chunks pass.
// Sums are float, in a fixed order: results repeat bit for bit.
// Read: chunks * nnz * 2 and dy once a chunk, x once a chunk and `sums` slots of a block, from L2; beside that what the sink reads and
// writes. Limits: instructions, and requests to shared memory; where slots are few, staging x; every block looks through all tile
// pointers of its panel.
#pragma once

#include "../lines.cuh"

namespace snack::cuda {

template <class Sink>
struct SddmmBatch {
  const uint16_t* index;
  const int64_t* tile_ptr;
  Strided<typename Sink::Element> dy, x;
  Sink sink;
  int64_t out, in, batch, strips;
  uint32_t panels, splits;
  int sums;  // slots whose sums fit into shared memory
};

// Lane i of the team gets the sum over all its lanes of part[i].
template <int kLanes>
__device__ __forceinline__ float sums_of_team(float (&part)[kLanes]) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2)
#pragma unroll
    for (int i = 0; i < d; ++i) {
      const bool upper = threadIdx.x & d;
      const float passed = __shfl_xor_sync(~0u, upper ? part[i] : part[i + d], d);
      part[i] = (upper ? part[i + d] : part[i]) + passed;
    }
  return part[0];
}

template <class Sink, int kLanes>
__global__ void __launch_bounds__(kSddmmBatchThreads, 1) sddmm_batch(const __grid_constant__ SddmmBatch<Sink> a) {
  await_stream();
  using T = typename Sink::Element;
  using L = Lines<T, kLanes>;
  using Window = StagedLines<T, kLanes>;
  using Rows = StagedLines<float, L::kCols / 4>;
  constexpr int kVector = L::kVector, kStep = kSddmmBatchThreads;  // slots that the block takes at once
  constexpr int kPieces = kVector / 4, kPlaceBits = 18;  // shared memory has fewer bytes than 2^18
  extern __shared__ __align__(128) float4 shared[];
  __shared__ uint32_t first_strip;
  char* x = reinterpret_cast<char*>(shared);
  char* dy = x + kPanelCols * L::kBytes;
  float* sums = reinterpret_cast<float*>(dy + kSddmmBatchStrips * kStripRows * L::kCols * 4);
  const uint32_t panel = blockIdx.x % a.panels, split = blockIdx.x / a.panels, lane = threadIdx.x % kLanes;
  const uint32_t x_at = shared_address(x), dy_at = shared_address(dy);

  const int64_t* tiles = a.tile_ptr + int64_t(panel) * a.strips;
  const int64_t panel_begin = tiles[0], slots = tiles[a.strips] - panel_begin;
  const int64_t begin = panel_begin + slots * split / a.splits, end = panel_begin + slots * (split + 1) / a.splits;
  if (begin == end) return;
  for (int64_t i = threadIdx.x; i < a.strips; i += blockDim.x)
    if (tiles[i] <= begin && begin < tiles[i + 1]) first_strip = uint32_t(i);
  __syncthreads();

  const Sink sink = a.sink.started();
  const int chunks = int((a.batch + L::kCols - 1) / L::kCols);
  int64_t strip0 = first_strip;  // of the first slot of the sums
#pragma unroll 1
  for (int64_t from = begin, to; from < end; from = to) {
    to = chunks <= 1 ? end : min(end, from + a.sums);
    int64_t strip = strip0;
#pragma unroll 1
    for (int chunk = 0; chunk < max(1, chunks); ++chunk) {
      const int64_t b0 = int64_t(chunk) * L::kCols;
      __syncthreads();
      Window::stage(x, a.x, int64_t(panel) * kPanelCols, kPanelCols, a.in, b0, a.batch);
      strip = strip0;
#pragma unroll 1
      for (int64_t at = from; at < to;) {  // kSddmmBatchStrips at a time
        while (tiles[strip + 1] <= at) ++strip;
        const int strips = int(min(int64_t(kSddmmBatchStrips), a.strips - strip));
        const int64_t until = min(to, tiles[strip + strips]);
        int later[kSddmmBatchStrips - 1];  // where the second strip and those behind it begin
#pragma unroll
        for (int s = 1; s < kSddmmBatchStrips; ++s) later[s - 1] = s < strips ? int(min(until, tiles[strip + s]) - at) : INT_MAX;
        __syncthreads();
        Rows::stage(dy, a.dy, strip * kStripRows, strips * kStripRows, a.out, b0, a.batch);
        __syncthreads();

        const int count = int(until - at);
        const uint16_t* index = a.index + at;
        int slot = int(threadIdx.x);
        uint32_t next = slot < count ? index[slot] : 0u;
        float row_dy[kVector] = {};
        uint32_t row = ~0u;
#pragma unroll 1
        for (; slot - int(threadIdx.x % 32) < count; slot += kStep) {  // whole warps
          uint32_t its_row = next >> kTileColBits;
#pragma unroll
          for (int s = 0; s < kSddmmBatchStrips - 1; ++s) its_row += slot >= later[s] ? kStripRows : 0;
          // Where the column's line lies in shared memory, and the row's place.
          const uint32_t where = (x_at + Window::place(next & (kPanelCols - 1)) * 16) | Rows::place(its_row) << kPlaceBits;
          if (slot + kStep < count) next = index[slot + kStep];
          float part[kLanes];
#pragma unroll
          for (int k = 0; k < kLanes; ++k) {
            const uint32_t slots_where = __shfl_sync(~0u, where, k, kLanes);
            const bool is_new = slots_where >> kPlaceBits != row;
            row = slots_where >> kPlaceBits;
#pragma unroll
            for (int q = 0; q < kPieces; ++q) read_shared_if(is_new, dy_at + (row ^ (lane * kPieces + q)) * 16, row_dy + 4 * q);
            float column_x[kVector];
            unpack<T>(read_shared<uint4>((slots_where & ((1u << kPlaceBits) - 1)) ^ lane * 16), column_x);
            part[k] = 0.f;
#pragma unroll
            for (int i = 0; i < kVector; ++i) part[k] = fmaf(row_dy[i], column_x[i], part[k]);
          }
          float sum = sums_of_team<kLanes>(part);
          if (slot >= count) continue;
          if (chunks > 1) {
            float& kept = sums[at + slot - from];
            if (chunk > 0) sum += kept;
            kept = sum;
          }
          if (chunk + 1 >= chunks) sink.one(at + slot, sum);
        }
        at = until;
      }
    }
    strip0 = strip;
  }
}

}  // namespace snack::cuda
