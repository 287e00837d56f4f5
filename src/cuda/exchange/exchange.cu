// exchange on the device: choose what goes, mark what stays, grow, place, carry. Nothing is read back; an error travels in the state.
//
// Patterns of enough slots (see uses_bits) have a bit a position, others sorted lists; both end with a new index, new tile pointers and
// the old slot of every new one, which are put where they belong at the end.
#include "snack/kernels/exchange.hpp"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "../choose/gradient.cuh"
#include "../row_starts.cuh"
#include "bits.cuh"
#include "carry.cuh"
#include "merge.cuh"
#include "snack/kernels/check.hpp"

namespace snack::cuda {
namespace {

constexpr const char* kName = "exchange_";

DType values_dtype(CarriedType type) {
  switch (type) {
    case CarriedType::kFloat16: return DType::kFloat16;
    case CarriedType::kBFloat16: return DType::kBFloat16;
    case CarriedType::kFloat64: return DType::kFloat64;
    default: return DType::kFloat32;
  }
}

int64_t largest_element(const ExchangeArgs& args) {
  int64_t largest = index_bytes(args.geometry.packing);
  for (int64_t i = 0; i < args.carried_count; ++i) largest = std::max(largest, size_of(args.carried[i].type));
  return largest;
}

// A bit a position costs at most what is left of 16 bytes a slot.
bool uses_bits(const ExchangeArgs& args) {
  const Geometry& g = args.geometry;
  return g.packing == Packing::kNarrow && 4 * PositionBits::count(g) / g.nnz < 11 - largest_element(args);
}

// Where things lie in the workspace. State and choices come first, to be zeroed together. `shared` is used by one step after another.
template <class Key>
struct Scratch {
  ExchangeState* state;
  Choice<Key>* drop_choice;
  void* grow_choice = nullptr;  // by gradient: a Choice of its keys
  int64_t zeros;  // bytes from the beginning
  uint32_t* kept;
  int64_t* new_tile_ptr;
  // with bits
  uint32_t* bits = nullptr;
  // with lists
  int32_t* before = nullptr;
  unsigned long long* grown = nullptr;
  void* library = nullptr;
  size_t library_bytes = 0;
  // in `shared`: what a choice lists; a table of draws and the other half of the sort; the new slots' sources and one array in new order
  ChoiceMemory<Key> drop_memory;
  void* grow_keys = nullptr;
  int64_t grow_bytes = 0;
  unsigned long long *table = nullptr, *unsorted = nullptr;
  int32_t* source;
  void* moved;

