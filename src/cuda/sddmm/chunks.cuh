// sddmm, regime stream, narrow tiles, few batch columns: gradient_k = sum_b dy[b, row_k] x[b, col_k], given to a sink (kernels.cuh).
//
// A block owns an equal share of one panel's slots. Its window of x (1024 columns x W) is staged once; phases, for kStagedStrips
// strips at a time:
//   stage   the strips' rows of dy (W floats a row) and where their tiles begin
//   walk    a thread takes chunks of slots whose values fill 16 bytes: one load of their words, a read of x each, a read of dy
//           where the row changes, and the sink. The words of the next chunks are under way meanwhile
// Sums are float, in the order of the batch: results repeat bit for bit. Read: nnz * 2, and the windows once a block; beside that
// what the sink reads and writes. Limits: 2^32 - 16 slots; requests to shared memory.
#pragma once

#include "../columns.cuh"

namespace snack::cuda {

template <class Sink>
struct SddmmChunks {
  const uint16_t* index;
  const int64_t* tile_ptr;
  Strided<typename Sink::Element> dy, x;
  Sink sink;
  int64_t out, in;
  uint32_t panels, splits, strips, slots;
  int batch;
  bool aligned;  // index lies on 16 bytes
};

// A chunk: the slots whose values fill 16 bytes.
template <class T>
struct SddmmChunk {
  static constexpr int kSlots = 16 / sizeof(T);
  uint32_t pair[kSlots / 2];  // words, two and two

  /// Words from `slots` on do not exist and are not read.
  __device__ __forceinline__ void load(const uint16_t* index, uint32_t chunk, uint32_t slots, bool aligned) {
    const uint16_t* from = index + size_t(chunk) * kSlots;
    if (aligned && (chunk + 1) * kSlots <= slots) {
      if constexpr (kSlots == 4) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        pair[0] = two.x, pair[1] = two.y;
      } else {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        pair[0] = four.x, pair[1] = four.y, pair[2] = four.z, pair[3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t word = chunk * kSlots + i < slots ? from[i] : 0u;
      pair[i / 2] = i % 2 == 0 ? word : pair[i / 2] | word << 16;
    }
  }
  __device__ __forceinline__ uint32_t word(int i) const { return i % 2 == 0 ? pair[i / 2] & 0xffffu : pair[i / 2] >> 16; }
};

template <class Sink, int W>
__global__ void __launch_bounds__(kChunkThreads, 2) sddmm_chunks(const __grid_constant__ SddmmChunks<Sink> a) {
  await_stream();
  using T = typename Sink::Element;
  using X = Columns<T, W>;
  constexpr int kAhead = W < 8 ? Sink::kAhead : 2;
  extern __shared__ float4 shared[];
  __shared__ uint32_t start[kStagedStrips + 1], first_strip, last_strip;
  float* dy = reinterpret_cast<float*>(shared);
  unsigned char* x = reinterpret_cast<unsigned char*>(dy + kStagedStrips * kStripRows * W);
  const uint32_t window = shared_address(x);
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
  for (uint32_t i = threadIdx.x; i < a.strips; i += blockDim.x) {
    const uint32_t from = uint32_t(tiles[i]), to = uint32_t(tiles[i + 1]);
    if (from <= begin && begin < to) first_strip = i;
    if (from < end && end <= to) last_strip = i;
  }
  X::arrived();
  __syncthreads();
  if (begin == end) return;

  const Sink sink = a.sink.started();
  uint32_t from = begin;
  for (uint32_t strip = first_strip; from < end; strip += kStagedStrips) {
    const int strips = int(min(uint32_t(kStagedStrips), last_strip + 1 - strip));
    const int64_t row0 = int64_t(strip) * kStripRows;
    for (int i = threadIdx.x; i <= strips; i += blockDim.x) start[i] = uint32_t(tiles[strip + i]);
#pragma unroll
    for (int b = 0; b < W; ++b)
      for (int r = threadIdx.x; r < strips * kStripRows; r += blockDim.x)
        dy[r * W + b] = row0 + r < a.out && b < a.batch ? a.dy(b, row0 + r) : 0.f;
    __syncthreads();
    constexpr int kSlots = SddmmChunk<T>::kSlots;
    const uint32_t to = min(end, start[strips]), last = (to + kSlots - 1) / kSlots;
    uint32_t chunk = from / kSlots + threadIdx.x;
    SddmmChunk<T> ahead[kAhead];
    const auto fetch = [&](SddmmChunk<T>& into, uint32_t number) {
      if (number < last) into.load(a.index, number, a.slots, a.aligned);
    };
#pragma unroll
    for (int d = 0; d < kAhead; ++d) fetch(ahead[d], chunk + d * kChunkThreads);
    int s = 0;
    const auto add = [&](const SddmmChunk<T>& now) {
      float from_dy[W];
      int row = -1;
      const auto product = [&](uint32_t word) {
        const int its_row = s * kStripRows + int(word >> kTileColBits);
        if (its_row != row) {
          row = its_row;
#pragma unroll
          for (int b = 0; b < W; ++b) from_dy[b] = dy[row * W + b];
        }
        float from_x[W], sum = 0.f;
        X::read(window + ((word & (kPanelCols - 1)) << X::kLogBytes), from_x);
#pragma unroll
        for (int b = 0; b < W; ++b) sum = fmaf(from_dy[b], from_x[b], sum);
        return sum;
      };
      const uint32_t at = chunk * kSlots, first = max(from, at);
      while (start[s + 1] <= first) ++s;  // a thread's slots ascend
      if (at >= from && at + kSlots <= min(to, start[s + 1])) {
        const auto early = sink.early(at);
        float result[kSlots];
#pragma unroll
        for (int i = 0; i < kSlots; ++i) result[i] = product(now.word(i));
        sink.chunk(at, result, early);
      } else {  // the share or a tile ends within
#pragma unroll 1
        for (uint32_t slot = first; slot < min(to, at + kSlots); ++slot) {
          while (start[s + 1] <= slot) ++s;
          sink.one(slot, product(a.index[slot]));
        }
      }
    };
#pragma unroll 1
    while (chunk < last) {
#pragma unroll
      for (int d = 0; d < kAhead; ++d, chunk += kChunkThreads) {  // a place for each: a copy from one to the next would wait for its load
        if (chunk >= last) break;
        const uint32_t next = chunk + kAhead * kChunkThreads;
        if constexpr (W < 8) {  // one more is under way while this one is added
          const SddmmChunk<T> now = ahead[d];
          fetch(ahead[d], next);
          add(now);
        } else {  // fewer registers, for two sums of eight products
          add(ahead[d]);
          fetch(ahead[d], next);
        }
      }
    }
    from = to;
    __syncthreads();
  }
}

}  // namespace snack::cuda
