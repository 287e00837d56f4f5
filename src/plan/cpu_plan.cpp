// The CPU plan. Numbers come from `snack bench cpu` (benchmarks/results/cpu-avx512): a panel pays where the dense
// product's cost per position, shared by the whole batch, is below the stream's cost per connection.
#include <algorithm>

#include "cpu_layout.hpp"
#include "snack/core/error.hpp"
#include "snack/plan/plan.hpp"

namespace snack {
namespace {

using namespace cpu;

// From which density and batch on decoded panels were faster than streaming (2048 x 2048, fp32, AVX-512, two threads).
// spmm_t streams slowest, because its windows are written as well as read.
struct PanelBound {
  double density;
  int64_t batch;
};
constexpr PanelBound kPanelBounds[] = {{0.5, 512}, {0.3, 128}, {0.5, 256}};  // spmm, spmm_t, sddmm

bool panel_pays(const Problem& p, const CpuCapability& capability) {
  const Geometry& g = p.geometry;
  if (p.operation == Operation::kSddmmUpdate) return false;
  const PanelBound bound = kPanelBounds[int(p.operation)];
  return capability.has_gemm && p.batch >= bound.batch && double(g.nnz) > bound.density * double(g.out) * double(g.in);
}

// The widest batch block that pays. Where few connections share a block's transposition, half the width keeps operands and
// result in the L2 cache; spmm_t writes its windows as well as reading them.
int64_t widest_block(const Problem& p) {
  const bool is_sparse = double(p.geometry.nnz) < 0.025 * double(p.geometry.out) * double(p.geometry.in);
  return is_sparse || p.operation == Operation::kSpmmT ? kMaxWidth / 2 : kMaxWidth;
}

int64_t panel_rows(const Geometry& g, int64_t element) {
  const int64_t fit = std::max<int64_t>(1, kPanelBytes / std::max<int64_t>(1, g.in * element));
  const int64_t whole_strips = fit / tile_rows(g.packing) * tile_rows(g.packing);
  return std::min(g.out, whole_strips > 0 ? whole_strips : fit);
}

// Mirrors what the kernels take from their arena.
int64_t stream_workspace(const Problem& p, int64_t block, int64_t element, int threads) {
  const Geometry& g = p.geometry;
  const auto bytes = [&](int64_t features) { return aligned(features * block * element); };
  switch (p.operation) {
    case Operation::kSpmm: {
      const int64_t rows = spmm_rows_at_once(g);
      if (has_private_blocks(g.in + rows, block, element, threads)) return threads * (bytes(g.in) + bytes(rows));
      return bytes(g.in) + bytes(spmm_sum_rows(g, threads));
    }
    case Operation::kSpmmT: {
      const int64_t copies = has_private_blocks(g.out, block, element, threads) ? threads : 1;
      return copies * bytes(g.out) + bytes(max_windows(g, threads) * kTileCols);
    }
    case Operation::kSddmm: {
      const int64_t copies = has_private_blocks(g.in + g.out, block, element, threads) ? threads : 1;
      return copies * (bytes(g.in) + bytes(g.out)) + (size_of(p.dtype) == element ? 0 : aligned(g.nnz * element));
    }
    case Operation::kSddmmUpdate: {
      const int64_t copies = has_private_blocks(g.in + g.out, block, element, threads) ? threads : 1;
      const int64_t gradients = p.batch <= block ? threads * aligned(kUpdateSlots * element) : aligned(g.nnz * element);
      return copies * (bytes(g.in) + bytes(g.out)) + gradients;
    }
  }
  return 0;
}

int64_t panel_workspace(const Problem& p, int64_t rows, int64_t element) {
  const Geometry& g = p.geometry;
  const bool converts = size_of(p.dtype) != element;
  const int64_t operands = aligned(p.batch * g.in * element) + aligned(p.batch * g.out * element);
  return aligned(rows * g.in * element) + (converts ? operands : 0);
}

int64_t accumulator_bytes(DType dtype) { return std::max<int64_t>(4, size_of(dtype)); }

}  // namespace

// The panel regime keeps what the stream regime needs, for products with operands that are not finite.
int64_t cpu::workspace_bytes(const Problem& p, const Plan& plan, int threads) {
  const int64_t element = accumulator_bytes(p.dtype);
  const int64_t stream = stream_workspace(p, plan.batch_block, element, threads);
  return plan.regime == Regime::kPanel ? std::max(stream, panel_workspace(p, plan.panel_rows, element)) : stream;
}

Plan make_cpu_plan(const Problem& p, Regime requested, const CpuCapability& capability) {
  const Geometry& g = p.geometry;
  SNACK_CHECK(requested == Regime::kAuto || requested == Regime::kStream || requested == Regime::kPanel,
              name(p.operation), ": the CPU has no regime '", name(requested), "'; use 'auto', 'stream' or 'panel'.");
  SNACK_CHECK(requested != Regime::kPanel || capability.has_gemm, name(p.operation),
              ": regime 'panel' needs a dense product (gemm), and none was supplied; use 'stream'.");
  SNACK_CHECK(p.batch >= 0, name(p.operation), ": batch ", p.batch, " was given; the batch cannot be negative.");
  SNACK_CHECK(capability.threads >= 1, name(p.operation), ": a plan for ", capability.threads, " threads was asked for; give at least 1.");
  SNACK_CHECK(double(p.batch) * double(std::max<int64_t>(1, std::max(g.in, g.out))) < 0x1p58, name(p.operation), ": batch ", p.batch,
              " is too large for features of ", std::max(g.in, g.out), "; split it.");
  SNACK_CHECK(requested != Regime::kPanel || p.operation != Operation::kSddmmUpdate,
              "sddmm_update: it has no regime 'panel'; use 'auto' or 'stream'.");
  Plan plan;
  plan.floor_bytes = double(g.nnz) * double(size_of(p.dtype) + index_bytes(g.packing));
  const bool is_panel = requested == Regime::kPanel || (requested == Regime::kAuto && panel_pays(p, capability));
  plan.batch_block = block_width(std::min(p.batch, widest_block(p)));
  if (is_panel) {
    plan.regime = Regime::kPanel;
    plan.panel_rows = panel_rows(g, accumulator_bytes(p.dtype));
    plan.reason = requested == Regime::kPanel ? "asked for" : "dense enough for decoded panels and the vendor's product";
  } else {
    plan.regime = Regime::kStream;
    plan.reason = requested == Regime::kStream ? "asked for" : "every connection is read once a batch block";
  }
  plan.workspace_bytes = workspace_bytes(p, plan, capability.threads);
  return plan;
}

}  // namespace snack
