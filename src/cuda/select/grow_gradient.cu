// grow_gradient on the device: choose among all positions, list what was chosen, sort it by its keys. Nothing is read back; an error
// travels in *status.
#include <cub/device/device_radix_sort.cuh>

#include "../choose/gradient.cuh"
#include "empty.cuh"
#include "snack/kernels/check.hpp"

namespace snack::cuda {
namespace {

constexpr const char* kName = "grow_gradient";

// The numbers behind the keys, best first.
template <class Keys>
__global__ void unpack_chosen(Keys keys, const typename Keys::Key* chosen, int64_t k, const int64_t* wanted, int64_t* rows, int64_t* cols) {
  await_stream();
  const int64_t i = thread_number();
  if (i >= k || *wanted == 0) return;
  keys.position_of(keys.number_in(chosen[i]), rows + i, cols + i);
}

struct State {
  int64_t wanted, empty, live;
  unsigned long long listed;
};

template <class Key>
struct Scratch {
  State* state;
  ChoiceMemory<Key> memory;
  uint32_t* kept;
  Key *chosen_in, *chosen;
  void* library;
  size_t library_bytes = 0;

  Scratch(Layout& layout, const Geometry& g, int64_t k) {
    state = layout.take<State>(1);
    memory.choice = layout.take<Choice<Key>>(1);
    kept = layout.take<uint32_t>(kept_words(g.nnz));
    chosen_in = layout.take<Key>(k), chosen = layout.take<Key>(k);
    check(cub::DeviceRadixSort::SortKeys(nullptr, library_bytes, chosen_in, chosen, k), kName);
    library = layout.take<char>(int64_t(library_bytes));
    memory.capacity = kGradientCapacity + 2 * k;
    memory.keys = layout.take<Key>(memory.capacity);
  }
};

}  // namespace

int64_t grow_gradient_workspace(const Geometry& geometry, int64_t k, DType dtype) {
  capability(current_device());
  Layout layout(nullptr);
  k = std::clamp<int64_t>(k, 0, geometry.out * geometry.in);
  if (has_wide_keys(geometry, dtype)) Scratch<Key128>(layout, geometry, k);
  else Scratch<Key64>(layout, geometry, k);
  return layout.used();
}

void grow_gradient(const GrowGradientArgs& args, int64_t* rows, int64_t* cols, SelectStatus* status, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.empty.pattern.geometry;
  check_growth(kName, args.empty, args.k, rows, cols, status);
  check_workspace(kName, resources.workspace, resources.workspace_bytes, grow_gradient_workspace(g, args.k, args.x.dtype), 256);
  const cudaStream_t stream = resources.stream;
  const int64_t k = std::min(args.k, g.out * g.in);
  const auto run = [&](const auto& keys, const auto& s) {
    using Keys = std::decay_t<decltype(keys)>;
    using Key = typename Keys::Key;
    check(cudaMemsetAsync(s.state, 0, sizeof(State), stream), kName);
    check(cudaMemsetAsync(s.memory.choice, 0, sizeof(Choice<Key>), stream), kName);
    mark_empty(kName, args.empty, args.k, s.kept, &s.state->live, &s.state->wanted, &s.state->empty, status, stream);
    if (k == 0) return;
    const Report report{.taken = &s.state->wanted, .error = &status->error, .number = &status->number, .code = int64_t(SelectError::kTooFewGradients),
                        .retaken = &s.state->listed};
    choose_gradient(kName, keys, g, k, &s.state->wanted, s.memory, report, IntoList<Key, true>{s.chosen_in, k, &s.state->listed}, stream, [] {});
    size_t bytes = s.library_bytes;
    const int key_bits = Keys::kScoreBits + keys.index_bits;
    check(cub::DeviceRadixSort::SortKeys(s.library, bytes, s.chosen_in, s.chosen, k, 0, key_bits, stream), kName);
    launch<unpack_chosen<Keys>>(kName, blocks_for(k), kThreads, 0, stream, keys, s.chosen, k, &s.state->wanted, rows, cols);
  };
  with_gradient_keys(args.dy, args.x, TakenPositions{PositionBits(g, nullptr), {g, args.empty.pattern.index, args.empty.pattern.tile_ptr}, nullptr}, [&](auto keys) {
    Layout layout(resources.workspace);
    const Scratch<typename decltype(keys)::Key> s(layout, g, k);
    keys.taken.kept = s.kept;
    run(keys, s);
  });
}

}  // namespace snack::cuda
