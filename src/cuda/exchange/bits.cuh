// exchange on a bit a position, for patterns of enough slots: 64 rows of a panel of 1,024 columns, a narrow tile, are 2,048 words.
//
//   set       a tile's slots become bits, those that stay once more in a second array; growth sets bits of empty positions there (draw.cuh,
//             gradient.cuh)
//   count     bits of every row and of every tile, and where each begins: blocks take tiles in order, tell their own sums and look back for
//             those before (decoupled look-back, Merrill and Garland 2016)
//   place     a row's set bits, in slot order: the new index in its place, and what is carried out of place. Tensors that do not fit out of
//             place at once wait for another pass.
// A block a tile, in place a warp a row. The old slot of a position is a count of old bits, the new one of new bits.
// Bytes a slot: set reads 2; place reads and writes the elements once and writes 2. Of each position: set writes two bits, count reads one,
// place both. Limit of place: instructions for every set bit, about 30, of which the fullest word of a row decides.
#pragma once

#include "../choose/draw.cuh"
#include "../position_bits.cuh"
#include "carry.cuh"

namespace snack::cuda {

inline constexpr int kTileWords = kStripRows * kPanelWords;

/// The set that draws insert into: live and drawn positions.
struct BitSet {
  PositionBits bits;
  __device__ __forceinline__ bool contains(int64_t row, int64_t col) const { return (fresh(bits.word(row, col)) >> (col & 31)) & 1; }
  __device__ __forceinline__ bool insert(int64_t row, int64_t col, uint64_t) const {
    const uint32_t bit = 1u << (col & 31);
    return (atomicOr(bits.word(row, col), bit) & bit) == 0;
  }
};

/// Where a tile lies.
struct TilePlace {
  int64_t panel, row0;
  int rows, width;  // of a row, in words
  __device__ TilePlace(const Geometry& g, const PositionBits& bits, int64_t tile)
      : panel(tile / g.strips()), row0(tile % g.strips() * kStripRows), rows(int(min(int64_t{kStripRows}, g.out - row0))), width(bits.width(panel)) {}
};

// Words that a thread gathers before it ORs them into shared memory.
struct JoinedBits {
  uint32_t at = 0, bits = 0;
  __device__ __forceinline__ void add(uint32_t* words, uint32_t word, uint32_t bit) {
    if (word != at) {
      flush(words);
      at = word, bits = 0;
    }
    bits |= bit;
  }
  __device__ __forceinline__ void flush(uint32_t* words) const {
    if (bits != 0) atomicOr(words + at, bits);
  }
};

static __global__ void __launch_bounds__(kThreads) set_bits(Geometry g, const uint16_t* index, const int64_t* tile_ptr, const uint32_t* kept, PositionBits old_bits,
                                                            PositionBits bits, const int* unless) {
  constexpr int kInARow = 8;  // slots of a thread: few words
  __shared__ uint32_t old_words[kTileWords], kept_words[kTileWords];
  await_stream();
  if (unless != nullptr && *unless != 0) return;
  const int64_t tile = blockIdx.x, end = tile_ptr[tile + 1];
  const TilePlace at(g, bits, tile);
  for (int i = threadIdx.x; i < kTileWords; i += kThreads) old_words[i] = kept_words[i] = 0;
  __syncthreads();
  for (int64_t slot = tile_ptr[tile] + kInARow * int64_t(threadIdx.x); slot < end; slot += kInARow * kThreads) {
    const int count = int(min(int64_t{kInARow}, end - slot)), shift = int(slot & 31);
    uint32_t word[kInARow];  // row in tile << 10 | column: word << 5 | bit
#pragma unroll
    for (int i = 0; i < kInARow; ++i) word[i] = i < count ? index[slot + i] : 0u;
    const uint32_t stays = __funnelshift_r(kept[slot >> 5], shift + count > 32 ? kept[(slot >> 5) + 1] : 0u, shift);
    JoinedBits old, staying;
#pragma unroll
    for (int i = 0; i < kInARow; ++i) {
      if (i >= count) continue;
      old.add(old_words, word[i] >> 5, 1u << (word[i] & 31));
      if ((stays >> i) & 1) staying.add(kept_words, word[i] >> 5, 1u << (word[i] & 31));
    }
    old.flush(old_words), staying.flush(kept_words);
  }
  __syncthreads();
  uint32_t *to_old = old_bits.row(at.panel, at.row0), *to = bits.row(at.panel, at.row0);
  for (int i = threadIdx.x; i < at.rows * at.width; i += kThreads) {
    const int word = i / at.width * kPanelWords + i % at.width;
    to_old[i] = old_words[word], to[i] = kept_words[word];
  }
}

/// Tells the sum of a tile and gets that of the tiles before. One warp calls; tiles are taken in order, so those before are under way.
/// A tile's state: 1 << 62 | its own sum, then 2 << 62 | the sum up to it.
__device__ __forceinline__ int64_t sum_before(unsigned long long* states, int64_t tile, int64_t sum) {
  constexpr int kShift = 62;
  constexpr unsigned long long kSum = (1ull << kShift) - 1;
  const int lane = threadIdx.x % 32;
  if (lane == 0) atomicExch(states + tile, (tile == 0 ? 2ull : 1ull) << kShift | static_cast<unsigned long long>(sum));
  int64_t before = 0;
  for (int64_t next = tile - 1; next >= 0; next -= 32) {
    const int64_t mine = next - lane;
    unsigned long long state = 2ull << kShift;  // before the first tile there is nothing
    if (mine >= 0)
      while ((state = *static_cast<volatile unsigned long long*>(states + mine)) >> kShift == 0) {
      }
    const uint32_t complete = __ballot_sync(~0u, state >> kShift == 2);
    const int stop = complete == 0 ? 31 : __ffs(int(complete)) - 1;  // the nearest tile that knows the sum up to it
    int64_t part = lane <= stop ? int64_t(state & kSum) : 0;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) part += __shfl_xor_sync(~0u, part, d);
    before += part;
    if (complete != 0) break;
  }
  if (lane == 0 && tile > 0) atomicExch(states + tile, 2ull << kShift | static_cast<unsigned long long>(before + sum));
  return before;
}

