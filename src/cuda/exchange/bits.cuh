// exchange on a bit a position, for patterns of enough slots: 64 rows of a panel of 1,024 columns, a narrow tile, are 2,048 words.
//
//   kept      the tile's kept slots become bits; growth sets bits of empty positions (draw.cuh, gradient.cuh)
//   count     set bits of a tile, and in the last block their sum over the tiles before: the new tile pointers
//   place     every set bit, in slot order: the new index, and the old slot that its connection comes from
// A block a tile. Words of a panel lie row by row, those of the last panel without the columns that are not there.
// Bytes: kept and place read the index (2 a slot) and the kept bits; place writes 6 a slot.
#pragma once

#include "../choose/draw.cuh"
#include "../layout.hpp"
#include "../position_bits.cuh"
#include "state.cuh"

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

// Sets the bits of slots begin .. end of a tile in `words` (shared memory, zeros): of the kept ones, or of all where kept is null. A thread
// joins the bits of eight slots in a row; row in tile << 10 | column >> 5 is the word.
__device__ __forceinline__ void set_slot_bits(const uint16_t* index, int64_t begin, int64_t end, const uint32_t* kept, uint32_t* words) {
  for (int64_t slot = begin + 8 * int64_t(threadIdx.x); slot < end; slot += 8 * int64_t(blockDim.x)) {
    const int count = int(min(int64_t{8}, end - slot)), shift = int(slot & 31);
    uint32_t stays = 0xff;
    if (kept != nullptr) stays = __funnelshift_r(kept[slot >> 5], shift + count > 32 ? kept[(slot >> 5) + 1] : 0u, shift);
    uint32_t at = 0, bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= count || ((stays >> i) & 1) == 0) continue;
      const uint32_t word = index[slot + i];
      if (word >> 5 != at) {
        if (bits != 0) atomicOr(words + at, bits);
        at = word >> 5, bits = 0;
      }
      bits |= 1u << (word & 31);
    }
    if (bits != 0) atomicOr(words + at, bits);
  }
}

static __global__ void __launch_bounds__(kThreads) set_kept_bits(Geometry g, const uint16_t* index, const int64_t* tile_ptr, const uint32_t* kept, PositionBits bits) {
  __shared__ uint32_t words[kTileWords];
  await_stream();
  const int64_t tile = blockIdx.x;
  const TilePlace at(g, bits, tile);
  for (int i = threadIdx.x; i < kTileWords; i += kThreads) words[i] = 0;
  __syncthreads();
  set_slot_bits(index, tile_ptr[tile], tile_ptr[tile + 1], kept, words);
  __syncthreads();
  uint32_t* to = bits.row(at.panel, at.row0);
  for (int i = threadIdx.x; i < at.rows * at.width; i += kThreads) to[i] = words[i / at.width * kPanelWords + i % at.width];
}

static __global__ void __launch_bounds__(kThreads) count_tile_bits(Geometry g, PositionBits bits, int64_t* new_tile_ptr, ExchangeState* state) {
  constexpr int kShare = 16;  // tiles of a thread at a time
  __shared__ BlockScratch s;
  await_stream();
  const int64_t tile = blockIdx.x, tiles = g.tiles();
  const TilePlace at(g, bits, tile);
  const uint32_t* from = bits.row(at.panel, at.row0);
  int64_t mine = 0, all;
  for (int i = threadIdx.x; i < at.rows * at.width; i += kThreads) mine += __popc(from[i]);
  inclusive_sum(mine, s.warp, &all);
  if (threadIdx.x == 0) new_tile_ptr[tile + 1] = all;
  if (!is_last_block(&state->tickets, s)) return;
  if (threadIdx.x == 0) new_tile_ptr[0] = 0;
  int64_t before = 0;
  for (int64_t base = 0; base < tiles; base += kShare * kThreads) {
    int64_t share = 0;
    const int64_t first = base + int64_t(threadIdx.x) * kShare;
    for (int i = 0; i < kShare && first + i < tiles; ++i) share += fresh(new_tile_ptr + first + i + 1);
    int64_t sum = before + inclusive_sum(share, s.warp, &all) - share;
    for (int i = 0; i < kShare && first + i < tiles; ++i) new_tile_ptr[first + i + 1] = sum += fresh(new_tile_ptr + first + i + 1);
    before += all;
  }
}

