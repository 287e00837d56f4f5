// sddmm, regime stream, narrow tiles, few batch columns: dvalues[k] = sum_b dy[b, row_k] x[b, col_k].
//
// A block owns an equal share of one panel's slots. Its window of x (1024 columns x W) is staged once; phases, for kStagedStrips
// strips at a time:
//   stage   the strips' rows of dy (W floats a row) and where their tiles begin
//   walk    a thread takes chunks of eight slots that begin at multiples of eight: one 16-byte load of words, eight reads of x, a
//           read of dy where the row changes, 16-byte stores. The words of its next chunk are under way meanwhile
// Sums are float, in the order of the batch: results repeat bit for bit. Read: nnz * 2, and the windows once a block. Written:
// nnz * value. Limits: 2^32 - 16 slots; requests to shared memory.
#pragma once

#include "../columns.cuh"

namespace snack::cuda {

template <class T>
struct SddmmChunks {
  const uint16_t* index;
  const int64_t* tile_ptr;
  Strided<T> dy, x;
  T* dvalues;
  int64_t out, in;
  uint32_t panels, splits, strips, slots;
  int batch;
  bool aligned;  // index and dvalues lie on 16 bytes
};

// The words of a chunk; those from `limit` on are not read.
__device__ __forceinline__ uint4 load_words(const uint16_t* index, uint32_t chunk, uint32_t slots, bool aligned) {
  Eight<uint16_t> eight;
  eight.load(index + 8 * size_t(chunk), int(min(8u, slots - 8 * chunk)), aligned);
  return make_uint4(eight.word[0], eight.word[1], eight.word[2], eight.word[3]);
}

template <class T>
__device__ __forceinline__ void store_chunk(T* to, const float (&result)[8], bool aligned) {
  alignas(16) T element[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) element[k] = from_float<T>(result[k]);
  if (aligned) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 2; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(element)[i];
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) to[k] = element[k];
  }
}

template <class T, int W>
__global__ void __launch_bounds__(kChunkThreads, W < 8 ? 2 : 1) sddmm_chunks(const __grid_constant__ SddmmChunks<T> a) {
  using X = Columns<T, W>;
  extern __shared__ float4 shared[];
  __shared__ uint32_t start[kStagedStrips + 1], first_strip;
  float* dy = reinterpret_cast<float*>(shared);
  unsigned char* x = reinterpret_cast<unsigned char*>(dy + kStagedStrips * kStripRows * W);
  const uint32_t window = uint32_t(__cvta_generic_to_shared(x));
  const uint32_t panel = blockIdx.x % a.panels, split = blockIdx.x / a.panels;
  X::template stage<8>(x, a.x, int64_t(panel) * kPanelCols, int(min(int64_t(kPanelCols), a.in - int64_t(panel) * kPanelCols)), 0, a.batch);

  // The block's slots: shares begin at multiples of eight, but for the panel's own ends.
  const int64_t* tiles = a.tile_ptr + size_t(panel) * a.strips;
  const uint32_t panel_begin = uint32_t(tiles[0]), panel_end = uint32_t(tiles[a.strips]);
  const auto share = [&](uint32_t s) {
    if (s == 0) return panel_begin;
    if (s == a.splits) return panel_end;
    return max(panel_begin, uint32_t(panel_begin + uint64_t(panel_end - panel_begin) * s / a.splits) & ~7u);
  };
  const uint32_t begin = share(split), end = share(split + 1);
  for (uint32_t i = threadIdx.x; i < a.strips; i += blockDim.x)
    if (uint32_t(tiles[i]) <= begin && begin < uint32_t(tiles[i + 1])) first_strip = i;
  X::arrived();
  __syncthreads();
  if (begin == end) return;

  uint32_t from = begin;
  for (uint32_t strip = first_strip; from < end; strip += kStagedStrips) {
    const int strips = int(min(uint32_t(kStagedStrips), a.strips - strip));
    const int64_t row0 = int64_t(strip) * kStripRows;
    for (int i = threadIdx.x; i <= strips; i += blockDim.x) start[i] = uint32_t(tiles[strip + i]);
#pragma unroll
    for (int b = 0; b < W; ++b)
      for (int r = threadIdx.x; r < strips * kStripRows; r += blockDim.x)
        dy[r * W + b] = row0 + r < a.out && b < a.batch ? a.dy(b, row0 + r) : 0.f;
    __syncthreads();
    const uint32_t to = min(end, start[strips]), last = (to + 7) / 8;
    uint32_t chunk = from / 8 + threadIdx.x;
    uint4 next = chunk < last ? load_words(a.index, chunk, a.slots, a.aligned) : uint4{};
    int s = 0;
    for (; chunk < last; chunk += kChunkThreads) {
      const uint4 now = next;
      if (chunk + kChunkThreads < last) next = load_words(a.index, chunk + kChunkThreads, a.slots, a.aligned);
      float from_dy[W];
      int row = -1;
      const auto product = [&](uint32_t word) {
        const int at = s * kStripRows + int(word >> kTileColBits);
        if (at != row) {
          row = at;
#pragma unroll
          for (int b = 0; b < W; ++b) from_dy[b] = dy[at * W + b];
        }
        float from_x[W], sum = 0.f;
        X::read(window + ((word & (kPanelCols - 1)) << X::kLogBytes), from_x);
#pragma unroll
        for (int b = 0; b < W; ++b) sum = fmaf(from_dy[b], from_x[b], sum);
        return sum;
      };
      const uint32_t first = max(from, 8 * chunk);
      while (start[s + 1] <= first) ++s;  // a thread's slots ascend
      if (8 * chunk >= from && 8 * chunk + 8 <= min(to, start[s + 1])) {
        float result[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const uint32_t pair = k / 2 == 0 ? now.x : k / 2 == 1 ? now.y : k / 2 == 2 ? now.z : now.w;
          result[k] = product(k % 2 == 0 ? pair & 0xffffu : pair >> 16);
        }
        store_chunk(a.dvalues + 8 * size_t(chunk), result, a.aligned);
      } else {  // the share or a tile ends within
#pragma unroll 1
        for (uint32_t slot = first; slot < min(to, 8 * chunk + 8); ++slot) {
          while (start[s + 1] <= slot) ++s;
          a.dvalues[slot] = from_float<T>(product(a.index[slot]));
        }
      }
    }
    from = to;
    __syncthreads();
  }
}

}  // namespace snack::cuda
