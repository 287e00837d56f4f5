#include "snack/kernels/exchange.hpp"

#include "../kernels/exchange_lists.hpp"

namespace snack::reference {
namespace {

struct Lists {
  ParallelFor runner = serial();
  static std::vector<int64_t> select_smallest(const SelectArgs& args) { return reference::select_smallest(args); }
  static Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key) { return reference::grow_uniform(empty, k, key); }
  static Positions grow_gradient(const GrowGradientArgs& args) { return reference::grow_gradient(args); }
  static RewireResult rewire(const RewireArgs& args) { return reference::rewire(args); }
};

}  // namespace

ExchangeResult exchange(const ExchangeArgs& args) { return exchange_lists(args, Lists{}); }

}  // namespace snack::reference
