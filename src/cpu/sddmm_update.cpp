#include "snack/kernels/sddmm_update.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "isa.hpp"
#include "panel.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

// values and states of slots [begin, end), whose gradients begin at `gradient`. The rule comes by value: a reference could point into
// the values, and would be read again after every slot.
template <class T, class Rule, class A>
void apply(const SddmmUpdateArgs& args, const Rule rule, int64_t begin, int64_t end, const A* __restrict gradient) {
  T* __restrict values = static_cast<T*>(args.values) + begin;
  T* __restrict first = Rule::kStates > 0 ? static_cast<T*>(args.state[0]) + begin : nullptr;
  T* __restrict second = Rule::kStates > 1 ? static_cast<T*>(args.state[1]) + begin : nullptr;
  for (int64_t k = 0; k < end - begin; ++k) {
    A state[2] = {};
    if constexpr (Rule::kStates > 0) state[0] = A(first[k]);
    if constexpr (Rule::kStates > 1) state[1] = A(second[k]);
    values[k] = T(rule(A(values[k]), gradient[k], state));
    if constexpr (Rule::kStates > 0) first[k] = T(state[0]);
    if constexpr (Rule::kStates > 1) second[k] = T(state[1]);
  }
}

// Every worker owns a range of slots. The gradients of a few slots at a time stay in its cache; a batch of several blocks is the
// exception, whose gradients wait in the workspace for the last block.
template <class A, class Apply>
void stream(const SddmmUpdateArgs& args, const Plan& plan, const CpuResources& resources, const Apply& apply) {
  const Geometry& g = args.pattern.geometry;
  const IsaKernels<A>& k = kernels<A>();
  const int threads = resources.parallel.threads;
  const int64_t batch = args.x.rows, workers = stream_workers(g, plan.batch_block, batch, threads);
  const bool is_private = has_private_blocks(g.in + g.out, plan.batch_block, sizeof(A), threads), is_one_block = batch <= plan.batch_block;
  Arena arena(resources.workspace);
  std::vector<std::pair<A*, A*>> blocks(is_private ? workers : 1);
  for (auto& [dyt, xt] : blocks) {
    dyt = arena.take<A>(g.out * plan.batch_block);
    xt = arena.take<A>(g.in * plan.batch_block);
  }
  std::vector<A*> gradients(workers);
  A* all = is_one_block ? nullptr : arena.take<A>(g.nnz);
  for (int64_t w = 0; w < workers; ++w) gradients[w] = is_one_block ? arena.take<A>(kUpdateSlots) : all + g.nnz * w / workers;

  for (int64_t b0 = 0; b0 == 0 || b0 < batch; b0 += plan.batch_block) {
    const int64_t count = std::min(plan.batch_block, batch - b0);
    const int width = block_width(count);
    if (!is_private)
      parallel_for(resources.parallel, workers, [&](int64_t w) {
        k.load_block(args.dy, b0, count, width, g.out * w / workers, g.out * (w + 1) / workers, blocks[0].first);
        k.load_block(args.x, b0, count, width, g.in * w / workers, g.in * (w + 1) / workers, blocks[0].second);
      });
    parallel_for(resources.parallel, workers, [&](int64_t w) {
      const auto [dyt, xt] = blocks[is_private ? w : 0];
      const A* dy = is_private ? load_or_point<A>(args.dy, b0, count, dyt) : dyt;
      const A* x = is_private ? load_or_point<A>(args.x, b0, count, xt) : xt;
      const int64_t first = g.nnz * w / workers, last = g.nnz * (w + 1) / workers, step = is_one_block ? kUpdateSlots : last - first;
      for (int64_t begin = first; begin < last; begin += step) {
        const int64_t end = std::min(last, begin + step);
        k.sddmm_slots(args.pattern, width, dy, x, gradients[w] - begin, begin, end, b0 > 0);  // it counts from slot 0
        if (b0 + count >= batch) apply(begin, end, gradients[w]);
      }
    });
  }
}

}  // namespace

void sddmm_update(const SddmmUpdateArgs& args, const Plan& plan, const CpuResources& resources) {
  snack::check(args);
  check({Operation::kSddmmUpdate, args.pattern.geometry, args.x.rows, args.dtype}, plan, resources);
  if (args.pattern.geometry.nnz == 0) return;
  with_type(args.dtype, [&](auto element) {
    using T = decltype(element);
    using A = Accumulator<T>;
    with_rule<A>(args, [&](auto rule) {
      rule.read(args.lr, args.step);
      stream<A>(args, plan, resources,
                [&](int64_t begin, int64_t end, const A* gradient) { apply<T>(args, rule, begin, end, gradient); });
    });
  });
}

}  // namespace snack::cpu
