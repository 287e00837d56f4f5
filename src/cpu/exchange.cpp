#include "snack/kernels/exchange.hpp"

#include "../kernels/exchange_lists.hpp"

namespace snack::cpu {
namespace {

struct Lists {
  const Gemm& gemm;
  const ParallelFor& runner;
  static std::vector<int64_t> select_smallest(const SelectArgs& args) { return cpu::select_smallest(args); }
  static Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key) { return cpu::grow_uniform(empty, k, key); }
  Positions grow_gradient(const GrowGradientArgs& args) const { return cpu::grow_gradient(args, gemm, runner); }
  RewireResult rewire(const RewireArgs& args) const { return cpu::rewire(args, runner); }
};

}  // namespace

ExchangeResult exchange(const ExchangeArgs& args, const Gemm& gemm, const ParallelFor& runner) {
  return exchange_lists(args, Lists{gemm, runner});
}

}  // namespace snack::cpu
