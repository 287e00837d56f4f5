// spmm, spmm_t, sddmm on CPU tensors: shapes and dtypes checked, plan, workspace, kernel.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "compat.hpp"

namespace snack::torch_face {
namespace {

using torch::headeronly::DeviceType;

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

void check_matrix(const char* operation, const char* what, const Tensor& t, int64_t features, const char* features_name) {
  SNACK_CHECK(t.is_cpu(), operation, ": ", what, " is not on the CPU but the pattern is; move one of them.");
  SNACK_CHECK(t.dim() == 2, operation, ": ", what, " has ", t.dim(), " dimensions, expected 2 (batch, features); flatten it.");
  SNACK_CHECK(t.size(1) == features, operation, ": ", what, " has ", t.size(1), " columns, the pattern expects ",
              features_name, "=", features, ".");
}

void check_values(const char* operation, const Tensor& values, const PatternView& pattern) {
  SNACK_CHECK(values.is_cpu(), operation, ": values are not on the CPU but the pattern is; move one of them.");
  SNACK_CHECK(values.dim() == 1 && values.is_contiguous() && values.numel() == pattern.geometry.nnz, operation,
              ": values have ", values.numel(), " entries, the pattern has ", pattern.geometry.nnz,
              " connections (values must be contiguous and 1-D).");
}

void check_same(const char* operation, DType a, const char* a_name, DType b, const char* b_name) {
  SNACK_CHECK(a == b, operation, ": ", a_name, " is ", name(a), " and ", b_name, " is ", name(b),
              "; give both one dtype (or use autocast).");
}

// Scratch of a call, aligned to 64 bytes.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : tensor_(empty_cpu({bytes + 64}, ScalarType::Byte)) {}
  void* data() const {
    const auto address = reinterpret_cast<uintptr_t>(tensor_.data_ptr());
    return reinterpret_cast<void*>((address + 63) / 64 * 64);
  }

 private:
  Tensor tensor_;
};

// Plans the product, lends it threads, gemm and workspace, runs it.
template <class Args, class Kernel>
void run_planned(Operation operation, const Args& args, int64_t batch, int64_t regime, Kernel kernel) {
  const Problem problem{operation, args.pattern.geometry, batch, args.dtype};
  CpuResources resources{torch_parallel(), torch_gemm(), nullptr};
  const Plan plan = make_cpu_plan(problem, Regime(regime), {resources.parallel.threads, true});
  const Workspace workspace(plan.workspace_bytes);
  resources.workspace = workspace.data();
  kernel(args, plan, resources);
}

template <bool kReference>
Tensor spmm(const Tensor& index, const Tensor& tile_ptr, const Tensor& values, const Tensor& x, std::optional<Tensor> bias,
            int64_t out, int64_t in, int64_t regime) {
  SpmmArgs args{.pattern = pattern_view("spmm", index, tile_ptr, out, in)};
  check_values("spmm", values, args.pattern);
  check_matrix("spmm", "x", x, in, "in_features");
  args.dtype = dtype_of(values, "spmm", "values");
  check_same("spmm", dtype_of(x, "spmm", "x"), "x", args.dtype, "values");
  Tensor contiguous_bias;
  if (bias) {
    SNACK_CHECK(bias->is_cpu() && bias->dim() == 1 && bias->numel() == out, "spmm: bias has ", bias->numel(),
                " entries, expected out_features=", out, " on the CPU.");
    check_same("spmm", dtype_of(*bias, "spmm", "bias"), "bias", args.dtype, "values");
    contiguous_bias = bias->is_contiguous() ? *bias : torch::stable::contiguous(*bias);
    args.bias = contiguous_bias.data_ptr();
  }
  Tensor y = torch::stable::new_empty(x, {x.size(0), out});
  args.values = values.data_ptr();
  args.x = matrix(x, args.dtype);
  args.y = y.data_ptr();
  if constexpr (kReference) reference::spmm(args);
  else run_planned(Operation::kSpmm, args, x.size(0), regime, cpu::spmm);
  return y;
}

template <bool kReference>
Tensor spmm_t(const Tensor& index, const Tensor& tile_ptr, const Tensor& values, const Tensor& dy, int64_t out, int64_t in,
              int64_t regime) {
  SpmmTArgs args{.pattern = pattern_view("spmm_t", index, tile_ptr, out, in)};
  check_values("spmm_t", values, args.pattern);
  check_matrix("spmm_t", "dy", dy, out, "out_features");
  args.dtype = dtype_of(values, "spmm_t", "values");
  check_same("spmm_t", dtype_of(dy, "spmm_t", "dy"), "dy", args.dtype, "values");
  Tensor dx = torch::stable::new_empty(dy, {dy.size(0), in});
  args.values = values.data_ptr();
  args.dy = matrix(dy, args.dtype);
  args.dx = dx.data_ptr();
  if constexpr (kReference) reference::spmm_t(args);
  else run_planned(Operation::kSpmmT, args, dy.size(0), regime, cpu::spmm_t);
  return dx;
}

template <bool kReference>
Tensor sddmm(const Tensor& index, const Tensor& tile_ptr, const Tensor& dy, const Tensor& x, int64_t out, int64_t in,
             int64_t regime) {
  SddmmArgs args{.pattern = pattern_view("sddmm", index, tile_ptr, out, in)};
  check_matrix("sddmm", "dy", dy, out, "out_features");
  check_matrix("sddmm", "x", x, in, "in_features");
  SNACK_CHECK(dy.size(0) == x.size(0), "sddmm: dy has ", dy.size(0), " rows and x has ", x.size(0), "; both are the batch.");
  args.dtype = dtype_of(x, "sddmm", "x");
  check_same("sddmm", dtype_of(dy, "sddmm", "dy"), "dy", args.dtype, "x");
  Tensor dvalues = torch::stable::new_empty(x, {index.numel()});
  args.dy = matrix(dy, args.dtype);
  args.x = matrix(x, args.dtype);
  args.dvalues = dvalues.data_ptr();
  if constexpr (kReference) reference::sddmm(args);
  else run_planned(Operation::kSddmm, args, x.size(0), regime, cpu::sddmm);
  return dvalues;
}

}  // namespace

Gemm torch_gemm() { return {nullptr, run_gemm}; }

}  // namespace snack::torch_face

STABLE_TORCH_LIBRARY_IMPL(snack, CPU, m) {
  using namespace snack::torch_face;
  m.impl("spmm", TORCH_BOX(&spmm<false>));
  m.impl("spmm_t", TORCH_BOX(&spmm_t<false>));
  m.impl("sddmm", TORCH_BOX(&sddmm<false>));
}

STABLE_TORCH_LIBRARY_IMPL(snack_reference, CPU, m) {
  using namespace snack::torch_face;
  m.impl("spmm", TORCH_BOX(&spmm<true>));
  m.impl("spmm_t", TORCH_BOX(&spmm_t<true>));
  m.impl("sddmm", TORCH_BOX(&sddmm<true>));
}
