// Products with everything they need kept in one place: the plan is made for every call, the workspace grows and stays.
#pragma once

#include <memory>

#include "snack/defaults/threads.hpp"
#include "snack/kernels/sddmm.hpp"
#include "snack/kernels/sddmm_update.hpp"
#include "snack/kernels/spmm_t.hpp"

namespace snack::cpu {

/// Owns the workspace, borrows runner and gemm. One context serves one call at a time: give every thread that computes its
/// own (they may share a ThreadPool, which then lets them take turns). The only allocation of a call is a larger workspace.
class Context {
 public:
  /// Without a gemm, 'auto' is always 'stream', the regime for sparse layers.
  explicit Context(ParallelFor threads = default_threads(), Gemm gemm = {});

  void spmm(const SpmmArgs& args, Regime regime = Regime::kAuto);
  void spmm_t(const SpmmTArgs& args, Regime regime = Regime::kAuto);
  void sddmm(const SddmmArgs& args, Regime regime = Regime::kAuto);
  void sddmm_update(const SddmmUpdateArgs& args, Regime regime = Regime::kAuto);

  const ParallelFor& threads() const { return threads_; }
  int64_t workspace_bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  template <class Args>
  void run(Operation operation, const Args& args, int64_t batch, Regime regime,
           void (*kernel)(const Args&, const Plan&, const CpuResources&));

  ParallelFor threads_;
  Gemm gemm_;
  std::unique_ptr<void, Free> workspace_;
  int64_t bytes_ = 0;
};

}  // namespace snack::cpu