static __global__ void __launch_bounds__(kThreads) count_bits(Geometry g, PositionBits bits, unsigned long long* tile_states, int64_t* new_tile_ptr,
                                                              uint16_t* new_row_starts, ExchangeState* state) {
  constexpr int kWarps = kThreads / 32, kRows = kStripRows / kWarps;
  __shared__ int counts[kStripRows];
  __shared__ int64_t taken;
  await_stream();
  if (threadIdx.x == 0) taken = int64_t(atomicAdd(&state->next_tile, 1u));
  __syncthreads();
  const int64_t tile = taken;
  const TilePlace at(g, bits, tile);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* from = bits.row(at.panel, at.row0);
  uint32_t words[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = warp * kRows + i;
    words[i] = row < at.rows && lane < at.width ? from[row * at.width + lane] : 0u;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned sum = __reduce_add_sync(~0u, unsigned(__popc(words[i])));
    if (lane == 0) counts[warp * kRows + i] = int(sum);
  }
  __syncthreads();
  if (warp > 0) return;
  const int first = counts[2 * lane], second = counts[2 * lane + 1];
  int upto = first + second;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, upto, d);
    if (lane >= d) upto += other;
  }
  const int all = __shfl_sync(~0u, upto, 31);
  uint16_t* starts = new_row_starts + at.panel * g.out + at.row0;
  if (2 * lane < at.rows) starts[2 * lane] = uint16_t(upto - second - first);
  if (2 * lane + 1 < at.rows) starts[2 * lane + 1] = uint16_t(upto - second);
  const int64_t before = sum_before(tile_states, tile, all);
  if (lane == 0) new_tile_ptr[tile + 1] = before + all;
  if (lane == 0 && tile == 0) new_tile_ptr[0] = 0;
}

/// A tensor on its way.
struct Moving {
  const void* from;
  void* to;  // out of place
  CarriedType type;
  const float* fill;
};

/// What place reads and writes. The old tile pointers and row starts stay; the index is written where it belongs.
struct Placing {
  Geometry geometry;
  const int64_t *tile_ptr, *new_tile_ptr;
  const uint16_t *row_starts, *new_row_starts;
  const uint32_t* kept;
  PositionBits old_bits, bits;
  uint16_t* index;  // null: it is written already
  const ExchangeState* state;
  Moving moving[kMaxCarried];
  int count;
};

struct RowShared {
  uint32_t slot[kPanelCols];  // of a new slot: its column | old slot in row << 10 | does it stay << 31
};

// The old slots' bits of a word of `count` slots from `slot` on.
__device__ __forceinline__ uint32_t kept_from(const uint32_t* kept, int64_t slot, int count) {
  if (count == 0) return 0;
  const int shift = int(slot % 32);
  return __funnelshift_r(kept[slot / 32], shift + count > 32 ? kept[slot / 32 + 1] : 0u, shift);
}

inline constexpr int kMovedAtOnce = 4;