/// What place reads and writes. The old index and tile pointers stay; row starts are written where they belong.
struct Placing {
  Geometry geometry;
  const uint16_t* index;
  const int64_t *tile_ptr, *new_tile_ptr;
  const uint32_t* kept;
  PositionBits bits;
  uint16_t* new_index;
  int32_t* source;       // the old slot, or -1
  uint16_t* row_starts;  // null: the geometry has none
  const ExchangeState* state;
};

struct PlaceShared {
  uint32_t old_words[kTileWords], new_words[kTileWords];
  uint16_t old_before[kTileWords], new_before[kTileWords];  // bits in the words before
  uint32_t staged[kThreads / 32][kPanelCols];               // a row's new slots: column | old slot in tile << 10 | is kept << 26
  int64_t warps[32];
};

static __global__ void __launch_bounds__(kThreads) place_tiles(Placing p) {
  constexpr int kShare = kTileWords / kThreads;
  extern __shared__ float4 shared[];
  PlaceShared& s = *reinterpret_cast<PlaceShared*>(shared);
  await_stream();
  if (p.state->error != 0) return;
  const int64_t tile = blockIdx.x, begin = p.tile_ptr[tile], new_begin = p.new_tile_ptr[tile];
  const TilePlace at(p.geometry, p.bits, tile);
  const uint32_t* from = p.bits.row(at.panel, at.row0);
  for (int i = threadIdx.x; i < kTileWords; i += kThreads) {
    const int row = i / kPanelWords, word = i % kPanelWords;
    s.old_words[i] = 0;
    s.new_words[i] = row < at.rows && word < at.width ? from[row * at.width + word] : 0u;
  }
  __syncthreads();
  set_slot_bits(p.index, begin, p.tile_ptr[tile + 1], nullptr, s.old_words);
  __syncthreads();

  const int first = int(threadIdx.x) * kShare;
  int64_t both = 0, all;  // old bits, and new ones << 32
  for (int i = first; i < first + kShare; ++i) both += __popc(s.old_words[i]) + (int64_t(__popc(s.new_words[i])) << 32);
  int64_t sum = inclusive_sum(both, s.warps, &all) - both;
  for (int i = first; i < first + kShare; ++i) {
    s.old_before[i] = uint16_t(sum), s.new_before[i] = uint16_t(sum >> 32);
    sum += __popc(s.old_words[i]) + (int64_t(__popc(s.new_words[i])) << 32);
  }
  __syncthreads();
  if (p.row_starts != nullptr && int(threadIdx.x) < at.rows)
    p.row_starts[at.panel * p.geometry.out + at.row0 + threadIdx.x] = s.new_before[threadIdx.x * kPanelWords];

  const int lane = threadIdx.x % 32;
  uint32_t* staged = s.staged[threadIdx.x / 32];
  for (int row = threadIdx.x / 32; row < at.rows; row += kThreads / 32) {
    const int i = row * kPanelWords + lane, row_begin = s.new_before[row * kPanelWords];
    const int row_end = row + 1 < kStripRows ? s.new_before[(row + 1) * kPanelWords] : int(all >> 32);
    const uint32_t old = s.old_words[i];
    int to = s.new_before[i] - row_begin;
    for (uint32_t left = s.new_words[i]; left != 0; left &= left - 1) {
      const int bit = __ffs(int(left)) - 1;
      const uint32_t slot = s.old_before[i] + uint32_t(__popc(old & ((1u << bit) - 1)));
      const bool stays = ((old >> bit) & 1) != 0 && is_kept(p.kept, begin + slot);
      staged[to++] = uint32_t(32 * lane + bit) | (stays ? slot << kTileColBits | 1u << 26 : 0u);
    }
    __syncwarp();
    for (int j = lane; j < row_end - row_begin; j += 32) {
      const uint32_t entry = staged[j];
      const int64_t slot = new_begin + row_begin + j;
      p.new_index[slot] = uint16_t(row << kTileColBits | int(entry & (kPanelCols - 1)));
      p.source[slot] = entry >> 26 ? int32_t(begin + ((entry >> kTileColBits) & 0xffff)) : -1;
    }
    __syncwarp();
  }
}

}  // namespace snack::cuda
