#include "snack/kernels/sddmm.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "isa.hpp"
#include "panel.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

// Every worker owns a range of slots and goes through all batch blocks; with private blocks it waits for nobody.
template <class A>
void stream(const SddmmArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  const IsaKernels<A>& k = kernels<A>();
  const int threads = resources.parallel.threads;
  const int64_t batch = args.x.rows, workers = stream_workers(g, plan.batch_block, batch, threads);
  const bool is_private = has_private_blocks(g.in + g.out, plan.batch_block, sizeof(A), threads);
  Arena arena(resources.workspace);
  std::vector<std::pair<A*, A*>> blocks(is_private ? workers : 1);
  for (auto& [dyt, xt] : blocks) {
    dyt = arena.take<A>(g.out * plan.batch_block);
    xt = arena.take<A>(g.in * plan.batch_block);
  }
  const bool is_narrow_type = size_of(args.dtype) != sizeof(A);
  A* dvalues = is_narrow_type ? arena.take<A>(g.nnz) : static_cast<A*>(args.dvalues);
  const auto slots_of_block = [&](int64_t worker, int64_t b0, int64_t count, const A* dy, const A* x) {
    k.sddmm_slots(args.pattern, block_width(count), dy, x, dvalues, g.nnz * worker / workers, g.nnz * (worker + 1) / workers, b0 > 0);
  };
  const auto count_at = [&](int64_t b0) { return std::min(plan.batch_block, batch - b0); };

  if (is_private) {
    parallel_for(resources.parallel, workers, [&](int64_t worker) {
      for (int64_t b0 = 0; b0 < batch; b0 += plan.batch_block) {
        const A* dy = load_or_point<A>(args.dy, b0, count_at(b0), blocks[worker].first);
        const A* x = load_or_point<A>(args.x, b0, count_at(b0), blocks[worker].second);
        slots_of_block(worker, b0, count_at(b0), dy, x);
      }
    });
  } else {
    const auto [dyt, xt] = blocks[0];
    for (int64_t b0 = 0; b0 < batch; b0 += plan.batch_block) {
      const int width = block_width(count_at(b0));
      parallel_for(resources.parallel, workers, [&](int64_t worker) {
        k.load_block(args.dy, b0, count_at(b0), width, g.out * worker / workers, g.out * (worker + 1) / workers, dyt);
        k.load_block(args.x, b0, count_at(b0), width, g.in * worker / workers, g.in * (worker + 1) / workers, xt);
      });
      parallel_for(resources.parallel, workers, [&](int64_t worker) { slots_of_block(worker, b0, count_at(b0), dyt, xt); });
    }
  }
  if (is_narrow_type) k.from_accumulator(dvalues, g.nnz, args.dtype, args.dvalues);
}

// Rows of dy^T x panel by panel; the pattern picks its positions.
template <class A>
void panels(const SddmmArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  Arena arena(resources.workspace);
  A* product = arena.take<A>(plan.panel_rows * g.in);
  const DenseOperand<A> dy = dense_operand<A>(args.dy, arena, resources.parallel);
  const DenseOperand<A> x = dense_operand<A>(args.x, arena, resources.parallel);
  for (int64_t r0 = 0; r0 < g.out; r0 += plan.panel_rows) {
    const int64_t rows = std::min(plan.panel_rows, g.out - r0);
    resources.gemm({.dtype = ElementTraits<A>::dtype, .m = rows, .n = g.in, .k = args.x.rows,
                    .a = dy.data + r0 * dy.col_stride, .a_row_stride = dy.col_stride, .a_col_stride = dy.row_stride,
                    .b = x.data, .b_row_stride = x.row_stride, .b_col_stride = x.col_stride, .c = product,
                    .c_row_stride = g.in});
    gather_rows<A>(args.pattern, r0, rows, product, args.dtype, args.dvalues, resources.parallel);
  }
}

}  // namespace

void sddmm(const SddmmArgs& args, const Plan& plan, const CpuResources& resources) {
  snack::check(args);
  check({Operation::kSddmm, args.pattern.geometry, args.x.rows, args.dtype}, plan, resources);
  if (args.pattern.geometry.nnz == 0) return;
  if (args.x.rows == 0) {
    std::memset(args.dvalues, 0, size_t(args.pattern.geometry.nnz * size_of(args.dtype)));
    return;
  }
  const bool is_panel = plan.regime == Regime::kPanel;
  if (args.dtype == DType::kFloat64) is_panel ? panels<double>(args, plan, resources) : stream<double>(args, plan, resources);
  else is_panel ? panels<float>(args, plan, resources) : stream<float>(args, plan, resources);
}

}  // namespace snack::cpu
