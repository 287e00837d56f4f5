// Operators on topologies on CUDA tensors. Those that return lists read one status from the card, so they wait and cannot be captured.
#include <cstring>

#include "cuda.hpp"
#include "exchange.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/select.hpp"

namespace snack::torch_face {
namespace {

// A list of slots or positions on the card of the pattern.
Tensor index_list(const char* operation, const char* what, const Tensor& t, const Tensor& index) {
  SNACK_CHECK(t.dim() == 1 && t.scalar_type() == ScalarType::Long, operation, ": ", what, " must be a 1-D int64 tensor.");
  SNACK_CHECK(t.is_cpu() || on_one_device(t, index), operation, ": ", what, " and the pattern are on different devices, ", device_name(t),
              " and ", device_name(index), "; move one of them.");
  const Tensor contiguous = t.is_contiguous() ? t : torch::stable::contiguous(t);
  return t.is_cpu() ? torch::stable::to(contiguous, index.device()) : contiguous;
}

const int64_t* integers(const Tensor& t) { return static_cast<const int64_t*>(t.data_ptr()); }

// Waits for the operation: the one time that the host reads from the card.
template <class Status>
Status read(const Tensor& status) {
  const Tensor on_host = torch::stable::to(status, torch::stable::Device(DeviceType::CPU));
  Status said;
  static_assert(sizeof(said) % sizeof(int64_t) == 0);
  std::memcpy(&said, on_host.data_ptr(), sizeof(said));
  return said;
}
template <class Status>
Tensor new_status(const char* operation, const Tensor& like) { return allocate(operation, like, {int64_t(sizeof(Status) / sizeof(int64_t))}, ScalarType::Long); }

void expect_chosen(const Tensor& status, const Geometry& geometry, int64_t k) {
  const std::string problem = cuda::describe(read<cuda::SelectStatus>(status), geometry, k);
  SNACK_CHECK(problem.empty(), problem);
}

// Where the operation runs: the device of a tensor is current, and has code in this binary.
struct OnCard {
  int32_t device;
  torch::stable::accelerator::DeviceGuard guard;
  OnCard(const char* operation, const Tensor& t) : device(device_of(operation, t)), guard(device) {
    cuda::capability(device);  // a card without code in this binary is refused before anything is launched
  }

