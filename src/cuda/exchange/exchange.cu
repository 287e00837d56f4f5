// exchange on the device: choose what goes, mark what stays, grow, place, carry. Nothing is read back; an error travels in the state.
//
// Patterns of enough slots (see uses_bits) have two bits a position, others sorted lists. What cannot be written in place at once is made
// out of place and put back.
#include "snack/kernels/exchange.hpp"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "../choose/gradient.cuh"
#include "../row_starts.cuh"
#include "bits.cuh"
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

// Bytes a slot that are left for tensors out of place when all but them has its room; below 0 where positions are too many for bits.
int64_t room_a_slot(const ExchangeArgs& args) {
  const Geometry& g = args.geometry;
  return g.has_row_starts() ? 15 - ceil_div(8 * PositionBits::count(g), g.nnz) : -1;
}
bool uses_bits(const ExchangeArgs& args) { return room_a_slot(args) >= largest_element(args); }

// Tensors begin .. end are carried together.
struct Group {
  int64_t begin = 0, end = 0, bytes = 0;
};
// The tensors from `begin` on that fit into the room.
Group group_from(const ExchangeArgs& args, int64_t begin) {
  Group group{begin, begin};
  for (int64_t sizes = 0; group.end < args.carried_count; ++group.end) {
    const int64_t size = size_of(args.carried[group.end].type);
    if ((sizes += size) > room_a_slot(args)) break;
    group.bytes += aligned_256(args.geometry.nnz * size);
  }
  return group;
}

// Where things lie in the workspace. What is zeroed comes first. `shared` is used by one step after another.
template <class Key>
struct Scratch {
  ExchangeState* state;
  Choice<Key>* drop_choice;
  void* grow_choice = nullptr;  // by gradient: a Choice of its keys
  unsigned long long* tile_states = nullptr;
  int64_t zeros;  // bytes from the beginning
  uint32_t* kept;
  int64_t* new_tile_ptr;
  // with bits
  uint32_t *old_bits = nullptr, *bits = nullptr;
  uint16_t* new_row_starts = nullptr;
  // with lists
  int32_t* before = nullptr;
  unsigned long long* grown = nullptr;
  void* library = nullptr;
  size_t library_bytes = 0;
  // in `shared`: what a choice lists; a table of draws and the other half of the sort; the new slots' sources; arrays in new order
  char* shared;
  int64_t shared_bytes;
  ChoiceMemory<Key> drop_memory;
  unsigned long long *table = nullptr, *unsorted = nullptr;
  int32_t* source = nullptr;
  char* moved = nullptr;

  Scratch(Layout& layout, const ExchangeArgs& args) {
    const Geometry& g = args.geometry;
    const bool by_gradient = args.grow_rule == GrowRule::kGradient, is_wide = by_gradient && has_wide_keys(g, args.x.dtype), has_bits = uses_bits(args);
    state = layout.take<ExchangeState>(1), drop_choice = layout.take<Choice<Key>>(1);
    if (by_gradient) grow_choice = layout.take<char>(int64_t(is_wide ? sizeof(Choice<Key128>) : sizeof(Choice<Key64>)));
    if (has_bits) tile_states = layout.take<unsigned long long>(g.tiles());
    zeros = layout.used();
    kept = layout.take<uint32_t>(kept_words(g.nnz));
    new_tile_ptr = layout.take<int64_t>(g.tiles() + 1);
    if (has_bits) {
      old_bits = layout.take<uint32_t>(PositionBits::count(g)), bits = layout.take<uint32_t>(PositionBits::count(g));
      new_row_starts = layout.take<uint16_t>(g.segments());
    } else {
      take_lists(layout, args);
    }

    if (by_gradient && !has_bits) unsorted = layout.take<unsigned long long>(args.k);  // filled while the choice is made
    const int64_t begin = layout.used();
    shared = layout.take<char>(0);
    Layout choosing = layout, growing = layout, drawing = layout, carrying = layout;
    drop_memory = {drop_choice, choosing.take<Key>(value_capacity<Key>(g.nnz)), value_capacity<Key>(g.nnz)};
    if (by_gradient) growing.take<char>(kGradientCapacity * int64_t(is_wide ? sizeof(Key128) : sizeof(Key64)));
    if (has_bits) {
      for (Group group = group_from(args, 0);; group = group_from(args, group.end)) {
        layout.use(std::max(layout.used(), begin + group.bytes));
        if (group.end == args.carried_count) break;
      }
    } else {
      if (!by_gradient) table = drawing.take<unsigned long long>(table_capacity(args.k)), unsorted = drawing.take<unsigned long long>(args.k);
      source = carrying.take<int32_t>(g.nnz);
      moved = carrying.take<char>(g.nnz * largest_element(args));
    }
    layout.use(std::max({layout.used(), choosing.used(), growing.used(), drawing.used(), carrying.used()}));
    shared_bytes = layout.used() - begin;
  }

