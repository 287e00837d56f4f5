#include "snack/kernels/spmm_t.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.hpp"
#include "panel.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

// A run of slots of one column panel, summed into a window of its own.
struct Piece {
  int64_t panel, slot_begin, slot_end;
};

// Panels cut so that no piece holds much more than nnz / parts slots; at most max_windows() pieces.
std::vector<Piece> cut_panels(const PatternView& pattern, int64_t parts) {
  const Geometry& g = pattern.geometry;
  std::vector<Piece> pieces;
  for (int64_t panel = 0; panel < g.panels(); ++panel) {
    const int64_t begin = pattern.tile_ptr[panel * g.strips()], end = pattern.tile_ptr[(panel + 1) * g.strips()];
    const int64_t cuts = std::max<int64_t>(1, (end - begin) * parts / std::max<int64_t>(1, g.nnz));
    for (int64_t cut = 0; cut < cuts; ++cut)
      pieces.push_back({panel, begin + (end - begin) * cut / cuts, begin + (end - begin) * (cut + 1) / cuts});
  }
  return pieces;
}

// Worker w gets pieces [bounds[w], bounds[w + 1]): those whose middle slot lies in its share of all slots.
std::vector<int64_t> split_pieces(const std::vector<Piece>& pieces, int64_t nnz, int64_t workers) {
  std::vector<int64_t> bounds(workers + 1, 0);
  for (const Piece& piece : pieces) {
    const int64_t middle = (piece.slot_begin + piece.slot_end) / 2;
    ++bounds[std::min(workers - 1, middle * workers / std::max<int64_t>(1, nnz)) + 1];
  }
  for (int64_t worker = 0; worker < workers; ++worker) bounds[worker + 1] += bounds[worker];
  return bounds;
}

template <class A>
void stream(const SpmmTArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  const IsaKernels<A>& k = kernels<A>();
  const int threads = resources.parallel.threads;
  const int64_t workers = stream_workers(g, plan.batch_block, args.dy.rows, threads);
  const std::vector<Piece> pieces = cut_panels(args.pattern, workers);
  const std::vector<int64_t> bounds = split_pieces(pieces, g.nnz, workers);
  const bool is_private = has_private_blocks(g.out, plan.batch_block, sizeof(A), threads);
  Arena arena(resources.workspace);
  std::vector<A*> dyt(is_private ? workers : 1);
  for (A*& block : dyt) block = arena.take<A>(g.out * plan.batch_block);
  A* windows = arena.take<A>(int64_t(pieces.size()) * kTileCols * plan.batch_block);
  const auto shares_panel = [&](int64_t i, int64_t j) { return j >= 0 && j < int64_t(pieces.size()) && pieces[i].panel == pieces[j].panel; };

  for (int64_t b0 = 0; b0 < args.dy.rows; b0 += plan.batch_block) {
    const int64_t count = std::min(plan.batch_block, args.dy.rows - b0);
    const int width = block_width(count);
    char* dx = static_cast<char*>(args.dx) + b0 * g.in * size_of(args.dtype);
    const auto store = [&](int64_t i) {
      const int64_t begin = pieces[i].panel * kTileCols, end = std::min(begin + kTileCols, g.in);
      k.store_block(windows + i * kTileCols * width, width, count, begin, end, args.dtype, nullptr, dx, g.in);
    };
    if (!is_private) {
      parallel_for(resources.parallel, workers, [&](int64_t worker) {
        k.load_block(args.dy, b0, count, width, g.out * worker / workers, g.out * (worker + 1) / workers, dyt[0]);
      });
    }
    parallel_for(resources.parallel, workers, [&](int64_t worker) {
      if (bounds[worker] == bounds[worker + 1]) return;
      const A* dy = is_private ? load_or_point<A>(args.dy, b0, count, dyt[worker]) : dyt[0];
      for (int64_t i = bounds[worker]; i < bounds[worker + 1]; ++i) {
        A* window = windows + i * kTileCols * width;
        std::memset(window, 0, size_t(kTileCols * width) * sizeof(A));
        k.spmm_t_slots(args.pattern, args.dtype, args.values, width, dy, window, pieces[i].slot_begin, pieces[i].slot_end);
        if (!shares_panel(i, i - 1) && !shares_panel(i, i + 1)) store(i);
      }
    });
    if (int64_t(pieces.size()) == g.panels()) continue;
    // Windows of one panel are neighbours: add them in order, then write the panel's columns of dx.
    parallel_for(resources.parallel, int64_t(pieces.size()), [&](int64_t i) {
      if (shares_panel(i, i - 1) || !shares_panel(i, i + 1)) return;
      A* sum = windows + i * kTileCols * width;
      for (int64_t j = i + 1; shares_panel(i, j); ++j)
        for (int64_t e = 0; e < kTileCols * width; ++e) sum[e] += windows[j * kTileCols * width + e];
      store(i);
    });
  }
}

// dx += dy[:, panel] W[panel, :], panel by panel of decoded rows.
template <class A>
void panels(const SpmmTArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  Arena arena(resources.workspace);
  A* decoded = arena.take<A>(plan.panel_rows * g.in);
  const DenseOperand<A> dy = dense_operand<A>(args.dy, arena, resources.parallel);
  A* dx = size_of(args.dtype) == sizeof(A) ? static_cast<A*>(args.dx) : arena.take<A>(args.dy.rows * g.in);
  for (int64_t r0 = 0; r0 < g.out; r0 += plan.panel_rows) {
    const int64_t rows = std::min(plan.panel_rows, g.out - r0);
    decode_rows<A>(args.pattern, args.dtype, args.values, r0, rows, decoded, resources.parallel);
    resources.gemm({.dtype = ElementTraits<A>::dtype, .m = args.dy.rows, .n = g.in, .k = rows,
                    .a = dy.data + r0 * dy.col_stride, .a_row_stride = dy.row_stride, .a_col_stride = dy.col_stride,
                    .b = decoded, .b_row_stride = g.in, .b_col_stride = 1, .c = dx, .c_row_stride = g.in,
                    .accumulate = r0 > 0});
  }
  if (has_nan(dx, args.dy.rows * g.in, resources.parallel)) return stream<A>(args, plan, resources);
  finish_rows<A>(dx, args.dy.rows, g.in, args.dtype, nullptr, args.dx, resources.parallel);
}

}  // namespace

void spmm_t(const SpmmTArgs& args, const Plan& plan, const CpuResources& resources) {
  snack::check(args);
  check({Operation::kSpmmT, args.pattern.geometry, args.dy.rows, args.dtype}, plan, resources);
  if (args.dy.rows == 0 || args.pattern.geometry.in == 0) return;
  if (args.pattern.geometry.out == 0) {
    std::memset(args.dx, 0, size_t(args.dy.rows * args.pattern.geometry.in * size_of(args.dtype)));
    return;
  }
  const bool is_panel = plan.regime == Regime::kPanel;
  if (args.dtype == DType::kFloat64) is_panel ? panels<double>(args, plan, resources) : stream<double>(args, plan, resources);
  else is_panel ? panels<float>(args, plan, resources) : stream<float>(args, plan, resources);
}

}  // namespace snack::cpu
