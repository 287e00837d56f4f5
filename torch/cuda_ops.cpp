// The products on CUDA tensors. The device of the tensors is made current and its current stream is used; results and scratch come
// from torch's allocator, so a call can be captured in a CUDA graph.
#ifndef SNACK_CUDA_FINGERPRINT
#error "the build defines SNACK_CUDA_FINGERPRINT, a hash of the kernels' sources"
#endif

#include <array>

#include "cuda.hpp"
#include "products.hpp"
#include "snack/plan/costs.hpp"

namespace snack::torch_face {
namespace {

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
