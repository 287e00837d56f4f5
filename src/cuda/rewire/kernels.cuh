// Kernels of rewire: the surviving slots and the sorted grown positions are merged by computing where each of them goes.
//
// shift[s] first holds (grown positions that lie just before slot s) - (1 if s is dropped), then its inclusive sum, so that a
// surviving slot s moves to s + shift[s], and the i-th grown position (in key order), which lies before old slot p, to
// p + shift[p - 1] + its rank among the grown positions before p. Every error is found before anything is moved.
#pragma once

#include "../launch.hpp"
#include "../pattern.cuh"
#include "../slots.cuh"
#include "snack/kernels/rewire.hpp"

namespace snack::cuda {

/// Scratch of an edit.
struct RewireScratch {
  int32_t* shift;         // a slot
  uint8_t* dropped;       // a slot
  SlotKey *keys_in, *keys;    // a grown position: as listed, sorted
  int64_t *order_in, *order;  // its number in the list
  int64_t* before;        // the old slot it lies before
};

// The first to report is kept.
__device__ __forceinline__ void report(RewireStatus* status, RewireError error, int64_t row_or_slot, int64_t col) {
  auto* word = reinterpret_cast<unsigned long long*>(&status->error);
  if (atomicCAS(word, 0ull, static_cast<unsigned long long>(error)) != 0) return;
  status->row_or_slot = row_or_slot;
  status->col = col;
}

__device__ __forceinline__ bool is_refused(const RewireStatus* status) { return *static_cast<const volatile int64_t*>(&status->error) != 0; }

static __global__ void rewire_mark_drops(const int64_t* drop, int64_t drops, int64_t nnz, RewireScratch scratch, RewireStatus* status) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= drops) return;
  const int64_t slot = drop[i];
  if (slot < 0 || slot >= nnz) return report(status, RewireError::kDropOutOfRange, slot, 0);
  if (atomicAdd(scratch.shift + slot, -1) != 0) return report(status, RewireError::kDropTwice, slot, 0);
  scratch.dropped[slot] = 1;
}

static __global__ void rewire_keys(const int64_t* rows, const int64_t* cols, int64_t grows, Geometry g, RewireScratch scratch, RewireStatus* status) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= grows) return;
  const int64_t row = rows[i], col = cols[i];
  const bool fits = row >= 0 && row < g.out && col >= 0 && col < g.in;
  if (!fits) report(status, RewireError::kGrowOutOfRange, row, col);
  scratch.keys_in[i] = fits ? slot_key(row, col) : 0;
  scratch.order_in[i] = i;
}

static __global__ void rewire_place_grown(int64_t grows, DevicePattern old, RewireScratch scratch, RewireStatus* status) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= grows || is_refused(status)) return;
  const SlotKey key = scratch.keys[i];
  const int64_t row = key_row(key), col = key_col(key);
  bool occupied;
  const int64_t slot = old.lower_bound(row, col, &occupied);
  if (i > 0 && scratch.keys[i - 1] == key) report(status, RewireError::kGrowTwice, row, col);
  else if (occupied && !scratch.dropped[slot]) report(status, RewireError::kGrowOccupied, row, col);
  scratch.before[i] = slot;
  if (slot < old.geometry.nnz) atomicAdd(scratch.shift + slot, 1);
}

// One block a piece of an old tile.
template <class Word>
__global__ void rewire_move_kept(const Word* index, DevicePattern old, int64_t pieces, RewireScratch scratch, RewireOutput out) {
  await_stream();
  const bool refused = is_refused(out.status);
  const int bits = row_bits(out.geometry.packing);
  for_slots_of_piece(index, old.tile_ptr, old.geometry.strips(), pieces, blockIdx.x, [&](int64_t slot, int64_t row, int64_t col) {
    if (!refused && scratch.dropped[slot]) return;
    const int64_t to = refused ? slot : slot + scratch.shift[slot];
    if (to >= out.geometry.nnz) return;  // only where an edit was refused
    const uint32_t word = DevicePattern::pack(row, col, bits);
    if (out.geometry.packing == Packing::kNarrow) static_cast<uint16_t*>(out.index)[to] = uint16_t(word);
    else static_cast<uint32_t*>(out.index)[to] = word;
    out.source[to] = slot;
  });
}

// Surviving slots before old slot p, given the number of grown positions that lie before slots < p.
__device__ __forceinline__ int64_t kept_before(int64_t p, int64_t grown_before, const RewireScratch& scratch) {
  return p == 0 ? 0 : p + scratch.shift[p - 1] - grown_before;
}

static __global__ void rewire_move_grown(int64_t grows, RewireScratch scratch, RewireOutput out) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= grows || is_refused(out.status)) return;
  const int64_t p = scratch.before[i], to = kept_before(p, lower_bound(scratch.before, grows, p), scratch) + i;
  const SlotKey key = scratch.keys[i];
  const uint32_t word = DevicePattern::pack(key_row(key), key_col(key), row_bits(out.geometry.packing));
  if (out.geometry.packing == Packing::kNarrow) static_cast<uint16_t*>(out.index)[to] = uint16_t(word);
  else static_cast<uint32_t*>(out.index)[to] = word;
  out.source[to] = -(1 + scratch.order[i]);
}

static __global__ void rewire_tile_pointers(int64_t grows, DevicePattern old, RewireScratch scratch, RewireOutput out) {
  await_stream();
  const int64_t tile = thread_number(), tiles = out.geometry.tiles();
  if (tile > tiles) return;
  if (is_refused(out.status)) {
    // A pattern that can be walked whatever its size, and the old one where the sizes agree.
    out.tile_ptr[tile] = tiles == old.geometry.tiles() ? min(old.tile_ptr[tile], out.geometry.nnz) : 0;
    return;
  }
  if (tile == tiles) {
    out.tile_ptr[tile] = out.geometry.nnz;
    return;
  }
  const int64_t row = (tile % out.geometry.strips()) << row_bits(out.geometry.packing), col = tile / out.geometry.strips() << kTileColBits;
  bool found;
  const int64_t p = old.lower_bound(row, col, &found);
  out.tile_ptr[tile] = kept_before(p, lower_bound(scratch.before, grows, p), scratch) + lower_bound(scratch.keys, grows, slot_key(row, col));
}

}  // namespace snack::cuda
