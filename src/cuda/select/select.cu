// select_smallest and grow_uniform on the device. Nothing is read back; an error travels in *status.
#include "snack/kernels/select.hpp"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "../choose/draw.cuh"
#include "../layout.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cuda {
namespace {

// ---- select_smallest: choose, mark, count, list ----

// Slots of each word that are dropped; a sum over it makes it those of the words before.
__global__ void count_dropped(const uint32_t* kept, int64_t nnz, int32_t* before) {
  await_stream();
  const int64_t word = thread_number();
  if (word < (nnz + 31) / 32) before[word] = int(min(int64_t{32}, nnz - 32 * word)) - __popc(kept[word]);
}

// A thread a word of 32 slots.
__global__ void list_dropped(const uint32_t* kept, const int32_t* before, int64_t nnz, int64_t k, int64_t* slots) {
  await_stream();
  const int64_t word = thread_number();
  if (word >= (nnz + 31) / 32) return;
  const uint32_t exist = nnz - 32 * word >= 32 ? ~0u : (1u << (nnz - 32 * word)) - 1;
  int64_t at = before[word];
  for (uint32_t dropped = exist & ~kept[word]; dropped != 0 && at < k; dropped &= dropped - 1) slots[at++] = 32 * word + __ffs(int(dropped)) - 1;
}

template <class Key>
struct SelectScratch {
  ChoiceMemory<Key> memory;
  uint32_t* kept;
  int32_t* before;
  void* library;
  size_t library_bytes = 0;

  SelectScratch(Layout& layout, int64_t nnz) {
    memory.choice = layout.take<Choice<Key>>(1);
    memory.capacity = value_capacity(nnz);
    memory.keys = layout.take<Key>(memory.capacity);
    kept = layout.take<uint32_t>(kept_words(nnz)), before = layout.take<int32_t>(kept_words(nnz));
    check(cub::DeviceScan::ExclusiveSum(nullptr, library_bytes, before, before, kept_words(nnz)), "select_smallest");
    library = layout.take<char>(int64_t(library_bytes));
  }
};

template <class F>
void with_key(DType dtype, F&& f) {
  if (dtype == DType::kFloat64) return f(Key128{});
  f(Key64{});
}

void check_slots(const char* operation, int64_t nnz) {
  SNACK_CHECK(nnz <= kMaxExtent, operation, ": ", nnz, " connections are more than a card edits, 2147483647; use the CPU or split the layer.");
}

}  // namespace

int64_t select_smallest_workspace(DType dtype, int64_t nnz) {
  capability(current_device());  // refuses a card that this binary has no code for
  Layout layout(nullptr);
  with_key(dtype, [&](auto key) { SelectScratch<decltype(key)>(layout, nnz); });
  return layout.used();
}

void select_smallest(const SelectArgs& args, int64_t* slots, SelectStatus* status, const Resources& resources) {
  constexpr const char* kName = "select_smallest";
  snack::check(args);
  check_slots(kName, args.nnz);
  SNACK_CHECK(args.k >= 0, "cannot drop ", args.k, " of ", args.nnz, " connections.");
  SNACK_CHECK(status != nullptr && (slots != nullptr || args.k == 0), kName, ": an output pointer is null; slots and status are needed.");
  check_workspace(kName, resources.workspace, resources.workspace_bytes, select_smallest_workspace(args.dtype, args.nnz), 256);
  const cudaStream_t stream = resources.stream;
  check(cudaMemsetAsync(status, 0, sizeof(SelectStatus), stream), kName);
  if (args.k == 0) return;
  with_key(args.dtype, [&](auto key) {
    using Key = decltype(key);
    Layout layout(resources.workspace);
    SelectScratch<Key> s(layout, args.nnz);
    const Classes classes = args.sign == Sign::kAny ? Classes::kAny : args.sign == Sign::kPositive ? Classes::kPositive : Classes::kNegative;
    const ValueKeys<Key> keys = value_keys<Key>(args.dtype, args.values, args.nnz, classes);
    check(cudaMemsetAsync(s.memory.choice, 0, sizeof(Choice<Key>), stream), kName);
    choose_values(kName, keys, {.k = args.k}, s.memory, {nullptr, &status->error, &status->number, int64_t(SelectError::kTooFewValues)}, stream);
    launch<mark_kept<Key>>(kName, mark_blocks(args.nnz), kThreads, 0, stream, keys, s.memory.choice, s.kept);
    launch<count_dropped>(kName, blocks_for(kept_words(args.nnz)), kThreads, 0, stream, s.kept, args.nnz, s.before);
    check(cub::DeviceScan::ExclusiveSum(s.library, s.library_bytes, s.before, s.before, kept_words(args.nnz), stream), kName);
    launch<list_dropped>(kName, blocks_for(kept_words(args.nnz)), kThreads, 0, stream, s.kept, s.before, args.nnz, args.k, slots);
  });
}

// ---- grow_uniform: draw into a table that remembers the draws, sort by them ----

