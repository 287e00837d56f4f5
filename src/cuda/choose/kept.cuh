// A bit a slot: whether its connection stays. Slot s is bit s % 32 of word s / 32; bits beyond the last slot are 0.
#pragma once

#include "../layout.hpp"
#include "../pattern.cuh"
#include "choice.cuh"

namespace snack::cuda {

inline void check_slots(const char* operation, int64_t nnz) {
  SNACK_CHECK(nnz <= kMaxExtent, operation, ": ", nnz, " connections are more than a card edits, 2147483647; use the CPU or split the layer.");
}

inline int64_t kept_words(int64_t nnz) { return ceil_div(nnz, 32); }

__device__ __forceinline__ bool is_kept(const uint32_t* kept, int64_t slot) { return (kept[slot / 32] >> (slot % 32)) & 1; }

/// Kept: what a choice of values did not take. The sift has done it for all but what it listed, if it was its list that the choice was made by.
template <class Key>
__global__ void __launch_bounds__(kThreads) settle_kept(ValueKeys<Key> keys, const Choice<Key>* choice, const Key* list, uint32_t* kept) {
  constexpr int kAtOnce = 4;
  await_stream();
  const Key bounds[2] = {choice->bound[0], choice->bound[1]};
  const int64_t first = thread_number(), step = int64_t(gridDim.x) * kThreads;
  if (choice->is_listed) {
    const int64_t listed = int64_t(choice->listed);
    for (int64_t i = first; i < listed; i += step) {
      const Key entry = list[i], key = untagged(entry);
      const int64_t slot = int64_t(key & ((Key(1) << keys.index_bits) - 1));
      if (key < (class_of(entry) ? bounds[1] : bounds[0])) atomicAnd(kept + slot / 32, ~(1u << (slot % 32)));
    }
    return;
  }
  for (int64_t base = first - threadIdx.x % 32; base < keys.slots; base += kAtOnce * step) {
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t slot = base + u * step + threadIdx.x % 32;
      Key key = 0;
      int which = 0;
      const bool counts = slot < keys.slots && keys.at(slot, &key, &which);
      const uint32_t word = __ballot_sync(~0u, slot < keys.slots && !(counts && key < (which ? bounds[1] : bounds[0])));
      if (threadIdx.x % 32 == 0 && slot < keys.slots) kept[slot / 32] = word;
    }
  }
}

/// Keys that a choice of the values has room for: the sample, and what a bracket holds, twice.
template <class Key>
int64_t value_capacity(int64_t nnz) { return nnz <= kFewThings ? 0 : kKeysBeside<Key> + nnz / 8; }

/// The choice of values, and what is kept.
template <class Key>
void choose_values(const char* operation, const ValueKeys<Key>& keys, const Wanted& wanted, const ChoiceMemory<Key>& memory, uint32_t* kept, const Report& report,
                   Stream stream) {
  const int64_t blocks = std::min<int64_t>(ceil_div(keys.slots, 4 * kThreads), 5 * capability(current_device()).multiprocessors);
  choose(operation, keys, keys.slots, kFewThings, 1, wanted, memory, report, stream, [&] {
    launch<sift_values<Key>>(operation, blocks, kThreads, 0, stream, keys, memory.choice, memory.list(), memory.list_capacity(), kept);
  });
  launch<settle_kept<Key>>(operation, blocks, kThreads, 0, stream, keys, memory.choice, memory.list(), kept);
}

}  // namespace snack::cuda
