// The CUDA plan: which kernel, how many thread blocks share a product, and how. Block counts aim at a few blocks a multiprocessor, which
// is what hides latency; partial sums that different blocks make are added in a fixed order, so results repeat bit for bit.
#include <algorithm>
#include <limits>

#include "cuda_layout.hpp"
#include "snack/core/error.hpp"
#include "snack/plan/costs.hpp"

namespace snack {
namespace {

using namespace cuda;

// sddmm and sddmm_update: the same kernels, which store the gradient or use it.
bool is_sampled(const Problem& p) { return p.operation == Operation::kSddmm || p.operation == Operation::kSddmmUpdate; }

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

// The widest window of x that a lane reads at once: 16 bytes a column.
int rows_width(int64_t batch, DType dtype) {
  const int widest = dtype == DType::kFloat32 ? 4 : 8;
  int width = 1;
  while (width < widest && width < batch) width *= 2;
  return width;
}

// Whether the pattern and its values are more than this share of the L2 cache.
bool are_more_than(double share, const Problem& p, const CudaCapability& card) {
  return double(p.geometry.nnz) * double(index_bytes(p.geometry.packing) + size_of(p.dtype)) > share * double(card.l2_bytes);
}

// One block a place on the card, each with all panels of x where they fit. A team has about as many lanes as a segment has
// chunks of eight slots, and more groups of them, one a panel, while the block has threads to spare.
void plan_spmm_rows(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  const int64_t bytes = size_of(p.dtype), batch = std::max<int64_t>(1, p.batch);
  const int width = rows_width(batch, p.dtype);
  plan.kernel = "spmm_rows";
  plan.batch_block = width;
  const int64_t chunks = g.nnz / std::max<int64_t>(1, 8 * g.segments()) + 1, widths = ceil_div(batch, width);
  // A second block a multiprocessor hides more latency and costs a second copy of x; it pays where there is much to read.
  const int64_t many = are_more_than(kL2Whole, p, card) ? kManyFarChunks : bytes == 2 ? kManyHalfChunks : kManyChunks;
  int64_t resident = chunks >= many ? rows_resident(width) : 1;
  const auto fitting = [&] {
    const int64_t room = (card.shared_bytes - kTableBytes) / resident - 2048;  // 2 KiB: what is static, and the system's
    return std::max<int64_t>(1, room / (int64_t{kPanelCols} << log2_column(bytes, width)) - 1);
  };
  if (fitting() < g.panels()) resident = 1;
  const int64_t places = card.multiprocessors * resident;
  plan.splits = ceil_div(g.panels(), std::min(g.panels(), fitting()));
  plan.splits = std::clamp<int64_t>(places / std::max<int64_t>(1, g.out * widths), plan.splits, g.panels());  // very few rows
  plan.splits = ceil_div(g.panels(), ceil_div(g.panels(), plan.splits));
  const int64_t panels = ceil_div(g.panels(), plan.splits);
  const int64_t left = card.shared_bytes / resident - 2048 - rows_shared(bytes, width, panels, 0);  // at least a block's part of kTableBytes
  plan.rows = std::clamp<int64_t>(ceil_div(g.out * plan.splits, places), 1, left / (8 * panels));

  // As many lanes as the segment has chunks, or half of that where the rounds of a block would end on idle teams.
  const auto busy = [&](int64_t lanes) {
    const int64_t teams = kRowsThreads / lanes;
    return double(plan.rows) / double(ceil_div(plan.rows, teams) * std::min(teams, plan.rows));
  };
  plan.lanes = plan.groups = 1;
  while (plan.lanes < 32 && plan.lanes < chunks) plan.lanes *= 2;
  if (plan.lanes > 1 && busy(plan.lanes) < 0.8 && busy(plan.lanes / 2) > busy(plan.lanes)) plan.lanes /= 2;
  const auto team = [&] { return int64_t{plan.lanes} * plan.groups; };
  while (team() < 32 && 2 * plan.groups <= panels && 2 * team() * plan.rows <= kRowsThreads) plan.groups *= 2;
  plan.threads = int(std::clamp<int64_t>(ceil_div(plan.rows * team(), 32) * 32, 64, kRowsThreads));
  const int64_t column = plan.splits == 1 ? 0 : plan.splits * g.out * 4;
  plan.batch_chunk = chunk_of(p.batch, width, column, ceil_div(g.out, plan.rows) * plan.splits);
  plan.workspace_bytes = column * plan.batch_chunk;
  plan.evict_first = batch <= width && are_more_than(kL2Whole, p, card);
  plan.reason = "every row is one team's, all of x lies in shared memory";
}

// spmm_batch needs rows for its blocks to share.
bool has_batch_rows(const Geometry& g) { return g.has_row_starts() && g.panels() <= 4 * g.out; }

// Lines of 128 bytes, or less where the batch is narrow. A block has as many rows as make whole turns of one block a
// multiprocessor, if the panels of x are read from shared memory or all fits into one turn; else blocks are small, and several share
// a multiprocessor. Where threads are left, groups share the panels, and parts the slots.
void plan_spmm_batch(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  const int64_t bytes = size_of(p.dtype), column = panel_bytes(bytes) * g.panels(), narrowest = bytes == 4 ? 4 : 2;
  plan.kernel = "spmm_batch";
  plan.reason = "lanes hold vectors of the batch, every row is one team's";
  plan.lanes = 8;
  const auto columns = [&](int lanes) { return lanes * 16 / bytes; };
  while (plan.lanes > narrowest && (columns(plan.lanes / 2) >= p.batch || columns(plan.lanes) * column > kWorkspaceBytes)) plan.lanes /= 2;
  plan.batch_block = columns(plan.lanes);
  const int64_t line_bytes = plan.batch_block * bytes;
  plan.batch_chunk = chunk_of(p.batch, plan.batch_block, column, std::max(ceil_div(g.out, 4), kPanelTiles * g.panels()));
  const int64_t launches = ceil_div(p.batch, plan.batch_chunk);  // alike, so that none ends on a small rest
  plan.batch_chunk = std::min(p.batch, ceil_div(ceil_div(p.batch, launches), plan.batch_block) * plan.batch_block);
  const int64_t chunks = ceil_div(plan.batch_chunk, plan.batch_block);
  plan.workspace_bytes = chunks * plan.batch_block * column;

  int64_t turns = 1;
  const auto rows = [&](int lanes) {
    const int64_t most = kBatchThreads / lanes, unit = 32 / lanes;
    turns = ceil_div(chunks * ceil_div(g.out, most), card.multiprocessors);
    return ceil_div(ceil_div(g.out, std::max<int64_t>(1, turns * card.multiprocessors / chunks)), unit) * unit;
  };
  const auto fits = [&](int64_t windows) {
    return batch_shared(line_bytes, plan.batch_block, 0, 0, windows) + 2048 <= card.shared_bytes;
  };
  bool is_staged = plan.lanes == 2;
  // Two vectors a lane, where a block reads every line of a panel's window about four times.
  if (plan.lanes == 8 && p.batch > plan.batch_block && fits(1) && rows(4) * (g.nnz / g.segments()) >= 4 * kPanelCols)
    is_staged = true, plan.lanes = 4;
  plan.rows = rows(plan.lanes);
  if (!is_staged && turns > 1) plan.rows = kThreads / plan.lanes;
  const int64_t room = turns > 1 ? 1 : kBatchThreads / (plan.rows * plan.lanes);
  const bool is_list = plan.lanes == 8;
  plan.groups = int(std::clamp<int64_t>(room, 1, std::min<int64_t>(is_list ? ceil_div(g.panels(), kListPanels) : g.panels(), kBatchGroups)));
  while (is_staged && plan.groups > 1 && !fits(plan.groups)) --plan.groups;
  const int64_t panels = ceil_div(g.panels(), plan.groups);
  plan.groups = int(ceil_div(g.panels(), panels));
  if (is_staged) plan.windows = panels > 1 && fits(2 * plan.groups) ? 2 : 1;
  while (2 * plan.parts * plan.groups <= room && 2 * kBatchStep * plan.parts * plan.groups <= g.nnz / g.out) plan.parts *= 2;
  plan.threads = int(plan.rows) * plan.lanes * plan.groups * plan.parts;
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

// As many warps as there is room for column sums, or 16 where a block has few rows: every warp's sums are cleared and added. finish()
// reads kFinishAtOnce partial sums at a time, so there are no more, or about a multiple of it.
void plan_spmm_t_rows(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.kernel = "spmm_t_rows";
  plan.batch_block = p.batch == 2 ? 2 : stream_width(p.batch, 4);
  const int64_t blocks = g.panels() * ceil_div(std::max<int64_t>(1, p.batch), plan.batch_block);
  const int64_t most = std::max<int64_t>(kFinishAtOnce, g.nnz / (kFewestSlots * g.panels()));
  plan.splits = std::clamp<int64_t>(std::min(card.multiprocessors / blocks, most), 1, ceil_div(g.out, 16));
  if (plan.splits > kFinishAtOnce) plan.splits = plan.splits / kFinishAtOnce * kFinishAtOnce;
  plan.rows = ceil_div(g.out, plan.splits);
  plan.splits = ceil_div(g.out, plan.rows);
  const int64_t staged = rows_t_shared(plan.batch_block, 0), a_warp = rows_t_shared(plan.batch_block, 32) - staged;
  const int64_t room = (card.shared_bytes - 1024 - 4 * (kStagedRows + 1) - staged) / a_warp, wanted = plan.rows <= 256 ? 16 : 32;
  plan.threads = int(32 * std::clamp<int64_t>(std::min(room, wanted), 1, std::min<int64_t>(plan.rows, rows_t_threads(plan.batch_block) / 32)));
  const int64_t mean = g.nnz / g.segments();
  plan.lanes = mean <= 24 ? 32 : mean <= 72 ? 64 : 128;
  const int64_t column = plan.splits == 1 ? 0 : plan.splits * g.in * 4;
  plan.batch_chunk = chunk_of(p.batch, plan.batch_block, column, g.panels() * plan.splits);
  plan.workspace_bytes = column * plan.batch_chunk;
  plan.evict_first = p.batch <= plan.batch_block && are_more_than(kL2Whole, p, card);
  plan.reason = "a warp a row, column sums of its own";
}

// Lines of 32 columns, or 16. A block takes so many strips at a time as shared memory holds with some slots more than they have in
// the mean; blocks have equal shares of a panel's slots.
void plan_spmm_t_batch(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  const int64_t bytes = size_of(p.dtype);
  plan.kernel = "spmm_t_batch";
  plan.reason = "slots are sorted by column in shared memory, every column is one team's";
  plan.batch_block = p.batch > 16 ? 32 : 16;
  const auto fitting = [&](int64_t strips) {  // slots
    const int64_t room = card.shared_bytes / batch_t_resident(plan.batch_block) - 2048;  // 2 KiB: what is static, and the system's
    return (room - batch_t_round(plan.batch_block, bytes, strips, 0)) / sorted_bytes(bytes);
  };
  plan.threads = batch_t_threads(plan.batch_block);
  const int64_t chunks = ceil_div(std::max<int64_t>(1, p.batch), plan.batch_block), places = int64_t{card.multiprocessors} * batch_t_resident(plan.batch_block);
  const int64_t blocks = std::max<int64_t>(1, g.panels()) * chunks, most = std::max<int64_t>(1, g.nnz / (std::max<int64_t>(1, g.panels()) * kFewestSlots));
  plan.splits = std::clamp<int64_t>(places / blocks, 1, most);
  const auto busy = [&](int64_t splits) { return double(blocks * splits) / double(ceil_div(blocks * splits, places) * places) - 0.03 * double(splits); };
  if (plan.splits == 1)  // more blocks than places, or nearly: so many that they end together
    for (int64_t splits = 2; splits <= std::min<int64_t>(4, most); ++splits)
      if (busy(splits) > busy(plan.splits)) plan.splits = splits;
  const int64_t mean = ceil_div(g.nnz, std::max<int64_t>(1, g.panels() * g.strips()));
  plan.strips = std::clamp<int64_t>(ceil_div(g.strips(), plan.splits), 1, kBatchStrips);
  while (plan.strips > 1 && fitting(plan.strips) < plan.strips * (mean + mean / 16 + 64)) --plan.strips;
  plan.slots = std::min<int64_t>(fitting(plan.strips), 65535 - kPanelCols);  // places in 16 bits
  const int64_t column = plan.splits == 1 ? 0 : plan.splits * g.in * 4;
  plan.batch_chunk = chunk_of(p.batch, plan.batch_block, column, g.panels() * plan.splits);
  plan.workspace_bytes = column * plan.batch_chunk;
}

// Lines of 32 columns, or 16; one block a multiprocessor, with equal shares of the slots.
void plan_sddmm_batch(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  const int64_t bytes = size_of(p.dtype);
  plan.kernel = "sddmm_batch";
  plan.reason = "lanes hold vectors of the batch, equal shares of the slots";
  plan.threads = kSddmmBatchThreads;
  plan.batch_block = p.batch > 16 ? 32 : 16;
  const auto fitting = [&] { return (card.shared_bytes - 2048 - sddmm_batch_shared(plan.batch_block, bytes, 0)) / 4; };
  if (fitting() < kPanelCols) plan.batch_block = 16;
  plan.slots = p.batch <= plan.batch_block ? 0 : fitting();
  plan.batch_chunk = p.batch;
  const int64_t panels = std::max<int64_t>(1, g.panels());
  plan.splits = std::clamp<int64_t>(card.multiprocessors / panels, 1, std::max<int64_t>(1, g.nnz / (panels * kSddmmBatchThreads)));
}

// One pass over the pattern.
void plan_sddmm(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.kernel = "sddmm_stream";
  plan.threads = kThreads;
  plan.batch_block = stream_width(p.batch, kWidestWindow);
  plan.strips = fewest_strips(g, g.panels(), sddmm_resident(plan.batch_block) * int64_t{card.multiprocessors});
  plan.batch_chunk = p.batch;
}

// Two blocks a multiprocessor, with equal shares of the slots.
void plan_sddmm_chunks(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.kernel = "sddmm_chunks";
  plan.threads = kChunkThreads;
  plan.batch_chunk = std::max<int64_t>(1, p.batch);
  plan.batch_block = rows_width(plan.batch_chunk, p.dtype);
  const int64_t a_block = 2 * kChunkThreads;  // slots, or fewer are not worth a block
  plan.splits = std::clamp<int64_t>(2 * int64_t{card.multiprocessors} / g.panels(), 1, ceil_div(g.nnz, g.panels() * a_block));
  plan.evict_first = p.operation == Operation::kSddmmUpdate && are_more_than(kL2Whole, p, card) && !are_more_than(kL2Rewritten, p, card);
  plan.reason = "eight slots a thread at a time, equal shares of the slots";
}

// Tall patterns and the coo baseline: one thread a slot (and sample).
void plan_slots(const Problem& p, const CudaCapability& card, Plan& plan) {
  const Geometry& g = p.geometry;
  plan.threads = kThreads;
  plan.splits = std::clamp<int64_t>(16 * int64_t{card.multiprocessors} / std::max<int64_t>(1, g.tiles()), 1,
                                    std::max<int64_t>(1, ceil_div(g.nnz, kThreads)));
  plan.batch_chunk = plan.batch_block = std::max<int64_t>(1, p.batch);
  if (plan.regime == Regime::kCoo) plan.reason = "the paper's mapping, a baseline: one thread a connection and sample, atomics";
  else plan.reason = "one thread a connection, operands read from L2";
  if (is_sampled(p)) {
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

// ---- who can serve what ----

bool is_narrow(const Problem& p) { return p.geometry.packing == Packing::kNarrow; }
bool is_tall(const Problem& p) { return !is_narrow(p); }
bool always(const Problem&) { return true; }
bool has_rows(const Problem& p) { return p.geometry.has_row_starts() && p.geometry.nnz <= kMaxRowsSlots; }
bool has_segments(const Problem& p) { return p.geometry.has_row_starts(); }
bool has_batch(const Problem& p) { return has_rows(p) && has_batch_rows(p.geometry) && p.batch > 4; }  // lines of 16 columns and more
bool has_lines(const Problem& p) { return is_narrow(p) && p.batch > 4; }
bool has_window(const Problem& p) { return is_narrow(p) && p.batch <= kWidestWindow; }
bool has_chunks(const Problem& p) { return has_rows(p) && p.batch <= (p.dtype == DType::kFloat32 ? 4 : 8); }

struct Maker {
  std::string_view kernel;
  Operation operation;
  Regime regime;
  bool (*can_serve)(const Problem&);
  void (*make)(const Problem&, const CudaCapability&, Plan&);
};

constexpr Maker kMakers[] = {
    {"spmm_rows", Operation::kSpmm, Regime::kStream, has_rows, plan_spmm_rows},
    {"spmm_batch", Operation::kSpmm, Regime::kStream, has_batch, plan_spmm_batch},
    {"spmm_stream", Operation::kSpmm, Regime::kStream, is_narrow, plan_spmm},
    {"spmm_fixed", Operation::kSpmm, Regime::kStream, is_tall, plan_slots},
    {"spmm_coo", Operation::kSpmm, Regime::kCoo, always, plan_slots},
    {"spmm_t_rows", Operation::kSpmmT, Regime::kStream, has_segments, plan_spmm_t_rows},
    {"spmm_t_batch", Operation::kSpmmT, Regime::kStream, has_lines, plan_spmm_t_batch},
    {"spmm_t_stream", Operation::kSpmmT, Regime::kStream, is_narrow, plan_spmm_t},
    {"spmm_t_fixed", Operation::kSpmmT, Regime::kStream, is_tall, plan_slots},
    {"spmm_t_coo", Operation::kSpmmT, Regime::kCoo, always, plan_slots},
    {"sddmm_chunks", Operation::kSddmm, Regime::kStream, has_chunks, plan_sddmm_chunks},
    {"sddmm_batch", Operation::kSddmm, Regime::kStream, has_lines, plan_sddmm_batch},
    {"sddmm_stream", Operation::kSddmm, Regime::kStream, has_window, plan_sddmm},
    {"sddmm_slots", Operation::kSddmm, Regime::kStream, is_tall, plan_slots},
    {"sddmm_slots", Operation::kSddmm, Regime::kCoo, always, plan_slots},
};

void check(const Problem& p, Regime requested, const CudaCapability& card) {
  const Geometry& g = p.geometry;
  SNACK_CHECK(requested == Regime::kAuto || requested == Regime::kStream || requested == Regime::kCoo, name(p.operation),
              ": CUDA has no regime '", name(requested), "'; use 'auto', 'stream' or 'coo'.");
  SNACK_CHECK(p.dtype != DType::kFloat64, name(p.operation), ": float64 has no CUDA kernel; use float32, float16 or bfloat16, or the CPU.");
  SNACK_CHECK(p.batch >= 0 && double(p.batch) * double(std::max<int64_t>(1, std::max(g.in, g.out))) < 0x1p58, name(p.operation),
              ": batch ", p.batch, " is negative or too large for features of ", std::max(g.in, g.out), "; split it.");
  SNACK_CHECK(card.multiprocessors > 0 && card.shared_bytes >= kLeastShared, name(p.operation),
              ": the capability names no card; ask snack::cuda::capability(device).");
}

// Calls f(maker) for every kernel of the regime that can serve.
template <class F>
void for_makers(const Problem& p, Regime requested, F&& f) {
  const Regime regime = requested == Regime::kCoo ? Regime::kCoo : Regime::kStream;
  const Operation operation = is_sampled(p) ? Operation::kSddmm : p.operation;  // sddmm_update has the kernels of sddmm
  for (const Maker& maker : kMakers)
    if (maker.operation == operation && maker.regime == regime && maker.can_serve(p)) f(maker);
}

Plan made(const Maker& maker, const Problem& p, const CudaCapability& card) {
  Plan plan;
  plan.regime = maker.regime;
  plan.floor_bytes = double(p.geometry.nnz) * double(size_of(p.dtype) + index_bytes(p.geometry.packing));
  plan.reason = "every connection is read once a batch block";
  maker.make(p, card, plan);
  return plan;
}

}  // namespace

Plan make_cuda_plan(const Problem& p, Regime requested, const CudaCapability& card, std::string_view kernel) {
  check(p, requested, card);
  if (kernel.ends_with("_coo")) requested = Regime::kCoo;
  const Maker *found[std::size(kMakers)], **end = found;
  for_makers(p, requested, [&](const Maker& maker) { if (kernel.empty() || kernel == maker.kernel) *end++ = &maker; });
  SNACK_CHECK(end != found, name(p.operation), ": kernel '", kernel, "' cannot compute this product of ", p.geometry.out, "x", p.geometry.in, " with ",
              p.geometry.nnz, " connections at batch ", p.batch, "; regime 'auto' takes the fastest that can.");
  if (end - found == 1) return made(*found[0], p, card);
  Candidate best{{}, std::numeric_limits<double>::infinity()};
  for (const Maker** maker = found; maker != end; ++maker) {
    Candidate next{made(**maker, p, card)};
    next.predicted_us = predict_us(p, next.plan, card);
    if (maker == found || next.predicted_us < best.predicted_us) best = next;
  }
  return best.plan;
}

std::vector<Candidate> cuda_candidates(const Problem& p, Regime requested, const CudaCapability& card) {
  check(p, requested, card);
  std::vector<Candidate> all;
  for_makers(p, requested, [&](const Maker& maker) {
    all.push_back({made(maker, p, card)});
    all.back().predicted_us = predict_us(p, all.back().plan, card);
  });
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.predicted_us < b.predicted_us; });
  return all;
}

}  // namespace snack
