#include "snack/kernels/sddmm.hpp"

#include <algorithm>
#include <cstring>

#include "isa.hpp"
#include "panel.hpp"

namespace snack::cpu {
namespace {

template <class A>
void stream(const SddmmArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  const IsaKernels<A>& k = kernels<A>();
  const int64_t parts = stream_tasks(g, plan.batch_block, resources.parallel.threads);
  Arena arena(resources.workspace);
  A* dyt = arena.take<A>(g.out * plan.batch_block);
  A* xt = arena.take<A>(g.in * plan.batch_block);
  const bool is_narrow_type = size_of(args.dtype) != sizeof(A);
  A* dvalues = is_narrow_type ? arena.take<A>(g.nnz) : static_cast<A*>(args.dvalues);
  for (int64_t b0 = 0; b0 < args.x.rows; b0 += plan.batch_block) {
    const int64_t count = std::min(plan.batch_block, args.x.rows - b0);
    const int width = block_width(count);
    const A *dy = contiguous_column<A>(args.dy, b0, width), *x = contiguous_column<A>(args.x, b0, width);
    if (dy == nullptr || x == nullptr) {
      parallel_for(resources.parallel, parts, [&](int64_t part) {
        k.load_block(args.dy, b0, count, width, g.out * part / parts, g.out * (part + 1) / parts, dyt);
        k.load_block(args.x, b0, count, width, g.in * part / parts, g.in * (part + 1) / parts, xt);
      });
      dy = dyt;
      x = xt;
    }
    parallel_for(resources.parallel, parts, [&](int64_t part) {
      k.sddmm_slots(args.pattern, width, dy, x, dvalues, g.nnz * part / parts, g.nnz * (part + 1) / parts, b0 > 0);
    });
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