  void take_lists(Layout& layout, const ExchangeArgs& args) {
    const int64_t words = kept_words(args.geometry.nnz);
    before = layout.take<int32_t>(words);
    grown = layout.take<unsigned long long>(args.k);
    size_t scan = 0, sort = 0;
    cub::DoubleBuffer<unsigned long long> buffers(grown, grown);
    check(cub::DeviceScan::ExclusiveSum(nullptr, scan, before, before, words), kName);
    check(cub::DeviceRadixSort::SortKeys(nullptr, sort, buffers, args.k, 0, kSortedBits), kName);
    library_bytes = std::max(scan, sort);
    library = layout.take<char>(int64_t(library_bytes));
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
  choose_values(kName, keys, {.k = args.k, .fraction = is_signed ? args.fraction : -1}, s.drop_memory, s.kept, report, stream);
}

/// Chooses the positions that grow by gradient, and gives them to `take`. reset(flag) undoes what was taken where *flag is 0.
template <class Key, class Taker, class Reset>
void grow_by_gradient(const ExchangeArgs& args, const Scratch<Key>& s, const TakenPositions& taken, const Taker& take, Stream stream, const Reset& reset) {
  with_gradient_keys(args.dy, args.x, taken, [&](const auto& keys) {
    using GrowKey = typename std::decay_t<decltype(keys)>::Key;
    const ChoiceMemory<GrowKey> memory{static_cast<Choice<GrowKey>*>(s.grow_choice), reinterpret_cast<GrowKey*>(s.shared), s.shared_bytes / int64_t(sizeof(GrowKey))};
    const Report report{.error = &s.state->error, .number = &s.state->number, .code = int64_t(ExchangeError::kTooFewGradients), .retaken = &s.state->listed};
    choose_gradient(kName, keys, args.geometry, args.k, &s.state->drawing.wanted, memory, report, take, stream, [&] { reset(&memory.choice->is_listed); });
  });
}

template <class Key>
void grow_in_bits(const ExchangeArgs& args, const Scratch<Key>& s, Stream stream) {
  const Geometry& g = args.geometry;
  const PositionBits old_bits(g, s.old_bits), bits(g, s.bits);
  const auto set = [&](const int* unless) {
    launch<set_bits>(kName, g.tiles(), kThreads, 0, stream, g, static_cast<const uint16_t*>(args.index), args.tile_ptr, s.kept, old_bits, bits, unless);
  };
  set(nullptr);
  if (args.grow_rule == GrowRule::kUniform) draw(kName, BitSet{bits}, AllPositions(g.out, g.in), args.key, g.out * g.in - g.nnz, args.k, &s.state->drawing, stream);
  else grow_by_gradient(args, s, {bits, {g, args.index, args.tile_ptr}, s.kept}, IntoBits{bits}, stream, set);
}

template <class Key>
void place_in_bits(const ExchangeArgs& args, const Scratch<Key>& s, ExchangeResult* result, Stream stream) {
  const Geometry& g = args.geometry;
  const PositionBits old_bits(g, s.old_bits), bits(g, s.bits);
  auto* row_starts = reinterpret_cast<uint16_t*>(args.tile_ptr + g.tiles() + 1);
  launch<count_bits>(kName, g.tiles(), kThreads, 0, stream, g, bits, s.tile_states, s.new_tile_ptr, s.new_row_starts, s.state);
  Placing placing{g, args.tile_ptr, s.new_tile_ptr, row_starts, s.new_row_starts, s.kept, old_bits, bits, static_cast<uint16_t*>(args.index), s.state, {}, 0};
  for (Group group = group_from(args, 0);; group = group_from(args, group.end), placing.index = nullptr) {
    Copies copies;
    char* to = s.shared;
    for (int64_t i = group.begin; i < group.end; ++i) {
      const Carried& tensor = args.carried[i];
      const int64_t bytes = g.nnz * size_of(tensor.type);
      placing.moving[i - group.begin] = {tensor.data, to, tensor.type, args.fills + i};
      copies.add(to, tensor.data, bytes);
      to += aligned_256(bytes);
    }
    placing.count = int(group.end - group.begin);
    launch<place_rows>(kName, ceil_div(g.segments(), kThreads / 32), kThreads, 0, stream, placing);
    const bool is_last = group.end == args.carried_count;
    if (is_last) copies.add(s.new_tile_ptr, args.tile_ptr, (g.tiles() + 1) * 8), copies.add(s.new_row_starts, row_starts, 2 * g.segments());
    launch<put_back>(kName, copies.blocks, kThreads, 0, stream, copies, s.state, is_last ? result : nullptr);
    if (is_last) return;
  }
}

/// Grown positions as keys in any order, s.unsorted; where fewer than k grow, the others are ~0.
template <class Key>
void list_grown(const ExchangeArgs& args, const Scratch<Key>& s, const DevicePattern& old, Stream stream) {
  const Geometry& g = args.geometry;
  if (args.grow_rule == GrowRule::kGradient) {
    check(cudaMemsetAsync(s.unsorted, 0xff, size_t(args.k) * 8, stream), kName);
    const IntoList<unsigned long long, false> take{s.unsorted, args.k, &s.state->listed};
    return grow_by_gradient(args, s, {PositionBits(g, nullptr), old, s.kept}, take, stream, [&](const int* unless) {
      launch<empty_list>(kName, blocks_for(args.k), kThreads, 0, stream, s.unsorted, args.k, unless);
    });
  }
  const int64_t capacity = table_capacity(args.k);
  check(cudaMemsetAsync(s.table, 0xff, size_t(capacity) * 8, stream), kName);
  check(cudaMemsetAsync(s.unsorted, 0xff, size_t(args.k) * 8, stream), kName);
  draw(kName, HashSet{old, s.kept, s.table, nullptr, uint64_t(capacity)}, AllPositions(g.out, g.in), args.key, g.out * g.in - g.nnz, args.k, &s.state->drawing, stream);
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
}

template <class Key>
void place_in_lists(const ExchangeArgs& args, const Scratch<Key>& s, ExchangeResult* result, Stream stream) {
  const Geometry& g = args.geometry;
  const Merging merging{{g, args.index, args.tile_ptr}, s.kept, s.before, s.grown, s.moved, s.new_tile_ptr, s.source, s.state};
  const int64_t pieces = std::clamp<int64_t>(4096 / g.tiles(), 1, blocks_for(g.nnz));
  if (g.packing == Packing::kNarrow) launch<merge_kept<uint16_t>>(kName, g.tiles() * pieces, kThreads, 0, stream, merging, pieces);
  else launch<merge_kept<uint32_t>>(kName, g.tiles() * pieces, kThreads, 0, stream, merging, pieces);
  launch<merge_grown>(kName, blocks_for(args.k), kThreads, 0, stream, merging);
  launch<merge_tile_pointers>(kName, blocks_for(g.tiles() + 1), kThreads, 0, stream, merging);
  Copies pattern;
  pattern.add(s.moved, args.index, g.nnz * index_bytes(g.packing));
  pattern.add(s.new_tile_ptr, args.tile_ptr, (g.tiles() + 1) * 8);
  launch<put_back>(kName, pattern.blocks, kThreads, 0, stream, pattern, s.state, result);
  find_row_starts_of(kName, g, args.index, args.tile_ptr, &s.state->error, stream);
  for (int64_t i = 0; i < args.carried_count; ++i) {
    const Carried& tensor = args.carried[i];
    with_element(tensor.type, [&](auto element) {
      using Element = decltype(element);
      launch<gather_carried<Element>>(kName, carry_blocks(g.nnz), kThreads, 0, stream, static_cast<const Element*>(tensor.data), s.source, g.nnz, tensor.type,
                                      args.fills + i, reinterpret_cast<Element*>(s.moved), s.state);
    });
    Copies copies;
    copies.add(s.moved, tensor.data, g.nnz * size_of(tensor.type));
    launch<put_back>(kName, copies.blocks, kThreads, 0, stream, copies, s.state, nullptr);
  }
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
    if (uses_bits(args)) {
      grow_in_bits(args, s, stream);
      place_in_bits(args, s, result, stream);
    } else {
      grow_in_lists(args, s, stream);
      place_in_lists(args, s, result, stream);
    }
  });
}

}  // namespace snack::cuda