namespace {

// Kept: all slots but those of a list, which may name a slot twice. *error becomes `code`, *number the slot, where one does not exist;
// *live loses the slots that are taken away.
__global__ void keep_all(uint32_t* kept, int64_t nnz, int64_t* live) {
  await_stream();
  const int64_t word = thread_number();
  if (word == 0) *live = nnz;
  if (word < (nnz + 31) / 32) kept[word] = nnz - 32 * word >= 32 ? ~0u : (1u << (nnz - 32 * word)) - 1;
}
__global__ void unkeep(const int64_t* drop, int64_t drops, uint32_t* kept, int64_t nnz, int64_t* live, int64_t* error, int64_t* number, int64_t code) {
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

__global__ void begin_drawing(int64_t positions, int64_t k, const int64_t* live, Drawing* drawing, SelectStatus* status) {
  await_stream();
  const int64_t room = positions - *live;
  if (status->error == 0 && k > room) status->error = int64_t(SelectError::kNoRoom), status->number = room;
  drawing->wanted = status->error == 0 ? k : 0;
  drawing->empty = room;
}

// Entries of the table as a list, in any order.
__global__ void list_table(const unsigned long long* table, const unsigned long long* first, int64_t capacity, int64_t k, unsigned long long* count,
                           unsigned long long* draws, unsigned long long* positions) {
  await_stream();
  const int64_t i = thread_number();
  const bool is_entry = i < capacity && table[i] != ~0ull;
  const uint32_t entries = __ballot_sync(~0u, is_entry);
  unsigned long long begin = 0;
  if (threadIdx.x % 32 == 0 && entries != 0) begin = atomicAdd(count, static_cast<unsigned long long>(__popc(entries)));
  const int64_t at = int64_t(__shfl_sync(~0u, begin, 0)) + __popc(entries & ((1u << (threadIdx.x % 32)) - 1));
  if (is_entry && at < k) draws[at] = first[i], positions[at] = table[i];
}

__global__ void unpack_positions(const unsigned long long* positions, int64_t k, int64_t* rows, int64_t* cols) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= k) return;
  rows[i] = key_row(positions[i]);
  cols[i] = key_col(positions[i]);
}

struct GrowScratch {
  Drawing* drawing;
  int64_t* live;
  unsigned long long* count;
  uint32_t* kept;
  unsigned long long *table, *first, *draws_in, *draws, *positions_in, *positions;
  void* library;
  size_t library_bytes = 0;

  GrowScratch(Layout& layout, int64_t nnz, int64_t k) {
    drawing = layout.take<Drawing>(1), live = layout.take<int64_t>(1), count = layout.take<unsigned long long>(1);
    kept = layout.take<uint32_t>(kept_words(nnz));
    table = layout.take<unsigned long long>(table_capacity(k)), first = layout.take<unsigned long long>(table_capacity(k));
    draws_in = layout.take<unsigned long long>(k), draws = layout.take<unsigned long long>(k);
    positions_in = layout.take<unsigned long long>(k), positions = layout.take<unsigned long long>(k);
    check(cub::DeviceRadixSort::SortPairs(nullptr, library_bytes, draws_in, draws, positions_in, positions, k), "grow_uniform");
    library = layout.take<char>(int64_t(library_bytes));
  }
};

}  // namespace

int64_t grow_uniform_workspace(const Geometry& geometry, int64_t k) {
  capability(current_device());
  Layout layout(nullptr);
  GrowScratch(layout, geometry.nnz, std::clamp<int64_t>(k, 0, geometry.out * geometry.in));
  return layout.used();
}

void grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key, int64_t* rows, int64_t* cols, SelectStatus* status, const Resources& resources) {
  constexpr const char* kName = "grow_uniform";
  snack::check(empty, kName);
  const Geometry& g = empty.pattern.geometry;
  check_slots(kName, g.nnz);
  SNACK_CHECK(k >= 0 && k <= kMaxExtent, kName, ": k=", k, " is outside 0 .. 2147483647, what a card grows at a time.");
  SNACK_CHECK(status != nullptr && ((rows != nullptr && cols != nullptr) || k == 0), kName, ": an output pointer is null; rows, cols and status are needed.");
  check_workspace(kName, resources.workspace, resources.workspace_bytes, grow_uniform_workspace(g, k), 256);
  const cudaStream_t stream = resources.stream;
  Layout layout(resources.workspace);
  const int64_t asked = k;
  k = std::min(k, g.out * g.in);
  GrowScratch s(layout, g.nnz, k);
  const int64_t capacity = table_capacity(k);
  check(cudaMemsetAsync(status, 0, sizeof(SelectStatus), stream), kName);
  check(cudaMemsetAsync(s.drawing, 0, sizeof(Drawing), stream), kName);
  check(cudaMemsetAsync(s.count, 0, sizeof(unsigned long long), stream), kName);
  check(cudaMemsetAsync(s.table, 0xff, size_t(capacity) * 8, stream), kName);
  check(cudaMemsetAsync(s.first, 0xff, size_t(capacity) * 8, stream), kName);
  launch<keep_all>(kName, std::max<int64_t>(1, blocks_for(kept_words(g.nnz))), kThreads, 0, stream, s.kept, g.nnz, s.live);
  launch<unkeep>(kName, blocks_for(empty.drops), kThreads, 0, stream, empty.drop, empty.drops, s.kept, g.nnz, s.live, &status->error, &status->number,
                 int64_t(SelectError::kSlotOutOfRange));
  launch<begin_drawing>(kName, 1, 1, 0, stream, g.out * g.in, asked, s.live, s.drawing, status);
  if (k == 0) return;
  const HashSet set{{g, empty.pattern.index, empty.pattern.tile_ptr}, s.kept, s.table, s.first, uint64_t(capacity)};
  draw(kName, set, AllPositions(g.out, g.in), key, g.nnz, k, s.drawing, stream);
  launch<list_table>(kName, blocks_for(capacity), kThreads, 0, stream, s.table, s.first, capacity, k, s.count, s.draws_in, s.positions_in);
  check(cub::DeviceRadixSort::SortPairs(s.library, s.library_bytes, s.draws_in, s.draws, s.positions_in, s.positions, k, 0, 64, stream), kName);
  launch<unpack_positions>(kName, blocks_for(k), kThreads, 0, stream, s.positions, k, rows, cols);
}

}  // namespace snack::cuda