// The elements of a lane's new slots, every 32nd from `first` on.
template <class Element>
__device__ __forceinline__ void move_elements(const Moving& m, const uint32_t (&slot)[kMovedAtOnce], int64_t old_begin, int64_t new_begin, uint32_t first, uint32_t count) {
  const Element* from = static_cast<const Element*>(m.from) + old_begin;
  Element* to = static_cast<Element*>(m.to) + new_begin + first;
  const Element grown = Element(fill_bits(m.type, *m.fill));
  Element element[kMovedAtOnce];
#pragma unroll
  for (int u = 0; u < kMovedAtOnce; ++u) element[u] = slot[u] >> 31 ? from[(slot[u] >> kTileColBits) & (2 * kPanelCols - 1)] : grown;
#pragma unroll
  for (int u = 0; u < kMovedAtOnce; ++u)
    if (first + 32 * u < count) to[32 * u] = element[u];
}

// Asks for what a row will move, a line a lane, while its slots are found.
__device__ __forceinline__ void prefetch_row(const Placing& p, int64_t old_begin, uint32_t old_count) {
  constexpr uint32_t kLine = 128;
  for (int i = 0; i < p.count; ++i) {
    const uint32_t size = uint32_t(size_of(p.moving[i].type)), bytes = old_count * size, at = threadIdx.x % 32 * kLine;
    if (at >= bytes + kLine - 1 || bytes == 0) continue;
    const char* line = static_cast<const char*>(p.moving[i].from) + old_begin * size + min(at, bytes - 1);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

static __global__ void __launch_bounds__(kThreads) place_rows(const __grid_constant__ Placing p) {
  __shared__ RowShared all[kThreads / 32];
  await_stream();
  if (p.state->error != 0) return;
  const uint32_t lane = threadIdx.x % 32;
  RowShared& s = all[threadIdx.x / 32];
  // Rows of panels and words of bits are fewer than 2^32, as there are eight slots and more a row on average.
  const uint32_t segment = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, out = uint32_t(p.geometry.out);
  if (segment >= uint32_t(p.geometry.segments())) return;
  const uint32_t panel = segment / out, row = segment - panel * out, tile = panel * uint32_t(p.geometry.strips()) + row / kStripRows;
  const uint32_t width = uint32_t(p.bits.width(panel)), word = panel * out * kPanelWords + row * width + lane;
  const bool exists = lane < width;
  const uint32_t old = exists ? p.old_bits.words[word] : 0u, now = exists ? p.bits.words[word] : 0u;
  const int64_t old_begin = p.tile_ptr[tile] + p.row_starts[segment], new_begin = p.new_tile_ptr[tile] + p.new_row_starts[segment];

  const uint32_t mine = uint32_t(__popc(old)) | uint32_t(__popc(now)) << 16;
  uint32_t upto = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, upto, d);
    if (lane >= uint32_t(d)) upto += other;
  }
  const uint32_t sums = __shfl_sync(~0u, upto, 31), count = sums >> 16;
  prefetch_row(p, old_begin, sums & 0xffff);
  upto -= mine;
  uint32_t kept = kept_from(p.kept, old_begin + (upto & 0xffff), int(mine & 0xffff));
  uint32_t slot = (upto & 0xffff) << kTileColBits | uint32_t(lane) << 5, *to = s.slot + (upto >> 16);
  for (uint32_t left = old | now; left != 0;) {
    const uint32_t bit = left & (0u - left), was = (old & bit) != 0;
    left ^= bit;
    if ((now & bit) != 0) *to++ = (slot + 31 - __clz(int(bit))) | (kept & was) << 31;
    slot += was << kTileColBits, kept >>= was;
  }
  __syncwarp();
  for (uint32_t first = lane; first < count; first += 32 * kMovedAtOnce) {
    uint32_t from[kMovedAtOnce];
#pragma unroll
    for (int u = 0; u < kMovedAtOnce; ++u) from[u] = first + 32 * u < count ? s.slot[first + 32 * u] : 0u;
    if (p.index != nullptr) {
#pragma unroll
      for (int u = 0; u < kMovedAtOnce; ++u)
        if (first + 32 * u < count) p.index[new_begin + first + 32 * u] = uint16_t((row % kStripRows) << kTileColBits | (from[u] & (kPanelCols - 1)));
    }
    for (int i = 0; i < p.count; ++i)
      with_element(p.moving[i].type, [&](auto element) { move_elements<decltype(element)>(p.moving[i], from, old_begin, new_begin, first, count); });
  }
}

}  // namespace snack::cuda
