// grow_uniform on the device: draw into a table that remembers the draws, sort by them. Nothing is read back; an error travels in *status.
#include <cub/device/device_radix_sort.cuh>

#include "../choose/draw.cuh"
#include "empty.cuh"
#include "snack/kernels/check.hpp"

namespace snack::cuda {
namespace {

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
  check_growth(kName, empty, k, rows, cols, status);
  check_workspace(kName, resources.workspace, resources.workspace_bytes, grow_uniform_workspace(g, k), 256);
  const cudaStream_t stream = resources.stream;
  Layout layout(resources.workspace);
  const int64_t asked = k;
  k = std::min(k, g.out * g.in);
  GrowScratch s(layout, g.nnz, k);
  const int64_t capacity = table_capacity(k);
  check(cudaMemsetAsync(s.drawing, 0, sizeof(Drawing), stream), kName);
  check(cudaMemsetAsync(s.count, 0, sizeof(unsigned long long), stream), kName);
  check(cudaMemsetAsync(s.table, 0xff, size_t(capacity) * 8, stream), kName);
  check(cudaMemsetAsync(s.first, 0xff, size_t(capacity) * 8, stream), kName);
  mark_empty(kName, empty, asked, s.kept, s.live, &s.drawing->wanted, &s.drawing->empty, status, stream);
  if (k == 0) return;
  const HashSet set{{g, empty.pattern.index, empty.pattern.tile_ptr}, s.kept, s.table, s.first, uint64_t(capacity)};
  draw(kName, set, AllPositions(g.out, g.in), key, std::max<int64_t>(0, g.out * g.in - g.nnz + empty.drops - k), k,
       s.drawing, stream);
  launch<list_table>(kName, blocks_for(capacity), kThreads, 0, stream, s.table, s.first, capacity, k, s.count, s.draws_in, s.positions_in);
  check(cub::DeviceRadixSort::SortPairs(s.library, s.library_bytes, s.draws_in, s.draws, s.positions_in, s.positions, k, 0, 64, stream), kName);
  launch<unpack_positions>(kName, blocks_for(k), kThreads, 0, stream, s.positions, k, rows, cols);
}

}  // namespace snack::cuda