 private:
  static int32_t device_of(const char* operation, const Tensor& t) {
    SNACK_CHECK(t.is_cuda(), operation, ": the pattern is on ", device_name(t), " and the lists are on a card; move one of them.");
    return t.get_device_index();
  }
};

std::tuple<Tensor, Tensor, Tensor> rewire(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, const Tensor& rows,
                                          const Tensor& cols, int64_t out, int64_t in) {
  const OnCard card("rewire", index);
  SNACK_CHECK(rows.numel() == cols.numel(), "rewire: grow has ", rows.numel(), " rows and ", cols.numel(), " columns; both list the positions.");
  const PatternView before = pattern_view("rewire", index, tile_ptr, out, in);
  SNACK_CHECK(drop.numel() <= before.geometry.nnz, "rewire: drop names ", drop.numel(), " slots, and the pattern has ", before.geometry.nnz,
              "; name each slot once.");
  const Tensor drops = index_list("rewire", "drop", drop, index), grow_rows = index_list("rewire", "grow rows", rows, index),
               grow_cols = index_list("rewire", "grow columns", cols, index);
  const RewireArgs args{before, integers(drops), drops.numel(), integers(grow_rows), integers(grow_cols), grow_rows.numel()};

  const Geometry after = make_geometry(out, in, before.geometry.nnz - args.drops + args.grows);
  const bool narrow = after.packing == Packing::kNarrow;
  Tensor new_index = allocate("rewire", index, {after.nnz}, narrow ? ScalarType::Short : ScalarType::Int);
  Tensor new_tile_ptr = allocate("rewire", tile_ptr, {after.pointer_words()});
  Tensor source = allocate("rewire", tile_ptr, {after.nnz});
  const Tensor status = new_status<cuda::RewireStatus>("rewire", tile_ptr);
  const int64_t bytes = cuda::rewire_workspace(before.geometry, args.drops, args.grows);
  const Workspace workspace("rewire", index, bytes, kAlignment);
  const cuda::RewireOutput output{after, new_index.data_ptr(), static_cast<int64_t*>(new_tile_ptr.data_ptr()),
                                  static_cast<int64_t*>(source.data_ptr()), static_cast<cuda::RewireStatus*>(status.data_ptr())};
  cuda::rewire(args, output, {current_stream("rewire", card.device), workspace.data(), bytes});
  const std::string problem = cuda::describe(read<cuda::RewireStatus>(status), before.geometry);
  SNACK_CHECK(problem.empty(), problem);
  return {new_index, new_tile_ptr, source};
}

Tensor select_smallest(const Tensor& values, int64_t k, int64_t sign) {
  constexpr const char* kName = "select_smallest";
  SNACK_CHECK(values.dim() == 1 && values.is_contiguous(), kName, ": values must be a contiguous 1-D tensor.");
  SNACK_CHECK(sign >= 0 && sign <= int64_t(Sign::kNegative), kName, ": sign ", sign, " is none of 0 (any), 1 (positive), 2 (negative).");
  const OnCard card(kName, values);
  const SelectArgs args{dtype_of(values, kName, "values"), values.data_ptr(), values.numel(), k, Sign(sign)};
  const int64_t room = std::clamp<int64_t>(k, 0, args.nnz);  // more is refused
  const Tensor slots = allocate(kName, values, {room}, ScalarType::Long), status = new_status<cuda::SelectStatus>(kName, values);
  const int64_t bytes = cuda::select_smallest_workspace(args.dtype, args.nnz);
  const Workspace workspace(kName, values, bytes, kAlignment);
  cuda::select_smallest(args, static_cast<int64_t*>(slots.data_ptr()), static_cast<cuda::SelectStatus*>(status.data_ptr()),
                        {current_stream(kName, card.device), workspace.data(), bytes});
  expect_chosen(status, {}, k);
  return slots;
}

std::tuple<Tensor, Tensor> grow_uniform(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, int64_t k, int64_t key, int64_t out,
                                        int64_t in) {
  constexpr const char* kName = "grow_uniform";
  const OnCard card(kName, index);
  const Tensor drops = index_list(kName, "drop", drop, index);
  const EmptyPositions empty{pattern_view(kName, index, tile_ptr, out, in), integers(drops), drops.numel()};
  const int64_t room = std::clamp<int64_t>(k, 0, out * in);  // more is refused
  const Tensor rows = allocate(kName, tile_ptr, {room}), cols = allocate(kName, tile_ptr, {room}), status = new_status<cuda::SelectStatus>(kName, index);
  const int64_t bytes = cuda::grow_uniform_workspace(empty.pattern.geometry, k);
  const Workspace workspace(kName, index, bytes, kAlignment);
  cuda::grow_uniform(empty, k, uint64_t(key), static_cast<int64_t*>(rows.data_ptr()), static_cast<int64_t*>(cols.data_ptr()),
                     static_cast<cuda::SelectStatus*>(status.data_ptr()), {current_stream(kName, card.device), workspace.data(), bytes});
  expect_chosen(status, empty.pattern.geometry, k);
  return {rows, cols};
}

std::tuple<Tensor, Tensor> grow_gradient(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, const Tensor& dy, const Tensor& x, int64_t k,
                                         int64_t out, int64_t in) {
  constexpr const char* kName = "grow_gradient";
  const OnCard card(kName, index);
  const Tensor drops = index_list(kName, "drop", drop, index);
  GrowGradientArgs args{{pattern_view(kName, index, tile_ptr, out, in), integers(drops), drops.numel()}};
  check_matrix(kName, "dy", dy, index, out, "out_features");
  check_matrix(kName, "x", x, index, in, "in_features");
  const DType dtype = dtype_of(x, kName, "x");
  check_same(kName, dtype_of(dy, kName, "dy"), "dy", dtype, "x");
  args.dy = matrix(dy, dtype), args.x = matrix(x, dtype), args.k = k;
  const int64_t room = std::clamp<int64_t>(k, 0, out * in);  // more is refused
  const Tensor rows = allocate(kName, tile_ptr, {room}), cols = allocate(kName, tile_ptr, {room}), status = new_status<cuda::SelectStatus>(kName, index);
  const int64_t bytes = cuda::grow_gradient_workspace(args.empty.pattern.geometry, k, dtype);
  const Workspace workspace(kName, index, bytes, kAlignment);
  cuda::grow_gradient(args, static_cast<int64_t*>(rows.data_ptr()), static_cast<int64_t*>(cols.data_ptr()),
                      static_cast<cuda::SelectStatus*>(status.data_ptr()), {current_stream(kName, card.device), workspace.data(), bytes});
  expect_chosen(status, args.empty.pattern.geometry, k);
  return {rows, cols};
}

// Waits for nothing: an error is in the result.
struct CudaExchange {
  static Tensor run(const Tensor& index, const ExchangeArgs& args) {
    const OnCard card("exchange_", index);
    const Tensor result = allocate("exchange_", index, {2}, ScalarType::Long);
    const int64_t bytes = cuda::exchange_workspace(args);
    const Workspace workspace("exchange_", index, bytes, kAlignment);
    cuda::exchange(args, static_cast<ExchangeResult*>(result.data_ptr()), {current_stream("exchange_", card.device), workspace.data(), bytes});
    return result;
  }
};

}  // namespace
}  // namespace snack::torch_face

STABLE_TORCH_LIBRARY_IMPL(snack, CUDA, m) {
  using namespace snack::torch_face;
  m.impl("rewire", TORCH_BOX(&rewire));
  m.impl("select_smallest", TORCH_BOX(&select_smallest));
  m.impl("grow_uniform", TORCH_BOX(&grow_uniform));
  m.impl("grow_gradient", TORCH_BOX(&grow_gradient));
  m.impl("exchange_", TORCH_BOX(&exchange<CudaExchange>));
}
