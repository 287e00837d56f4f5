// The CPU backend behind the interface that test_products.cpp is written against.
#pragma once

#include "problem.hpp"
#include "snack/kernels/exchange.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing::backend {

inline const std::vector<DType> kDTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
inline const std::vector<Regime> kRegimes = {Regime::kStream, Regime::kPanel};
inline const std::vector<int> kThreadCounts = {1, 3};

/// Whether a problem of that size is left to builds without sanitizers, which are many times faster; only cards treat large ones differently.
inline bool is_left_out([[maybe_unused]] int64_t size) {
#ifdef __SANITIZE_ADDRESS__
  return size > 100'000;
#else
  return false;
#endif
}

template <class Args, class Kernel>
void run(Operation operation, const Args& args, int64_t batch, Regime regime, int thread_count, Kernel kernel) {
  CpuResources resources{threads(thread_count), plain_gemm(), nullptr};
  const Plan plan = make_cpu_plan({operation, args.pattern.geometry, batch, args.dtype}, regime, {thread_count, true});
  std::vector<uint8_t> workspace(size_t(plan.workspace_bytes) + 64);
  resources.workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
  resources.workspace_bytes = plan.workspace_bytes;
  kernel(args, plan, resources);
}

inline void spmm(const SpmmArgs& args, Regime regime, int thread_count) { run(Operation::kSpmm, args, args.x.rows, regime, thread_count, cpu::spmm); }
inline void spmm_t(const SpmmTArgs& args, Regime regime, int thread_count) { run(Operation::kSpmmT, args, args.dy.rows, regime, thread_count, cpu::spmm_t); }
inline void sddmm(const SddmmArgs& args, Regime regime, int thread_count) { run(Operation::kSddmm, args, args.x.rows, regime, thread_count, cpu::sddmm); }
inline void sddmm_update(const SddmmUpdateArgs& args, Regime regime, int thread_count) { run(Operation::kSddmmUpdate, args, args.x.rows, regime, thread_count, cpu::sddmm_update); }
inline std::vector<int64_t> select_smallest(const SelectArgs& args) { return cpu::select_smallest(args); }
inline Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key) { return cpu::grow_uniform(empty, k, key); }
inline Positions grow_gradient(const GrowGradientArgs& args) { return cpu::grow_gradient(args, plain_gemm(), threads(2)); }
inline ExchangeResult exchange(const ExchangeArgs& args) { return cpu::exchange(args, plain_gemm(), threads(3)); }
inline RewireResult rewire(const RewireArgs& args) { return cpu::rewire(args, threads(3)); }

}  // namespace snack::testing::backend
