// select_smallest on the device: choose, mark, count, list. Nothing is read back; an error travels in *status.
#include "snack/kernels/select.hpp"

#include <cub/device/device_scan.cuh>

#include "../choose/kept.cuh"
#include "../layout.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cuda {
namespace {

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
struct Scratch {
  ChoiceMemory<Key> memory;
  uint32_t* kept;
  int32_t* before;
  void* library;
  size_t library_bytes = 0;

  Scratch(Layout& layout, int64_t nnz) {
    memory.choice = layout.take<Choice<Key>>(1);
    memory.capacity = value_capacity<Key>(nnz);
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

}  // namespace

int64_t select_smallest_workspace(DType dtype, int64_t nnz) {
  capability(current_device());  // refuses a card that this binary has no code for
  Layout layout(nullptr);
  with_key(dtype, [&](auto key) { Scratch<decltype(key)>(layout, nnz); });
  return layout.used();
}

void select_smallest(const SelectArgs& args, int64_t* slots, SelectStatus* status, const Resources& resources) {
  constexpr const char* kName = "select_smallest";
  snack::check(args);
  check_slots(kName, args.nnz);
  SNACK_CHECK(args.k >= 0, "cannot drop ", args.k, " of ", args.nnz, " connections.");
  SNACK_CHECK(status != nullptr && (slots != nullptr || std::min(args.k, args.nnz) == 0), kName, ": an output pointer is null; slots and status are needed.");
  check_workspace(kName, resources.workspace, resources.workspace_bytes, select_smallest_workspace(args.dtype, args.nnz), 256);
  const cudaStream_t stream = resources.stream;
  check(cudaMemsetAsync(status, 0, sizeof(SelectStatus), stream), kName);
  if (args.k == 0) return;
  with_key(args.dtype, [&](auto key) {
    using Key = decltype(key);
    Layout layout(resources.workspace);
    Scratch<Key> s(layout, args.nnz);
    const Classes classes = args.sign == Sign::kAny ? Classes::kAny : args.sign == Sign::kPositive ? Classes::kPositive : Classes::kNegative;
    const ValueKeys<Key> keys = value_keys<Key>(args.dtype, args.values, args.nnz, classes);
    check(cudaMemsetAsync(s.memory.choice, 0, sizeof(Choice<Key>), stream), kName);
    choose_values(kName, keys, {.k = args.k}, s.memory, s.kept, {nullptr, &status->error, &status->number, int64_t(SelectError::kTooFewValues)}, stream);
    launch<count_dropped>(kName, blocks_for(kept_words(args.nnz)), kThreads, 0, stream, s.kept, args.nnz, s.before);
    check(cub::DeviceScan::ExclusiveSum(s.library, s.library_bytes, s.before, s.before, kept_words(args.nnz), stream), kName);
    launch<list_dropped>(kName, blocks_for(kept_words(args.nnz)), kThreads, 0, stream, s.kept, s.before, args.nnz, args.k, slots);
  });
}

}  // namespace snack::cuda
