// The products on CPU tensors: torch's threads, dense product and memory for the kernels, and the reference beside them.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "products.hpp"

namespace snack::torch_face {
namespace {

Tensor dense_view(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  const ScalarType type = dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
  const int64_t sizes[] = {rows, cols}, strides[] = {row_stride, col_stride};
  return torch::stable::from_blob(const_cast<void*>(data), {sizes, 2}, {strides, 2}, torch::stable::Device(DeviceType::CPU), type);
}

// The C shims take the scalars of addmm as plain doubles, which the boxed dispatcher call cannot pass.
void run_gemm(void*, const GemmArgs& args) {
  const Tensor a = dense_view(args.a, args.dtype, args.m, args.k, args.a_row_stride, args.a_col_stride);
  const Tensor b = dense_view(args.b, args.dtype, args.k, args.n, args.b_row_stride, args.b_col_stride);
  const Tensor c = dense_view(args.c, args.dtype, args.m, args.n, args.c_row_stride, 1);
  const AOTITorchError status = args.accumulate ? aoti_torch_cpu_addmm_out(c.get(), c.get(), a.get(), b.get(), 1.0, 1.0)
                                                : aoti_torch_cpu_mm_out(c.get(), a.get(), b.get());
  SNACK_CHECK(status == AOTI_TORCH_SUCCESS, "PyTorch's dense product failed; its own message stands above.");
}

// Plans the product and lends it threads, gemm and workspace.
struct Cpu {
  static void launch(const SpmmArgs& args, const Plan& plan, const CpuResources& lent) { cpu::spmm(args, plan, lent); }
  static void launch(const SpmmTArgs& args, const Plan& plan, const CpuResources& lent) { cpu::spmm_t(args, plan, lent); }
  static void launch(const SddmmArgs& args, const Plan& plan, const CpuResources& lent) { cpu::sddmm(args, plan, lent); }
  static void launch(const SddmmUpdateArgs& args, const Plan& plan, const CpuResources& lent) { cpu::sddmm_update(args, plan, lent); }

  template <class Args>
  static void run(const Tensor& like, Operation operation, const Args& args, int64_t batch, int64_t regime) {
    const Problem problem{operation, args.pattern.geometry, batch, args.dtype};
    CpuResources lent{torch_parallel(), torch_gemm(), nullptr};
    const Plan plan = make_cpu_plan(problem, Regime(regime), {lent.parallel.threads, true});
    const Workspace workspace(name(operation), like, plan.workspace_bytes, 64);
    lent.workspace = workspace.data();
    lent.workspace_bytes = plan.workspace_bytes;
    launch(args, plan, lent);
  }
};

struct Reference {
  static void launch(const SpmmArgs& args) { reference::spmm(args); }
  static void launch(const SpmmTArgs& args) { reference::spmm_t(args); }
  static void launch(const SddmmArgs& args) { reference::sddmm(args); }
  static void launch(const SddmmUpdateArgs& args) { reference::sddmm_update(args); }

  template <class Args>
  static void run(const Tensor&, Operation, const Args& args, int64_t, int64_t) {
    launch(args);
  }
};

}  // namespace

Gemm torch_gemm() { return {nullptr, run_gemm}; }

}  // namespace snack::torch_face

STABLE_TORCH_LIBRARY_IMPL(snack, CPU, m) {
  using namespace snack::torch_face;
  m.impl("spmm", TORCH_BOX(&spmm<Cpu>));
  m.impl("spmm_t", TORCH_BOX(&spmm_t<Cpu>));
  m.impl("sddmm", TORCH_BOX(&sddmm<Cpu>));
  m.impl("sddmm_update", TORCH_BOX(&sddmm_update<Cpu>));
}

STABLE_TORCH_LIBRARY_IMPL(snack_reference, CPU, m) {
  using namespace snack::torch_face;
  m.impl("spmm", TORCH_BOX(&spmm<Reference>));
  m.impl("spmm_t", TORCH_BOX(&spmm_t<Reference>));
  m.impl("sddmm", TORCH_BOX(&sddmm<Reference>));
  m.impl("sddmm_update", TORCH_BOX(&sddmm_update<Reference>));
}
