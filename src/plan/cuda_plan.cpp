// The CUDA plan: how many thread blocks share a product, and how. Block counts aim at a few blocks a multiprocessor, which
// is what hides latency; partial sums that different blocks make are added in a fixed order, so results repeat bit for bit.
#include <algorithm>

#include "cuda_layout.hpp"
#include "snack/core/error.hpp"
#include "snack/plan/plan.hpp"

namespace snack {
namespace {

using namespace cuda;

// Largest chunk of the batch, a multiple of `width`, whose workspace stays below kWorkspaceBytes and whose launch stays
// within CUDA's grid; one width at least.
int64_t chunk_of(int64_t batch, int64_t width, int64_t bytes_a_column, int64_t blocks_a_width) {
  constexpr int64_t kGrid = (int64_t{1} << 31) - 1;
  const int64_t by_grid = std::max<int64_t>(1, kGrid / std::max<int64_t>(1, blocks_a_width)) * width;
  const int64_t by_bytes = bytes_a_column == 0 ? by_grid : std::max<int64_t>(1, kWorkspaceBytes / bytes_a_column / width) * width;
  return std::max<int64_t>(1, std::min({batch, by_grid, by_bytes}));
}

// Strips a block takes at a time: the fewest with which all blocks are resident at once as far as registers go, so that none
// waits for a second turn. (Where shared memory is small, fewer fit.)
int64_t fewest_strips(const Geometry& g, int64_t blocks_a_run, int64_t places) {
  int64_t strips = 1;
  while (strips < kMaxStrips && ceil_div(g.strips(), strips) * blocks_a_run > places) ++strips;
  return strips;
}

void plan_spmm(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.kernel = "spmm_stream";
  plan.threads = kThreads;
  plan.batch_block = stream_width(p.batch, kWidestWindow);
  const int64_t panels = std::max<int64_t>(1, g.panels()), widths = ceil_div(std::max<int64_t>(1, p.batch), plan.batch_block);
  const int64_t wanted = spmm_resident(plan.batch_block) * int64_t{card.multiprocessors};
  plan.strips = fewest_strips(g, panels * std::min(widths, wanted), wanted);
  const int64_t runs = std::max<int64_t>(1, ceil_div(g.strips(), plan.strips));
  const int64_t panels_a_block = std::clamp<int64_t>(panels * runs * std::min(widths, wanted) / wanted, 1, panels);
  plan.splits = ceil_div(panels, panels_a_block);
  const int64_t column = plan.splits == 1 ? 0 : plan.splits * g.out * 4;
  plan.batch_chunk = chunk_of(p.batch, plan.batch_block, column, runs * plan.splits);
  plan.workspace_bytes = column * plan.batch_chunk;
}

void plan_spmm_t(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.kernel = "spmm_t_stream";
  plan.batch_block = stream_width(p.batch, 4);
  const int64_t staged = spmm_t_shared(plan.batch_block, 0), a_warp = spmm_t_shared(plan.batch_block, 32) - staged;
  const int64_t warps = plan.batch_block == 1 ? 8 : std::clamp<int64_t>((card.shared_bytes - staged) / a_warp, 1, 12);
  plan.threads = int(32 * warps);
  const int64_t resident = std::max<int64_t>(1, card.shared_bytes / spmm_t_shared(plan.batch_block, plan.threads));
  const int64_t widths = ceil_div(std::max<int64_t>(1, p.batch), plan.batch_block);
  const int64_t blocks = std::max<int64_t>(1, g.panels()) * widths;
  plan.splits = std::clamp<int64_t>(card.multiprocessors * resident / blocks, 1, std::max<int64_t>(1, g.strips()));
  plan.strips = std::max<int64_t>(1, ceil_div(g.strips(), plan.splits));
  plan.splits = std::max<int64_t>(1, ceil_div(g.strips(), plan.strips));
  const int64_t column = plan.splits == 1 ? 0 : plan.splits * g.in * 4;
  plan.batch_chunk = chunk_of(p.batch, plan.batch_block, column, g.panels() * plan.splits);
  plan.workspace_bytes = column * plan.batch_chunk;
}

// One pass over the pattern: more batch columns than a window holds are read from L2, which costs less than staging them again.
void plan_sddmm(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.kernel = "sddmm_stream";
  plan.threads = kThreads;
  plan.batch_block = stream_width(p.batch, kWidestWindow);
  plan.strips = fewest_strips(g, g.panels(), sddmm_resident(plan.batch_block) * int64_t{card.multiprocessors});
  plan.batch_chunk = p.batch;
}

// Tall patterns, sddmm of many columns and the coo baseline: one thread a slot (and sample).
void plan_slots(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.threads = kThreads;
  plan.splits = std::clamp<int64_t>(16 * int64_t{card.multiprocessors} / std::max<int64_t>(1, g.tiles()), 1,
                                    std::max<int64_t>(1, ceil_div(g.nnz, kThreads)));
  plan.batch_chunk = plan.batch_block = std::max<int64_t>(1, p.batch);
  if (plan.regime == Regime::kCoo) plan.reason = "the paper's mapping, a baseline: one thread a connection and sample, atomics";
  else plan.reason = "one thread a connection, operands read from L2";
  if (p.operation == Operation::kSddmm) {
    plan.kernel = "sddmm_slots";
    return;
  }
  const int64_t features = p.operation == Operation::kSpmm ? g.out : g.in;
  if (plan.regime == Regime::kCoo) {
    plan.kernel = p.operation == Operation::kSpmm ? "spmm_coo" : "spmm_t_coo";
    const int64_t column = p.dtype == DType::kFloat32 ? 0 : 4 * features;
    plan.batch_chunk = plan.batch_block = chunk_of(p.batch, 1, column, g.tiles() * plan.splits);
    plan.workspace_bytes = column * plan.batch_chunk;
    return;
  }
  plan.kernel = p.operation == Operation::kSpmm ? "spmm_fixed" : "spmm_t_fixed";
  plan.batch_chunk = plan.batch_block = chunk_of(p.batch, 1, 16 * features, 1);
  plan.workspace_bytes = fixed_workspace(plan.batch_chunk * features);
  plan.reason = "too sparse for tiles: one thread a connection, sums in fixed point";
}

}  // namespace

Plan make_cuda_plan(const Problem& p, Regime requested, const CudaCapability& card) {
  const Geometry& g = p.geometry;
  SNACK_CHECK(requested == Regime::kAuto || requested == Regime::kStream || requested == Regime::kCoo, name(p.operation),
              ": CUDA has no regime '", name(requested), "'; use 'auto', 'stream' or 'coo'.");
  SNACK_CHECK(p.dtype != DType::kFloat64, name(p.operation), ": float64 has no CUDA kernel; use float32, float16 or bfloat16, or the CPU.");
  SNACK_CHECK(p.batch >= 0 && double(p.batch) * double(std::max<int64_t>(1, std::max(g.in, g.out))) < 0x1p58, name(p.operation),
              ": batch ", p.batch, " is negative or too large for features of ", std::max(g.in, g.out), "; split it.");
  SNACK_CHECK(card.multiprocessors > 0 && card.shared_bytes >= 48 * 1024, name(p.operation),
              ": the capability names no card; ask snack::cuda::capability(device).");
  Plan plan;
  plan.regime = requested == Regime::kCoo ? Regime::kCoo : Regime::kStream;
  plan.floor_bytes = double(g.nnz) * double(size_of(p.dtype) + index_bytes(g.packing));
  plan.reason = "every connection is read once a batch block";
  const bool many_columns = p.operation == Operation::kSddmm && p.batch > kWidestWindow;
  if (plan.regime == Regime::kCoo || g.packing == Packing::kTall || many_columns) plan_slots(p, card, plan);
  else if (p.operation == Operation::kSpmm) plan_spmm(p, card, plan);
  else if (p.operation == Operation::kSpmmT) plan_spmm_t(p, card, plan);
  else plan_sddmm(p, card, plan);
  return plan;
}

}  // namespace snack
