// spmm, spmm_t, sddmm, sddmm_update on tensors of any device: shapes, dtypes and devices are checked, the result is allocated, and
// the arguments of the kernel are filled in. A `Backend` multiplies:
//   static void run(const Tensor& like, Operation, const Args&, int64_t batch, int64_t regime)
// where `like` is an operand, on whose device the work happens.
#pragma once

#include "compat.hpp"

namespace snack::torch_face {

inline void check_matrix(const char* operation, const char* what, const Tensor& t, const Tensor& index, int64_t features,
                         const char* features_name) {
  check_device(operation, what, t, index);
  SNACK_CHECK(t.dim() == 2, operation, ": ", what, " has ", t.dim(), " dimensions, expected 2 (batch, features); flatten it.");
  SNACK_CHECK(t.size(1) == features, operation, ": ", what, " has ", t.size(1), " columns, the pattern expects ",
              features_name, "=", features, ".");
}

inline void check_values(const char* operation, const Tensor& values, const Tensor& index, const PatternView& pattern) {
  check_device(operation, "values", values, index);
  SNACK_CHECK(values.dim() == 1 && values.is_contiguous() && values.numel() == pattern.geometry.nnz, operation,
              ": values have ", values.numel(), " entries, the pattern has ", pattern.geometry.nnz,
              " connections (values must be contiguous and 1-D).");
}

inline void check_same(const char* operation, DType a, const char* a_name, DType b, const char* b_name) {
  SNACK_CHECK(a == b, operation, ": ", a_name, " is ", name(a), " and ", b_name, " is ", name(b),
              "; give both one dtype (or use autocast).");
}

template <class Backend>
Tensor spmm(const Tensor& index, const Tensor& tile_ptr, const Tensor& values, const Tensor& x, std::optional<Tensor> bias,
            int64_t out, int64_t in, int64_t regime) {
  SpmmArgs args{.pattern = pattern_view("spmm", index, tile_ptr, out, in)};
  check_values("spmm", values, index, args.pattern);
  check_matrix("spmm", "x", x, index, in, "in_features");
  args.dtype = dtype_of(values, "spmm", "values");
  check_same("spmm", dtype_of(x, "spmm", "x"), "x", args.dtype, "values");
  Tensor contiguous_bias;
  if (bias) {
    check_device("spmm", "bias", *bias, index);
    SNACK_CHECK(bias->dim() == 1 && bias->numel() == out, "spmm: bias has ", bias->numel(), " entries, expected out_features=", out, ".");
    check_same("spmm", dtype_of(*bias, "spmm", "bias"), "bias", args.dtype, "values");
    contiguous_bias = bias->is_contiguous() ? *bias : torch::stable::contiguous(*bias);
    args.bias = contiguous_bias.data_ptr();
  }
  Tensor y = allocate("spmm", x, {x.size(0), out});
  args.values = values.data_ptr();
  args.x = matrix(x, args.dtype);
  args.y = y.data_ptr();
  Backend::run(x, Operation::kSpmm, args, x.size(0), regime);
  return y;
}

template <class Backend>
Tensor spmm_t(const Tensor& index, const Tensor& tile_ptr, const Tensor& values, const Tensor& dy, int64_t out, int64_t in,
              int64_t regime) {
  SpmmTArgs args{.pattern = pattern_view("spmm_t", index, tile_ptr, out, in)};
  check_values("spmm_t", values, index, args.pattern);
  check_matrix("spmm_t", "dy", dy, index, out, "out_features");
  args.dtype = dtype_of(values, "spmm_t", "values");
  check_same("spmm_t", dtype_of(dy, "spmm_t", "dy"), "dy", args.dtype, "values");
  Tensor dx = allocate("spmm_t", dy, {dy.size(0), in});
  args.values = values.data_ptr();
  args.dy = matrix(dy, args.dtype);
  args.dx = dx.data_ptr();
  Backend::run(dy, Operation::kSpmmT, args, dy.size(0), regime);
  return dx;
}

template <class Backend>
Tensor sddmm(const Tensor& index, const Tensor& tile_ptr, const Tensor& dy, const Tensor& x, int64_t out, int64_t in,
             int64_t regime) {
  SddmmArgs args{.pattern = pattern_view("sddmm", index, tile_ptr, out, in)};
  check_matrix("sddmm", "dy", dy, index, out, "out_features");
  check_matrix("sddmm", "x", x, index, in, "in_features");
  SNACK_CHECK(dy.size(0) == x.size(0), "sddmm: dy has ", dy.size(0), " rows and x has ", x.size(0), "; both are the batch.");
  args.dtype = dtype_of(x, "sddmm", "x");
  check_same("sddmm", dtype_of(dy, "sddmm", "dy"), "dy", args.dtype, "x");
  Tensor dvalues = allocate("sddmm", x, {index.numel()});
  args.dy = matrix(dy, args.dtype);
  args.x = matrix(x, args.dtype);
  args.dvalues = dvalues.data_ptr();
  Backend::run(x, Operation::kSddmm, args, x.size(0), regime);
  return dvalues;
}

inline const float* scalar(const char* what, const std::optional<Tensor>& t, const Tensor& index) {
  if (!t) return nullptr;
  check_device("sddmm_update", what, *t, index);
  SNACK_CHECK(t->numel() == 1 && t->scalar_type() == ScalarType::Float, "sddmm_update: ", what, " must be one float32 number.");
  return static_cast<const float*>(t->data_ptr());
}

inline void set_rule(SddmmUpdateArgs& args, int64_t rule, const std::vector<double>& n) {
  SNACK_CHECK((rule == 0 || rule == 1) && n.size() == 7, "sddmm_update: rule ", rule, " with ", n.size(),
              " numbers was given, expected 0 (SGD) or 1 (AdamW) with 7.");
  args.rule = Rule(rule);
  if (args.rule == Rule::kSgd) args.sgd = {n[0], n[1], n[2], n[3], n[4] != 0, n[5] != 0, n[6] != 0};
  else args.adamw = {n[0], n[1], n[2], n[3], n[4], n[5], n[6] != 0};
}

template <class Backend>
void sddmm_update(const Tensor& index, const Tensor& tile_ptr, const Tensor& values, const std::vector<Tensor>& state, const Tensor& dy,
                  const Tensor& x, std::optional<Tensor> lr, std::optional<Tensor> step, int64_t rule, const std::vector<double>& numbers,
                  int64_t out, int64_t in, int64_t regime) {
  constexpr const char* kName = "sddmm_update";
  SddmmUpdateArgs args{.pattern = pattern_view(kName, index, tile_ptr, out, in)};
  check_values(kName, values, index, args.pattern);
  check_matrix(kName, "dy", dy, index, out, "out_features");
  check_matrix(kName, "x", x, index, in, "in_features");
  args.dtype = dtype_of(values, kName, "values");
  check_same(kName, dtype_of(dy, kName, "dy"), "dy", args.dtype, "values");
  check_same(kName, dtype_of(x, kName, "x"), "x", args.dtype, "values");
  set_rule(args, rule, numbers);
  const size_t states = args.rule == Rule::kAdamW ? 2 : args.sgd.momentum != 0 ? 1 : 0;
  SNACK_CHECK(state.size() == states, kName, ": ", state.size(), " states were given, expected ", states, ".");
  for (size_t i = 0; i < states; ++i) {
    check_device(kName, "state", state[i], index);
    SNACK_CHECK(state[i].dim() == 1 && state[i].is_contiguous() && state[i].numel() == index.numel(), kName, ": a state has ", state[i].numel(),
                " entries, the pattern has ", index.numel(), " connections (states must be contiguous and 1-D).");
    check_same(kName, dtype_of(state[i], kName, "state"), "a state", args.dtype, "values");
    args.state[i] = state[i].data_ptr();
  }
  args.values = values.data_ptr();
  args.dy = matrix(dy, args.dtype);
  args.x = matrix(x, args.dtype);
  args.lr = scalar("lr", lr, index);
  args.step = scalar("step", step, index);
  Backend::run(x, Operation::kSddmmUpdate, args, x.size(0), regime);
}

}  // namespace snack::torch_face
