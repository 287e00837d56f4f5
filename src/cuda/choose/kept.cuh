// A bit a slot: whether its connection stays. Slot s is bit s % 32 of word s / 32; bits beyond the last slot are 0.
#pragma once

#include "../pattern.cuh"
#include "choice.cuh"

namespace snack::cuda {

inline void check_slots(const char* operation, int64_t nnz) {
  SNACK_CHECK(nnz <= kMaxExtent, operation, ": ", nnz, " connections are more than a card edits, 2147483647; use the CPU or split the layer.");
}

inline int64_t kept_words(int64_t nnz) { return ceil_div(nnz, 32); }

__device__ __forceinline__ bool is_kept(const uint32_t* kept, int64_t slot) { return (kept[slot / 32] >> (slot % 32)) & 1; }

/// Kept: what a choice did not take. A warp makes four words.
template <class Key>
__global__ void __launch_bounds__(kThreads) mark_kept(ValueKeys<Key> keys, const Choice<Key>* choice, uint32_t* kept) {
  constexpr int kAtOnce = 4;
  using Raw = typename ValueKeys<Key>::Raw;
  await_stream();
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * 32 * kAtOnce;
  const bool is_short = keys.is_short();
  const Key bounds[2] = {choice->bound[0], choice->bound[1]};
  Raw raw[kAtOnce];
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t slot = first + 32 * u + lane;
    raw[u] = slot >= keys.slots ? Raw(0) : is_short ? keys.load_short(slot) : keys.load_whole(slot);
  }
#pragma unroll
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t slot = first + 32 * u + lane;
    Key key;
    int which;
    const bool counts = keys.key_of(keys.widen(raw[u]), slot, &key, &which);
    const bool stays = slot < keys.slots && !(counts && key < (which ? bounds[1] : bounds[0]));
    const uint32_t word = __ballot_sync(~0u, stays);
    if (lane == 0 && first + 32 * u < keys.slots) kept[(first + 32 * u) / 32] = word;
  }
}
inline int64_t mark_blocks(int64_t nnz) { return ceil_div(nnz, 4 * kThreads); }

}  // namespace snack::cuda
