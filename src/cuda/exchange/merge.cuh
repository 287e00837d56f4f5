// exchange on lists, for patterns of few slots: what is kept is merged with the sorted grown positions by computing where each goes.
//
//   a kept slot   to (kept slots before it) + (grown positions before it)
//   position i    of the grown ones in slot order, to i + (kept slots before it)
// Kept slots before a slot: a count for every 32 slots, and the bits below. Grown positions before one: a binary search.
#pragma once

#include "../layout.hpp"
#include "../slots.cuh"
#include "state.cuh"

namespace snack::cuda {

inline constexpr int kSortedBits = 63;  // of keys of 62 bits, so that ~0 comes last

// before[w]: kept slots of word w; a sum over it makes it those of the words before.
static __global__ void count_kept(const uint32_t* kept, int64_t nnz, int32_t* before) {
  await_stream();
  const int64_t word = thread_number();
  if (word < (nnz + 31) / 32) before[word] = __popc(kept[word]);
}

// Fills a list with ~0, unless *unless.
static __global__ void empty_list(unsigned long long* keys, int64_t count, const int* unless) {
  await_stream();
  const int64_t i = thread_number();
  if (i < count && *unless == 0) keys[i] = ~0ull;
}

// The keys of the table, in any order.
static __global__ void list_drawn(const unsigned long long* table, int64_t capacity, unsigned long long* keys, int64_t room, ExchangeState* state) {
  await_stream();
  const int64_t i = thread_number();
  const bool is_entry = i < capacity && table[i] != ~0ull;
  const uint32_t entries = __ballot_sync(~0u, is_entry);
  unsigned long long begin = 0;
  if (threadIdx.x % 32 == 0 && entries != 0) begin = atomicAdd(&state->listed, static_cast<unsigned long long>(__popc(entries)));
  const int64_t at = int64_t(__shfl_sync(~0u, begin, 0)) + __popc(entries & ((1u << (threadIdx.x % 32)) - 1));
  if (is_entry && at < room) keys[at] = table[i];
}

struct Merging {
  DevicePattern old;
  const uint32_t* kept;
  const int32_t* before;
  const unsigned long long* grown;  // sorted, state->drawing.wanted of them
  void* new_index;
  int64_t* new_tile_ptr;
  int32_t* source;  // the old slot, or -1
  const ExchangeState* state;

  __device__ int64_t grown_count() const { return state->drawing.wanted; }
  __device__ int64_t kept_before(int64_t slot) const {
    if (slot == old.geometry.nnz) return slot - grown_count();
    return before[slot / 32] + __popc(kept[slot / 32] & ((1u << (slot % 32)) - 1));
  }
  __device__ int64_t grown_before(SlotKey key) const { return lower_bound(grown, grown_count(), static_cast<unsigned long long>(key)); }
  __device__ void put(int64_t to, int64_t row, int64_t col, int64_t from) const {
    const uint32_t word = DevicePattern::pack(row, col, old.bits());
    if (old.geometry.packing == Packing::kNarrow) static_cast<uint16_t*>(new_index)[to] = uint16_t(word);
    else static_cast<uint32_t*>(new_index)[to] = word;
    source[to] = int32_t(from);
  }
};

// One block a piece of a tile.
template <class Word>
__global__ void __launch_bounds__(kThreads) merge_kept(Merging m, int64_t pieces) {
  await_stream();
  if (m.state->error != 0) return;
  for_slots_of_piece(static_cast<const Word*>(m.old.index), m.old.tile_ptr, m.old.geometry.strips(), pieces, blockIdx.x, [&](int64_t slot, int64_t row, int64_t col) {
    if (is_kept(m.kept, slot)) m.put(m.kept_before(slot) + m.grown_before(slot_key(row, col)), row, col, slot);
  });
}

static __global__ void merge_grown(Merging m) {
  await_stream();
  const int64_t i = thread_number();
  if (m.state->error != 0 || i >= m.grown_count()) return;
  const SlotKey key = m.grown[i];
  bool occupied;
  const int64_t slot = m.old.lower_bound(key_row(key), key_col(key), &occupied);
  m.put(i + m.kept_before(slot), key_row(key), key_col(key), -1);
}

static __global__ void merge_tile_pointers(Merging m) {
  await_stream();
  const int64_t tile = thread_number(), tiles = m.old.geometry.tiles();
  if (m.state->error != 0 || tile > tiles) return;
  m.new_tile_ptr[tile] = tile == tiles ? m.old.geometry.nnz : m.kept_before(m.old.tile_ptr[tile]) + m.grown_before(m.old.key_of(tile, 0));
}

}  // namespace snack::cuda
