// Empty positions of a pattern and a list of slots that count as empty: a bit for every slot that does not.
#pragma once

#include "../choose/kept.cuh"
#include "../layout.hpp"
#include "snack/kernels/select.hpp"

namespace snack::cuda {

// Kept: all slots but those of a list, which may name a slot twice. *error becomes `code`, *number the slot, where one does not exist;
// *live loses the slots that are taken away.
static __global__ void keep_all(uint32_t* kept, int64_t nnz, int64_t* live) {
  await_stream();
  const int64_t word = thread_number();
  if (word == 0) *live = nnz;
  if (word < (nnz + 31) / 32) kept[word] = nnz - 32 * word >= 32 ? ~0u : (1u << (nnz - 32 * word)) - 1;
}
static __global__ void unkeep(const int64_t* drop, int64_t drops, uint32_t* kept, int64_t nnz, int64_t* live, int64_t* error, int64_t* number, int64_t code) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= drops) return;
  const int64_t slot = drop[i];
  if (slot < 0 || slot >= nnz) {
    *error = code, *number = slot;
    return;
  }
  const uint32_t bit = 1u << (slot % 32);
  if (atomicAnd(kept + slot / 32, ~bit) & bit) atomicAdd(reinterpret_cast<unsigned long long*>(live), ~0ull);  // -1
}

// *wanted: k, or 0 where there was an error or k positions are not empty; *empty: how many are.
static __global__ void count_room(int64_t positions, int64_t k, const int64_t* live, int64_t* wanted, int64_t* empty, SelectStatus* status) {
  await_stream();
  const int64_t room = positions - *live;
  if (status->error == 0 && k > room) status->error = int64_t(SelectError::kNoRoom), status->number = room;
  *wanted = status->error == 0 ? k : 0;
  *empty = room;
}

/// Marks what stays, and how many positions may grow. `live`: one number of scratch.
inline void mark_empty(const char* operation, const EmptyPositions& e, int64_t k, uint32_t* kept, int64_t* live, int64_t* wanted, int64_t* empty, SelectStatus* status,
                       Stream stream) {
  const Geometry& g = e.pattern.geometry;
  check(cudaMemsetAsync(status, 0, sizeof(SelectStatus), stream), operation);
  launch<keep_all>(operation, std::max<int64_t>(1, blocks_for(kept_words(g.nnz))), kThreads, 0, stream, kept, g.nnz, live);
  launch<unkeep>(operation, blocks_for(e.drops), kThreads, 0, stream, e.drop, e.drops, kept, g.nnz, live, &status->error, &status->number,
                 int64_t(SelectError::kSlotOutOfRange));
  launch<count_room>(operation, 1, 1, 0, stream, g.out * g.in, k, live, wanted, empty, status);
}

inline void check_growth(const char* operation, const EmptyPositions& empty, int64_t k, const int64_t* rows, const int64_t* cols, const SelectStatus* status) {
  const Geometry& g = empty.pattern.geometry;
  check_slots(operation, g.nnz);
  SNACK_CHECK(k >= 0 && k <= kMaxExtent, operation, ": k=", k, " is outside 0 .. 2147483647, what a card grows at a time.");
  SNACK_CHECK(status != nullptr && ((rows != nullptr && cols != nullptr) || k == 0 || g.out * g.in == 0), operation, ": an output pointer is null; rows, cols and status are needed.");
}

}  // namespace snack::cuda
