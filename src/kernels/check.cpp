#include "snack/kernels/check.hpp"

#include <algorithm>

#include "../plan/cpu_layout.hpp"
#include "snack/core/error.hpp"

namespace snack {
namespace {

void check_dtype(DType dtype, const char* operation) {
  SNACK_CHECK(int(dtype) >= 0 && int(dtype) <= int(DType::kFloat64), operation, ": dtype ", int(dtype),
              " does not exist; use one of snack::DType.");
}

void check_pointer(const void* pointer, int64_t elements, const char* operation, const char* what) {
  SNACK_CHECK(pointer != nullptr || elements == 0, operation, ": ", what, " is null, expected ", elements, " elements.");
}

void check_matrix(const MatrixView& m, DType dtype, int64_t features, const char* operation, const char* what) {
  SNACK_CHECK(m.rows >= 0, operation, ": ", what, " has ", m.rows, " rows; the batch cannot be negative.");
  SNACK_CHECK(m.cols == features, operation, ": ", what, " has ", m.cols, " columns, the pattern expects ", features, ".");
  SNACK_CHECK(m.dtype == dtype, operation, ": ", what, " is ", name(m.dtype), " and the values are ", name(dtype),
              "; give both one dtype.");
  SNACK_CHECK(m.data != nullptr || m.rows == 0 || m.cols == 0, operation, ": ", what, " is null, expected ", m.rows, " x ",
              m.cols, " elements.");
}

// rows * features elements, of which there may be more than an int64 counts only if the caller's memory could not hold them.
int64_t elements(int64_t rows, int64_t features) { return rows == 0 || features == 0 ? 0 : rows * features; }

void check_batch(const Geometry& g, int64_t batch, const char* operation) {
  SNACK_CHECK(batch == 0 || std::max(g.out, g.in) <= (int64_t{1} << 58) / batch, operation, ": batch ", batch,
              " is too large for features of ", std::max(g.in, g.out), "; split it.");
}

void check_list(const void* list, int64_t count, const char* operation, const char* what) {
  SNACK_CHECK(count >= 0, operation, ": ", count, " entries of ", what, " were given; the number cannot be negative.");
  check_pointer(list, count, operation, what);
}

}  // namespace

void check(const PatternView& pattern, const char* operation) {
  const Geometry& g = pattern.geometry;
  SNACK_CHECK(g.out >= 0 && g.in >= 0 && g.nnz >= 0, operation, ": the pattern has shape (", g.out, ", ", g.in, ") and ", g.nnz,
              " connections; none of them can be negative.");
  const Geometry expected = make_geometry(g.out, g.in, g.nnz);
  SNACK_CHECK(g.packing == expected.packing, operation, ": the pattern's packing is not that of its shape and ", g.nnz,
              " connections; take the geometry from snack::make_geometry.");
  check_pointer(pattern.index, g.nnz, operation, "the pattern's index");
  check_pointer(pattern.tile_ptr, g.pointer_words(), operation, "the pattern's tile_ptr");
}

void check(const SpmmArgs& args) {
  const Geometry& g = args.pattern.geometry;
  check_dtype(args.dtype, "spmm");
  check(args.pattern, "spmm");
  check_pointer(args.values, g.nnz, "spmm", "values");
  check_matrix(args.x, args.dtype, g.in, "spmm", "x");
  check_batch(g, args.x.rows, "spmm");
  check_pointer(args.y, elements(args.x.rows, g.out), "spmm", "y");
}

void check(const SpmmTArgs& args) {
  const Geometry& g = args.pattern.geometry;
  check_dtype(args.dtype, "spmm_t");
  check(args.pattern, "spmm_t");
  check_pointer(args.values, g.nnz, "spmm_t", "values");
  check_matrix(args.dy, args.dtype, g.out, "spmm_t", "dy");
  check_batch(g, args.dy.rows, "spmm_t");
  check_pointer(args.dx, elements(args.dy.rows, g.in), "spmm_t", "dx");
}

void check(const SddmmArgs& args) {
  const Geometry& g = args.pattern.geometry;
  check_dtype(args.dtype, "sddmm");
  check(args.pattern, "sddmm");
  check_matrix(args.dy, args.dtype, g.out, "sddmm", "dy");
  check_matrix(args.x, args.dtype, g.in, "sddmm", "x");
  SNACK_CHECK(args.dy.rows == args.x.rows, "sddmm: dy has ", args.dy.rows, " rows and x has ", args.x.rows, "; both are the batch.");
  check_batch(g, args.x.rows, "sddmm");
  check_pointer(args.dvalues, g.nnz, "sddmm", "dvalues");
}

void check(const SddmmUpdateArgs& args) {
  constexpr const char* kName = "sddmm_update";
  const Geometry& g = args.pattern.geometry;
  check_dtype(args.dtype, kName);
  check(args.pattern, kName);
  check_pointer(args.values, g.nnz, kName, "values");
  check_matrix(args.dy, args.dtype, g.out, kName, "dy");
  check_matrix(args.x, args.dtype, g.in, kName, "x");
  SNACK_CHECK(args.dy.rows == args.x.rows, kName, ": dy has ", args.dy.rows, " rows and x has ", args.x.rows, "; both are the batch.");
  check_batch(g, args.x.rows, kName);
  SNACK_CHECK(args.rule == Rule::kSgd || args.rule == Rule::kAdamW, kName, ": rule ", int(args.rule), " does not exist; use one of snack::Rule.");
  if (args.rule == Rule::kAdamW) {
    check_pointer(args.state[0], g.nnz, kName, "the average of the gradient");
    check_pointer(args.state[1], g.nnz, kName, "the average of its square");
    SNACK_CHECK(args.step != nullptr || args.adamw.step >= 1, kName, ": step ", args.adamw.step, " was given; steps count from 1.");
  } else if (args.sgd.momentum != 0) {
    check_pointer(args.state[0], g.nnz, kName, "the momentum buffer");
  }
}

void check(const RewireArgs& args) {
  check(args.pattern, "rewire");
  check_list(args.drop, args.drops, "rewire", "drop");
  check_list(args.grow_rows, args.grows, "rewire", "grow_rows");
  check_list(args.grow_cols, args.grows, "rewire", "grow_cols");
}

void check(const SelectArgs& args) {
  check_dtype(args.dtype, "select_smallest");
  SNACK_CHECK(int(args.sign) >= 0 && int(args.sign) <= int(Sign::kNegative), "select_smallest: sign ", int(args.sign),
              " does not exist; use one of snack::Sign.");
  check_list(args.values, args.nnz, "select_smallest", "values");
}

void check(const EmptyPositions& empty, const char* operation) {
  check(empty.pattern, operation);
  check_list(empty.drop, empty.drops, operation, "drop");
}

void check(const GrowGradientArgs& args) {
  const Geometry& g = args.empty.pattern.geometry;
  check(args.empty, "grow_gradient");
  check_dtype(args.x.dtype, "grow_gradient");
  check_matrix(args.dy, args.x.dtype, g.out, "grow_gradient", "dy");
  check_matrix(args.x, args.x.dtype, g.in, "grow_gradient", "x");
  SNACK_CHECK(args.dy.rows == args.x.rows, "grow_gradient: dy has ", args.dy.rows, " rows and x has ", args.x.rows,
              "; both are the batch.");
  check_batch(g, args.x.rows, "grow_gradient");
}

void check(const ExchangeArgs& args) {
  constexpr const char* kName = "exchange_";
  const Geometry& g = args.geometry;
  check(PatternView{g, args.index, args.tile_ptr}, kName);
  SNACK_CHECK(args.carried_count >= 1 && args.carried_count <= kMaxCarried, kName, ": ", args.carried_count,
              " tensors are to be carried, expected the values and at most ", kMaxCarried - 1, " more.");
  check_pointer(args.carried, args.carried_count, kName, "carried");
  check_pointer(args.fills, args.carried_count, kName, "fills");
  for (int64_t i = 0; i < args.carried_count; ++i) {
    SNACK_CHECK(int(args.carried[i].type) >= 0 && int(args.carried[i].type) <= int(CarriedType::kBool), kName, ": carried type ",
                int(args.carried[i].type), " does not exist; use one of snack::CarriedType.");
    check_pointer(args.carried[i].data, g.nnz, kName, "a carried tensor");
  }
  SNACK_CHECK(int(args.carried[0].type) <= int(CarriedType::kFloat64), kName, ": the values, carried[0], are no floating-point numbers.");
  SNACK_CHECK(args.drop_rule == DropRule::kMagnitude || args.drop_rule == DropRule::kSigned, kName, ": drop rule ", int(args.drop_rule),
              " is neither 0 (magnitude) nor 1 (signed).");
  SNACK_CHECK(args.grow_rule == GrowRule::kUniform || args.grow_rule == GrowRule::kGradient, kName, ": grow rule ", int(args.grow_rule),
              " is neither 0 (uniform) nor 1 (gradient).");
  SNACK_CHECK(args.k >= 0 && args.k <= g.nnz, kName, ": k=", args.k, " is outside 0 .. ", g.nnz, ", the number of connections.");
  SNACK_CHECK(args.drop_rule != DropRule::kSigned || (args.fraction >= 0 && args.fraction <= 1), kName, ": fraction=", args.fraction,
              " is outside 0 .. 1.");
  if (args.grow_rule == GrowRule::kUniform) return;
  check_dtype(args.x.dtype, kName);
  check_matrix(args.dy, args.x.dtype, g.out, kName, "dy");
  check_matrix(args.x, args.x.dtype, g.in, kName, "x");
  SNACK_CHECK(args.dy.rows == args.x.rows, kName, ": dy has ", args.dy.rows, " rows and x has ", args.x.rows, "; both are the batch.");
  check_batch(g, args.x.rows, kName);
}

void check_workspace(const char* operation, const void* workspace, int64_t bytes, int64_t needed, int64_t alignment) {
  if (needed == 0) return;
  SNACK_CHECK(workspace != nullptr, operation, ": no workspace was given, the plan needs ", needed, " bytes.");
  SNACK_CHECK(bytes >= needed, operation, ": the workspace has ", bytes, " bytes, the plan needs ", needed,
              " (Plan::workspace_bytes).");
  SNACK_CHECK(reinterpret_cast<uintptr_t>(workspace) % uintptr_t(alignment) == 0, operation, ": the workspace is not aligned to ",
              alignment, " bytes.");
}

namespace cpu {

void check(const Problem& problem, const Plan& plan, const CpuResources& resources) {
  const char* operation = name(problem.operation);
  const int threads = resources.parallel.threads;
  SNACK_CHECK(threads >= 1, operation, ": the runner has ", threads, " threads; give at least 1.");
  SNACK_CHECK(plan.regime == Regime::kStream || plan.regime == Regime::kPanel, operation, ": the plan's regime '",
              name(plan.regime), "' is not one of the CPU's; make the plan with make_cpu_plan.");
  SNACK_CHECK(plan.batch_block > 0 && plan.batch_block == block_width(plan.batch_block), operation, ": the plan has batch blocks of ",
              plan.batch_block, "; make the plan with make_cpu_plan.");
  SNACK_CHECK(plan.regime != Regime::kPanel || resources.gemm, operation,
              ": regime 'panel' needs a dense product (gemm), and none was given; supply it or plan 'stream'.");
  SNACK_CHECK(plan.regime != Regime::kPanel || plan.panel_rows > 0 || problem.geometry.out == 0, operation,
              ": the plan has panels of ", plan.panel_rows, " rows; make the plan with make_cpu_plan.");
  const int64_t needed = workspace_bytes(problem, plan, threads);
  SNACK_CHECK(plan.workspace_bytes >= needed, operation, ": the plan was made for another problem: it asks for ",
              plan.workspace_bytes, " bytes of workspace, this call with batch ", problem.batch, " and ", threads,
              " threads needs ", needed, "; make a plan for it.");
  check_workspace(operation, resources.workspace, resources.workspace_bytes, plan.workspace_bytes, kAlign);
}

}  // namespace cpu
}  // namespace snack
