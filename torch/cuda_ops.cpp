// The products and rewire on CUDA tensors. The device of the tensors is made current and its current stream is used; results
// and scratch come from torch's allocator, so a call can be captured in a CUDA graph (but for rewire, which reads one status).
// libsnack_ops_cuda.so is linked against the libraries of a CPU-only PyTorch: the one symbol of libtorch_cuda is weak.
#include <torch/csrc/stable/accelerator.h>

#ifndef SNACK_CUDA_FINGERPRINT
#error "the build defines SNACK_CUDA_FINGERPRINT, a hash of the kernels' sources"
#endif

#include <array>

#include "products.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/plan/costs.hpp"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace snack::torch_face {
namespace {

constexpr int64_t kAlignment = 256;

cuda::Stream current_stream(const char* operation, int32_t device) {
  SNACK_CHECK(aoti_torch_get_current_cuda_stream != nullptr, operation,
              ": this PyTorch is built without CUDA; install a CUDA build of it, or move the tensors to the CPU.");
  void* stream = nullptr;
  SNACK_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS, operation, ": PyTorch has no stream for cuda:",
              device, "; its own message stands above.");
  return static_cast<cuda::Stream>(stream);
}

// The plan of a product. Choosing weighs several plans, and a model asks for few, again and again: the last ones are kept.
const Plan& plan_of(const Problem& problem, int64_t code, int32_t device) {
  struct Known {
    Problem problem;
    int64_t code = -1;
    int32_t device = -1;
    Plan plan;
  };
  thread_local std::array<Known, 64> all;
  const Geometry& g = problem.geometry;
  const uint64_t hash = (uint64_t(g.nnz) * 31 + uint64_t(g.out) * 7 + uint64_t(g.in) + uint64_t(problem.batch) * 1009 + uint64_t(problem.operation)) *
                        0x9e3779b97f4a7c15u;
  Known& known = all[hash >> 58];
  if (known.code != code || known.device != device || !(known.problem == problem)) {
    const Choice choice = choice_of(name(problem.operation), code);
    known.plan = make_cuda_plan(problem, choice.regime, cuda::capability(device), choice.kernel);
    known.problem = problem, known.code = code, known.device = device;
  }
  return known.plan;
}

// Plans the product and lends it stream and workspace.
struct Cuda {
  static void launch(const SpmmArgs& args, const Plan& plan, const cuda::Resources& lent) { cuda::spmm(args, plan, lent); }
  static void launch(const SpmmTArgs& args, const Plan& plan, const cuda::Resources& lent) { cuda::spmm_t(args, plan, lent); }
  static void launch(const SddmmArgs& args, const Plan& plan, const cuda::Resources& lent) { cuda::sddmm(args, plan, lent); }
  static void launch(const SddmmUpdateArgs& args, const Plan& plan, const cuda::Resources& lent) { cuda::sddmm_update(args, plan, lent); }

  template <class Args>
  static void run(const Tensor& like, Operation operation, const Args& args, int64_t batch, int64_t regime) {
    const int32_t device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const Problem problem{operation, args.pattern.geometry, batch, args.dtype};
    const Plan& plan = plan_of(problem, regime, device);
    const Workspace workspace(name(operation), like, plan.workspace_bytes, kAlignment);
    launch(args, plan, {current_stream(name(operation), device), workspace.data(), plan.workspace_bytes});
  }
};

// ---- rewire ----

// A list of the edit on the card of the pattern.
Tensor index_list(const char* what, const Tensor& t, const Tensor& index) {
  SNACK_CHECK(t.dim() == 1 && t.scalar_type() == ScalarType::Long, "rewire: ", what, " must be a 1-D int64 tensor.");
  SNACK_CHECK(t.is_cpu() || on_one_device(t, index), "rewire: ", what, " and the pattern are on different devices, ", device_name(t),
              " and ", device_name(index), "; move one of them.");
  const Tensor contiguous = t.is_contiguous() ? t : torch::stable::contiguous(t);
  return t.is_cpu() ? torch::stable::to(contiguous, index.device()) : contiguous;
}

// Waits for the edit: the one time that the host reads from the card.
cuda::RewireStatus read(const Tensor& status) {
  const Tensor on_host = torch::stable::to(status, torch::stable::Device(DeviceType::CPU));
  const auto* words = static_cast<const int64_t*>(on_host.data_ptr());
  return {words[0], words[1], words[2]};
}
static_assert(sizeof(cuda::RewireStatus) == 3 * sizeof(int64_t));

