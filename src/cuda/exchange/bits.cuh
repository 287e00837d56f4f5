// exchange on a bit a position, for patterns of enough slots: 64 rows of a panel of 1,024 columns, a narrow tile, are 2,048 words.
//
//   set       a tile's slots become bits, those that stay once more in a second array; growth sets bits of empty positions there (draw.cuh,
//             gradient.cuh)
//   place     a tile's set bits, in slot order: the new index in its place, and what is carried out of place. Where a tile begins is the sum of
//             the set bits before it: blocks take tiles in order, tell their own sums and look back for those before (decoupled look-back,
//             Merrill and Garland 2016). Tensors that do not fit out of place at once wait for another pass.
// A block a tile. The old slot of a position is a count of old bits, the new one of new bits.
// Bytes a slot: set reads 2; place reads and writes the elements once and writes 2. Of each position: set writes two bits, place reads them.
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

/// A tensor on its way.
struct Moving {
  const void* from;
  void* to;  // out of place
  CarriedType type;
  const float* fill;
};

/// What place reads and writes. The old tile pointers stay; index and row starts are written where they belong.
struct Placing {
  Geometry geometry;
  const int64_t* tile_ptr;
  int64_t* new_tile_ptr;
  unsigned long long* tile_states;  // zeros
  const uint32_t* kept;
  PositionBits old_bits, bits;
  uint16_t* index;
  uint16_t* row_starts;  // null: the geometry has none
  ExchangeState* state;
  bool is_first;         // only then all but the tensors is written
  Moving moving[kMaxCarried];
  int count;
};

inline constexpr int kPlacedAtOnce = 2048;  // new slots of a block

struct PlaceShared {
  uint32_t old_words[kTileWords], new_words[kTileWords];
  uint16_t old_before[kTileWords], new_before[kTileWords];  // bits in the words before
  uint32_t kept[kTileWords + 1];                            // of the tile's old slots, from the word of the first one on
  int32_t from[kPlacedAtOnce];                              // old slot in tile of a new slot, or -1
  uint16_t word[kPlacedAtOnce];                             // its index
  int64_t warps[32];
  int64_t tile, new_begin;
};

// New slots `first` .. `first` + kPlacedAtOnce of the tile: where they come from and what their index is.
__device__ __forceinline__ void expand(PlaceShared& s, int first, int kept_shift) {
  for (int i = threadIdx.x; i < kTileWords; i += kThreads) {
    uint32_t left = s.new_words[i];
    int to = int(s.new_before[i]) - first;
    if (to >= kPlacedAtOnce || to + __popc(left) <= 0) continue;
    const uint32_t old = s.old_words[i], before = s.old_before[i];
    for (; left != 0; left &= left - 1, ++to) {
      if (to < 0 || to >= kPlacedAtOnce) continue;
      const int bit = __ffs(int(left)) - 1;
      const uint32_t slot = before + uint32_t(__popc(old & ((1u << bit) - 1))), at = slot + uint32_t(kept_shift);
      const bool stays = ((old >> bit) & 1) != 0 && ((s.kept[at >> 5] >> (at & 31)) & 1) != 0;
      s.from[to] = stays ? int32_t(slot) : -1;
      s.word[to] = uint16_t(i << 5 | bit);
    }
  }
}

template <class Element>
__device__ __forceinline__ void move_elements(const Moving& m, const PlaceShared& s, int64_t old_begin, int64_t new_begin, int count) {
  constexpr int kAtOnce = kPlacedAtOnce / kThreads;
  const Element* from = static_cast<const Element*>(m.from) + old_begin;
  Element* to = static_cast<Element*>(m.to) + new_begin;
  const Element grown = Element(fill_bits(m.type, *m.fill));
  Element element[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int i = u * kThreads + int(threadIdx.x), slot = i < count ? s.from[i] : -1;
    element[u] = slot < 0 ? grown : from[slot];
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u)
    if (u * kThreads + int(threadIdx.x) < count) to[u * kThreads + threadIdx.x] = element[u];
}

static __global__ void __launch_bounds__(kThreads) place_tiles(const __grid_constant__ Placing p) {
  constexpr int kShare = kTileWords / kThreads;
  extern __shared__ float4 shared[];
  PlaceShared& s = *reinterpret_cast<PlaceShared*>(shared);
  await_stream();
  if (p.state->error != 0) return;
  if (threadIdx.x == 0) s.tile = p.is_first ? int64_t(atomicAdd(&p.state->next_tile, 1u)) : int64_t(blockIdx.x);
  __syncthreads();
  const int64_t tile = s.tile, begin = p.tile_ptr[tile], end = p.tile_ptr[tile + 1];
  const TilePlace at(p.geometry, p.bits, tile);
  const uint32_t *old_from = p.old_bits.row(at.panel, at.row0), *from = p.bits.row(at.panel, at.row0);
  for (int i = threadIdx.x; i < kTileWords; i += kThreads) {
    const int row = i / kPanelWords, word = i % kPanelWords;
    const bool exists = row < at.rows && word < at.width;
    s.old_words[i] = exists ? old_from[row * at.width + word] : 0u;
    s.new_words[i] = exists ? from[row * at.width + word] : 0u;
  }
  const int64_t kept_begin = begin / 32, kept_end = (end + 31) / 32;
  for (int64_t i = kept_begin + threadIdx.x; i < kept_end; i += kThreads) s.kept[i - kept_begin] = p.kept[i];
  __syncthreads();

  const int first = int(threadIdx.x) * kShare;
  int64_t both = 0, all;  // old bits, and new ones << 32
#pragma unroll
  for (int i = 0; i < kShare; ++i) both += __popc(s.old_words[first + i]) + (int64_t(__popc(s.new_words[first + i])) << 32);
  int64_t sum = inclusive_sum(both, s.warps, &all) - both;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    s.old_before[first + i] = uint16_t(sum), s.new_before[first + i] = uint16_t(sum >> 32);
    sum += __popc(s.old_words[first + i]) + (int64_t(__popc(s.new_words[first + i])) << 32);
  }
  const int count = int(all >> 32);
  if (threadIdx.x < 32) {
    const int64_t before = p.is_first ? sum_before(p.tile_states, tile, count) : p.new_tile_ptr[tile];
    if (threadIdx.x == 0) {
      s.new_begin = before;
      if (p.is_first) p.new_tile_ptr[tile + 1] = before + count;
      if (p.is_first && tile == 0) p.new_tile_ptr[0] = 0;
    }
  }
  __syncthreads();
  const int64_t new_begin = s.new_begin;
  if (p.is_first && p.row_starts != nullptr && int(threadIdx.x) < at.rows)
    p.row_starts[at.panel * p.geometry.out + at.row0 + threadIdx.x] = s.new_before[threadIdx.x * kPanelWords];

  for (int chunk = 0; chunk < count; chunk += kPlacedAtOnce) {
    const int here = min(kPlacedAtOnce, count - chunk);
    expand(s, chunk, int(begin % 32));
    __syncthreads();
    if (p.is_first)
      for (int i = threadIdx.x; i < here; i += kThreads) p.index[new_begin + chunk + i] = s.word[i];
    for (int i = 0; i < p.count; ++i)
      with_element(p.moving[i].type, [&](auto element) { move_elements<decltype(element)>(p.moving[i], s, begin, new_begin + chunk, here); });
    __syncthreads();
  }
}

}  // namespace snack::cuda
