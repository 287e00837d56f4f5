// sddmm_update: a training step without a gradient in memory.
//   gradient_k = sum_b dy[b, row_k] x[b, col_k];   values[k], state[k] = rule(values[k], gradient_k, state[k])
#pragma once

#include "snack/kernels/spmm.hpp"
#include "snack/kernels/update_rule.hpp"

namespace snack {

/// dy (batch, out), x (batch, in): any strides; values and each state: nnz elements in slot order, read and written. All of one dtype.
struct SddmmUpdateArgs {
  PatternView pattern;
  DType dtype = DType::kFloat32;
  void* values = nullptr;
  void* state[2] = {};  // SGD: the momentum buffer, null without momentum; AdamW: averages of the gradient and of its square
  MatrixView dy;
  MatrixView x;
  Rule rule = Rule::kSgd;
  SgdNumbers sgd;              // of the two, the one that `rule` names
  AdamWNumbers adamw;
  const float* lr = nullptr;   // where not null, they stand for the numbers' own: a captured graph reads them anew
  const float* step = nullptr;
};

/// Calls f with the rule of the arguments, calculating in A, before `read`.
template <class A, class F>
void with_rule(const SddmmUpdateArgs& args, F&& f) {
  if (args.rule == Rule::kAdamW) f(AdamWRule<A>(args.adamw));
  else if (args.state[0] != nullptr) f(SgdRule<A, true>(args.sgd));
  else f(SgdRule<A, false>(args.sgd));
}

namespace reference {
void sddmm_update(const SddmmUpdateArgs& args);
}
namespace cpu {
void sddmm_update(const SddmmUpdateArgs& args, const Plan& plan, const CpuResources& resources);
}
namespace cuda {
/// Every pointer of `args` is device memory. float32, float16, bfloat16. Repeats bit for bit.
void sddmm_update(const SddmmUpdateArgs& args, const Plan& plan, const Resources& resources);
}

}  // namespace snack