std::tuple<Tensor, Tensor, Tensor> rewire(const Tensor& index, const Tensor& tile_ptr, const Tensor& drop, const Tensor& rows,
                                          const Tensor& cols, int64_t out, int64_t in) {
  SNACK_CHECK(index.is_cuda(), "rewire: the pattern is on ", device_name(index), " and the lists are on a card; move one of them.");
  SNACK_CHECK(rows.numel() == cols.numel(), "rewire: grow has ", rows.numel(), " rows and ", cols.numel(), " columns; both list the positions.");
  const PatternView before = pattern_view("rewire", index, tile_ptr, out, in);
  SNACK_CHECK(drop.numel() <= before.geometry.nnz, "rewire: drop names ", drop.numel(), " slots, and the pattern has ", before.geometry.nnz,
              "; name each slot once.");
  const int32_t device = index.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cuda::capability(device);  // a card without code in this binary is refused before anything is launched
  const Tensor drops = index_list("drop", drop, index), grow_rows = index_list("grow rows", rows, index),
               grow_cols = index_list("grow columns", cols, index);
  const auto data = [](const Tensor& list) { return static_cast<const int64_t*>(list.data_ptr()); };
  const RewireArgs args{before, data(drops), drops.numel(), data(grow_rows), data(grow_cols), grow_rows.numel()};

  const Geometry after = make_geometry(out, in, before.geometry.nnz - args.drops + args.grows);
  const bool narrow = after.packing == Packing::kNarrow;
  Tensor new_index = allocate("rewire", index, {after.nnz}, narrow ? ScalarType::Short : ScalarType::Int);
  Tensor new_tile_ptr = allocate("rewire", tile_ptr, {after.pointer_words()});
  Tensor source = allocate("rewire", tile_ptr, {after.nnz});
  Tensor status = allocate("rewire", tile_ptr, {3});
  const int64_t bytes = cuda::rewire_workspace(before.geometry, args.drops, args.grows);
  const Workspace workspace("rewire", index, bytes, kAlignment);
  const cuda::RewireOutput output{after, new_index.data_ptr(), static_cast<int64_t*>(new_tile_ptr.data_ptr()),
                                  static_cast<int64_t*>(source.data_ptr()), static_cast<cuda::RewireStatus*>(status.data_ptr())};
  cuda::rewire(args, output, {current_stream("rewire", device), workspace.data(), bytes});
  const std::string problem = cuda::describe(read(status), before.geometry);
  SNACK_CHECK(problem.empty(), problem);
  return {new_index, new_tile_ptr, source};
}

// ---- what Python asks about cards ----

std::string cuda_architectures() { return cuda::architectures(); }

bool cuda_runs_on(std::string architectures, int64_t major, int64_t minor) {
  return cuda::runs_on(architectures.c_str(), int(major), int(minor));
}

int64_t cuda_devices() { return cuda::device_count(); }

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> cuda_capability(int64_t device) {
  const CudaCapability& c = cuda::capability(int(device));
  return {c.major, c.minor, c.multiprocessors, c.shared_bytes, c.l2_bytes, c.memory_gb_s};
}

std::string cuda_fingerprint() { return SNACK_CUDA_FINGERPRINT; }

// -> the card that the table is of.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> cuda_use_costs(std::string text) {
  const CostTable table = parse_costs(text);
  SNACK_CHECK(table.kernels == SNACK_CUDA_FINGERPRINT, "cost table: it was measured with other kernels than this version has; run snack bench tune.");
  cuda::use_costs(table);
  const CudaCapability& c = table.capability;
  return {c.major, c.minor, c.multiprocessors, c.shared_bytes, c.l2_bytes, c.memory_gb_s};
}

}  // namespace
}  // namespace snack::torch_face

STABLE_TORCH_LIBRARY_IMPL(snack, CUDA, m) {
  using namespace snack::torch_face;
  m.impl("spmm", TORCH_BOX(&spmm<Cuda>));
  m.impl("spmm_t", TORCH_BOX(&spmm_t<Cuda>));
  m.impl("sddmm", TORCH_BOX(&sddmm<Cuda>));
  m.impl("sddmm_update", TORCH_BOX(&sddmm_update<Cuda>));
  m.impl("rewire", TORCH_BOX(&rewire));
}

STABLE_TORCH_LIBRARY_FRAGMENT(snack, m) {
  m.def("cuda_architectures() -> str");                                 // of this binary, e.g. "80 90a 120+PTX"
  m.def("cuda_runs_on(str architectures, int major, int minor) -> bool");  // does code for them run on such a card?
  m.def("cuda_devices() -> int");                                       // that the driver shows
  m.def("cuda_capability(int device) -> (int, int, int, int, int, int)");  // major, minor, multiprocessors, shared and L2 bytes, GB/s
  m.def("cuda_fingerprint() -> str");                                   // of the kernels' sources
  m.def("cuda_use_costs(str table) -> (int, int, int, int, int, int)");  // the user's own, before a card is first asked
}

STABLE_TORCH_LIBRARY_IMPL(snack, CompositeExplicitAutograd, m) {
  using namespace snack::torch_face;
  m.impl("cuda_architectures", TORCH_BOX(&cuda_architectures));
  m.impl("cuda_runs_on", TORCH_BOX(&cuda_runs_on));
  m.impl("cuda_devices", TORCH_BOX(&cuda_devices));
  m.impl("cuda_capability", TORCH_BOX(&cuda_capability));
  m.impl("cuda_fingerprint", TORCH_BOX(&cuda_fingerprint));
  m.impl("cuda_use_costs", TORCH_BOX(&cuda_use_costs));
}
