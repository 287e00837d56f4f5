// The host path that the products share: a plan that belongs to the problem, and the workspace it names.
#pragma once

#include "launch.hpp"
#include "snack/kernels/check.hpp"
#include "snack/plan/plan.hpp"

namespace snack::cuda {

/// Throws Error unless `plan` is what make_cuda_plan gives for this problem and kernel on the current device, and the workspace holds it.
inline void check(const Problem& problem, const Plan& plan, const Resources& resources) {
  const char* operation = name(problem.operation);
  const CudaCapability& card = capability(current_device());
  const auto is_of_problem = [&] {
    try {
      return plan == make_cuda_plan(problem, plan.regime, card, plan.kernel);
    } catch (const Error&) {  // the kernel cannot compute it
      return false;
    }
  };
  SNACK_CHECK(is_of_problem(), operation, ": the plan is of another problem, dtype or device; make it with "
              "make_cuda_plan(problem, regime, cuda::capability(device)).");
  check_workspace(operation, resources.workspace, resources.workspace_bytes, plan.workspace_bytes, 256);
}

/// The values of `nnz` slots, if the plan says so.
template <class T>
EvictFirst evict_first(const Plan& plan, const T* values, int64_t nnz) {
  if (!plan.evict_first) return {};
  return {values, nnz * int64_t(sizeof(T))};
}

}  // namespace snack::cuda
