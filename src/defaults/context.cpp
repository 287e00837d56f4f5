#include "snack/defaults/context.hpp"

#include <cstdlib>
#include <new>

#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

constexpr int64_t kAlign = 64;

}  // namespace

void Context::Free::operator()(void* memory) const { std::free(memory); }

Context::Context(ParallelFor threads, Gemm gemm) : threads_(threads), gemm_(gemm) {}

template <class Args>
void Context::run(Operation operation, const Args& args, int64_t batch, Regime regime,
                  void (*kernel)(const Args&, const Plan&, const CpuResources&)) {
  snack::check(args);
  const Plan plan = make_cpu_plan({operation, args.pattern.geometry, batch, args.dtype}, regime, {threads_.threads, bool(gemm_)});
  if (plan.workspace_bytes > bytes_) {
    const int64_t bytes = (plan.workspace_bytes + kAlign - 1) / kAlign * kAlign;
    workspace_.reset();  // the contents are scratch, so old and new need not exist together
    bytes_ = 0;
    workspace_.reset(std::aligned_alloc(size_t(kAlign), size_t(bytes)));
    if (workspace_ == nullptr) throw std::bad_alloc();
    bytes_ = bytes;
  }
  kernel(args, plan, {threads_, gemm_, workspace_.get(), bytes_});
}

void Context::spmm(const SpmmArgs& args, Regime regime) { run(Operation::kSpmm, args, args.x.rows, regime, cpu::spmm); }
void Context::spmm_t(const SpmmTArgs& args, Regime regime) { run(Operation::kSpmmT, args, args.dy.rows, regime, cpu::spmm_t); }
void Context::sddmm(const SddmmArgs& args, Regime regime) { run(Operation::kSddmm, args, args.x.rows, regime, cpu::sddmm); }
void Context::sddmm_update(const SddmmUpdateArgs& args, Regime regime) { run(Operation::kSddmmUpdate, args, args.x.rows, regime, cpu::sddmm_update); }

}  // namespace snack::cpu