  Scratch(Layout& layout, const ExchangeArgs& args) {
    const Geometry& g = args.geometry;
    const int64_t k = args.k;
    const bool by_gradient = args.grow_rule == GrowRule::kGradient, is_wide = by_gradient && has_wide_keys(g, args.x.dtype);
    state = layout.take<ExchangeState>(1), drop_choice = layout.take<Choice<Key>>(1);
    if (by_gradient) grow_choice = layout.take<char>(int64_t(is_wide ? sizeof(Choice<Key128>) : sizeof(Choice<Key64>)));
    zeros = layout.used();
    kept = layout.take<uint32_t>(kept_words(g.nnz));
    new_tile_ptr = layout.take<int64_t>(g.tiles() + 1);
    const bool has_bits = uses_bits(args);
    if (has_bits) {
      bits = layout.take<uint32_t>(PositionBits::count(g));
    } else {
      before = layout.take<int32_t>(kept_words(g.nnz));
      grown = layout.take<unsigned long long>(k);
      size_t scan = 0, sort = 0;
      cub::DoubleBuffer<unsigned long long> buffers(grown, grown);
      check(cub::DeviceScan::ExclusiveSum(nullptr, scan, before, before, kept_words(g.nnz)), kName);
      check(cub::DeviceRadixSort::SortKeys(nullptr, sort, buffers, k, 0, kSortedBits), kName);
      library_bytes = std::max(scan, sort);
      library = layout.take<char>(int64_t(library_bytes));
    }
    Layout choosing = layout, drawing = layout, carrying = layout, growing = layout;
    drop_memory = {drop_choice, choosing.take<Key>(value_capacity(g.nnz)), value_capacity(g.nnz)};
    if (!has_bits) table = drawing.take<unsigned long long>(table_capacity(k)), unsorted = drawing.take<unsigned long long>(k);
    source = carrying.take<int32_t>(g.nnz);
    moved = carrying.take<char>(g.nnz * largest_element(args));
    if (by_gradient) grow_keys = growing.take<char>(gradient_capacity() * int64_t(is_wide ? sizeof(Key128) : sizeof(Key64)));
    const int64_t begin = layout.used();
    layout.use(std::max({choosing.used(), drawing.used(), carrying.used(), growing.used()}));
    grow_bytes = layout.used() - begin;
  }
};

template <class F>
void with_key(const ExchangeArgs& args, F&& f) {
  if (args.carried[0].type == CarriedType::kFloat64) return f(Key128{});
  f(Key64{});
}

// ---- the steps ----

template <class Key>
void drop(const ExchangeArgs& args, const Scratch<Key>& s, Stream stream) {
  const int64_t nnz = args.geometry.nnz;
  const bool is_signed = args.drop_rule == DropRule::kSigned;
  const ValueKeys<Key> keys = value_keys<Key>(values_dtype(args.carried[0].type), args.carried[0].data, nnz, is_signed ? Classes::kBoth : Classes::kAny);
  const Report report{.taken = &s.state->drawing.wanted, .empty = &s.state->drawing.empty, .spare = args.geometry.out * args.geometry.in - nnz};
  choose_values(kName, keys, {.k = args.k, .fraction = is_signed ? args.fraction : -1}, s.drop_memory, report, stream);
  launch<mark_kept<Key>>(kName, mark_blocks(nnz), kThreads, 0, stream, keys, s.drop_choice, s.kept);
}

/// Chooses the positions that grow by gradient, and gives them to what make_taker() makes.
template <class Key, class MakeTaker>
void grow_by_gradient(const ExchangeArgs& args, const Scratch<Key>& s, const TakenPositions& taken, Stream stream, const MakeTaker& make_taker) {
  with_gradient_keys(args.dy, args.x, taken, [&](const auto& keys) {
    using GrowKey = typename std::decay_t<decltype(keys)>::Key;
    const ChoiceMemory<GrowKey> memory{static_cast<Choice<GrowKey>*>(s.grow_choice), static_cast<GrowKey*>(s.grow_keys), s.grow_bytes / int64_t(sizeof(GrowKey))};
    const Report report{.error = &s.state->error, .number = &s.state->number, .code = int64_t(ExchangeError::kTooFewGradients)};
    choose_gradient(kName, keys, args.geometry, args.k, &s.state->drawing.wanted, memory, report, stream);
    take_chosen(kName, keys, args.geometry, memory.choice, make_taker(), stream);
  });
}

template <class Key>
void grow_in_bits(const ExchangeArgs& args, const Scratch<Key>& s, Stream stream) {
  const Geometry& g = args.geometry;
  const PositionBits bits(g, s.bits);
  const auto* index = static_cast<const uint16_t*>(args.index);
  launch<set_kept_bits>(kName, g.tiles(), kThreads, 0, stream, g, index, args.tile_ptr, s.kept, bits);
  if (args.grow_rule == GrowRule::kUniform) draw(kName, BitSet{bits}, AllPositions(g.out, g.in), args.key, g.nnz, args.k, &s.state->drawing, stream);
  else grow_by_gradient(args, s, {bits, {g, args.index, args.tile_ptr}, s.kept}, stream, [&] { return IntoBits{bits}; });
  launch<count_tile_bits>(kName, g.tiles(), kThreads, 0, stream, g, bits, s.new_tile_ptr, s.state);
  auto* row_starts = g.has_row_starts() ? reinterpret_cast<uint16_t*>(args.tile_ptr + g.tiles() + 1) : nullptr;
  const Placing placing{g, index, args.tile_ptr, s.new_tile_ptr, s.kept, bits, static_cast<uint16_t*>(s.moved), s.source, row_starts, s.state};
  launch<place_tiles>(kName, g.tiles(), kThreads, int64_t(sizeof(PlaceShared)), stream, placing);
}

/// Grown positions as keys in any order, s.unsorted; where fewer than k grow, the others are ~0.
template <class Key>
void list_grown(const ExchangeArgs& args, const Scratch<Key>& s, const DevicePattern& old, Stream stream) {
  const Geometry& g = args.geometry;
  if (args.grow_rule == GrowRule::kGradient) {  // the choice comes before the list, whose memory it uses
    grow_by_gradient(args, s, {PositionBits(g, nullptr), old, s.kept}, stream, [&] {
      check(cudaMemsetAsync(s.unsorted, 0xff, size_t(args.k) * 8, stream), kName);
      return IntoList<unsigned long long, false>{s.unsorted, args.k, &s.state->listed};
    });
    return;
  }
  const int64_t capacity = table_capacity(args.k);
  check(cudaMemsetAsync(s.table, 0xff, size_t(capacity) * 8, stream), kName);
  check(cudaMemsetAsync(s.unsorted, 0xff, size_t(args.k) * 8, stream), kName);
  draw(kName, HashSet{old, s.kept, s.table, nullptr, uint64_t(capacity)}, AllPositions(g.out, g.in), args.key, g.nnz, args.k, &s.state->drawing, stream);
  launch<list_drawn>(kName, blocks_for(capacity), kThreads, 0, stream, s.table, capacity, s.unsorted, args.k, s.state);
}

template <class Key>
void grow_in_lists(const ExchangeArgs& args, const Scratch<Key>& s, Stream stream) {
  const Geometry& g = args.geometry;
  const DevicePattern old{g, args.index, args.tile_ptr};
  const int64_t words = kept_words(g.nnz);
  size_t bytes = s.library_bytes;
  launch<count_kept>(kName, blocks_for(words), kThreads, 0, stream, s.kept, g.nnz, s.before);
  check(cub::DeviceScan::ExclusiveSum(s.library, bytes, s.before, s.before, words, stream), kName);

  list_grown(args, s, old, stream);
  cub::DoubleBuffer<unsigned long long> buffers(s.unsorted, s.grown);
  bytes = s.library_bytes;
  check(cub::DeviceRadixSort::SortKeys(s.library, bytes, buffers, args.k, 0, kSortedBits, stream), kName);
  if (buffers.Current() != s.grown) check(cudaMemcpyAsync(s.grown, buffers.Current(), size_t(args.k) * 8, cudaMemcpyDeviceToDevice, stream), kName);

  const Merging merging{old, s.kept, s.before, s.grown, s.moved, s.new_tile_ptr, s.source, s.state};
  const int64_t pieces = std::clamp<int64_t>(4096 / g.tiles(), 1, blocks_for(g.nnz));
  if (g.packing == Packing::kNarrow) launch<merge_kept<uint16_t>>(kName, g.tiles() * pieces, kThreads, 0, stream, merging, pieces);
  else launch<merge_kept<uint32_t>>(kName, g.tiles() * pieces, kThreads, 0, stream, merging, pieces);
  launch<merge_grown>(kName, blocks_for(args.k), kThreads, 0, stream, merging);
  launch<merge_tile_pointers>(kName, blocks_for(g.tiles() + 1), kThreads, 0, stream, merging);
}

template <class Key>
void finish(const ExchangeArgs& args, const Scratch<Key>& s, ExchangeResult* result, Stream stream) {
  const Geometry& g = args.geometry;
  put_back_bytes(kName, s.moved, args.index, g.nnz * index_bytes(g.packing), s.state, stream);
  put_back_bytes(kName, s.new_tile_ptr, args.tile_ptr, (g.tiles() + 1) * 8, s.state, stream);
  if (!uses_bits(args)) find_row_starts_of(kName, g, args.index, args.tile_ptr, &s.state->error, stream);
  for (int64_t i = 0; i < args.carried_count; ++i) carry(kName, args.carried[i], args.fills + i, s.source, g.nnz, s.moved, s.state, stream);
  launch<report_exchange>(kName, 1, 1, 0, stream, s.state, result);
}

}  // namespace

int64_t exchange_workspace(const ExchangeArgs& args) {
  snack::check(args);
  capability(current_device());  // refuses a card that this binary has no code for
  if (args.k == 0) return 0;
  Layout layout(nullptr);
  with_key(args, [&](auto key) { Scratch<decltype(key)>(layout, args); });
  return layout.used();
}

void exchange(const ExchangeArgs& args, ExchangeResult* result, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.geometry;
  check_slots(kName, g.nnz);
  SNACK_CHECK(result != nullptr, kName, ": the output pointer is null; a result is needed.");
  check_workspace(kName, resources.workspace, resources.workspace_bytes, exchange_workspace(args), 256);
  const cudaStream_t stream = resources.stream;
  if (args.k == 0) return check(cudaMemsetAsync(result, 0, sizeof(ExchangeResult), stream), kName);
  with_key(args, [&](auto key) {
    using Key = decltype(key);
    Layout layout(resources.workspace);
    const Scratch<Key> s(layout, args);
    check(cudaMemsetAsync(resources.workspace, 0, size_t(s.zeros), stream), kName);
    drop(args, s, stream);
    if (uses_bits(args)) grow_in_bits(args, s, stream);
    else grow_in_lists(args, s, stream);
    finish(args, s, result, stream);
  });
}

}  // namespace snack::cuda
