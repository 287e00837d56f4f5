#include "snack/kernels/spmm.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "isa.hpp"
#include "panel.hpp"
#include "snack/kernels/check.hpp"

namespace snack::cpu {
namespace {

// First row in [begin, end) with at least `target` slots above it, given that `before` slots lie above row `begin` and that
// all these rows are in one strip.
int64_t row_at(const PatternView& pattern, int64_t target, int64_t begin, int64_t end, int64_t before) {
  const Geometry& g = pattern.geometry;
  const int64_t strip = begin >> row_bits(g.packing), first_row = strip << row_bits(g.packing);
  const auto slots_above = [&](int64_t row) {
    int64_t count = before;
    for (int64_t panel = 0; panel < g.panels(); ++panel) {
      const int64_t* tile = pattern.tile_ptr + panel * g.strips() + strip;
      const auto search = [&](auto* words) {
        using Word = std::remove_const_t<std::remove_pointer_t<decltype(words)>>;
        return std::lower_bound(words + tile[0], words + tile[1], Word((row - first_row) << kTileColBits)) - words - tile[0];
      };
      count += g.packing == Packing::kNarrow ? search(static_cast<const uint16_t*>(pattern.index))
                                             : search(static_cast<const uint32_t*>(pattern.index));
    }
    return count;
  };
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (slots_above(middle) < target) begin = middle + 1;
    else end = middle;
  }
  return begin;
}

// Boundaries of `parts` row ranges of about equal nnz: the strip by adding up tile sizes, the row in it by bisection.
std::vector<int64_t> split_rows(const PatternView& pattern, int64_t parts, const ParallelFor& runner) {
  const Geometry& g = pattern.geometry;
  std::vector<int64_t> bounds(parts + 1, g.out);
  bounds[0] = 0;
  if (parts == 1) return bounds;
  std::vector<int64_t> above(g.strips() + 1, 0);  // slots above each strip
  for (int64_t panel = 0; panel < g.panels(); ++panel) {
    const int64_t* tile = pattern.tile_ptr + panel * g.strips();
    for (int64_t strip = 0; strip < g.strips(); ++strip) above[strip + 1] += tile[strip + 1] - tile[strip];
  }
  for (int64_t strip = 0; strip < g.strips(); ++strip) above[strip + 1] += above[strip];
  parallel_for(runner, parts - 1, [&](int64_t i) {
    const int64_t target = g.nnz * (i + 1) / parts;
    const int64_t strip = std::max<int64_t>(0, std::lower_bound(above.begin(), above.end(), target) - above.begin() - 1);
    const int64_t begin = std::min(g.out, strip << row_bits(g.packing));
    bounds[i + 1] = row_at(pattern, target, begin, std::min(g.out, begin + tile_rows(g.packing)), above[strip]);
  });
  return bounds;
}

// Rows [begin, end) of a batch block: their sums, strip by strip, written to y with the bias.
template <class A>
void rows_of_block(const SpmmArgs& args, const A* x, A* sums, int64_t b0, int64_t count, int64_t begin, int64_t end) {
  const Geometry& g = args.pattern.geometry;
  const IsaKernels<A>& k = kernels<A>();
  const int width = block_width(count);
  const int64_t rows_at_once = spmm_rows_at_once(g);
  char* y = static_cast<char*>(args.y) + b0 * g.out * size_of(args.dtype);
  while (begin < end) {
    // The sums of a strip stay in the L1 cache until they are written out.
    const int64_t stop = std::min(end, (begin / rows_at_once + 1) * rows_at_once);
    k.spmm_rows(args.pattern, args.dtype, args.values, width, x, sums, begin, stop);
    k.store_block(sums, width, count, begin, stop, args.dtype, args.bias, y, g.out);
    begin = stop;
  }
}

// Every worker takes (batch block, row range) pairs and transposes the blocks it needs for itself.
template <class A>
void stream_private(const SpmmArgs& args, const Plan& plan, const CpuResources& resources, int64_t workers) {
  const Geometry& g = args.pattern.geometry;
  const int64_t blocks = ceil_div(args.x.rows, plan.batch_block);
  const int64_t ranges = ceil_div(workers, blocks), items = blocks * ranges;
  const std::vector<int64_t> bounds = split_rows(args.pattern, ranges, resources.parallel);
  Arena arena(resources.workspace);
  std::vector<std::pair<A*, A*>> scratch(workers);
  for (auto& [xt, sums] : scratch) {
    xt = arena.take<A>(g.in * plan.batch_block);
    sums = arena.take<A>(spmm_rows_at_once(g) * plan.batch_block);
  }
  parallel_for(resources.parallel, workers, [&](int64_t worker) {
    const auto [xt, sums] = scratch[worker];
    const A* x = nullptr;
    int64_t loaded = -1;
    for (int64_t item = items * worker / workers; item < items * (worker + 1) / workers; ++item) {
      const int64_t block = item / ranges, range = item % ranges;
      const int64_t b0 = block * plan.batch_block, count = std::min(plan.batch_block, args.x.rows - b0);
      if (block != loaded) x = load_or_point<A>(args.x, b0, count, xt);
      loaded = block;
      rows_of_block<A>(args, x, sums, b0, count, bounds[range], bounds[range + 1]);
    }
  });
}

// All workers share one batch block at a time.
template <class A>
void stream_shared(const SpmmArgs& args, const Plan& plan, const CpuResources& resources, int64_t workers) {
  const Geometry& g = args.pattern.geometry;
  Arena arena(resources.workspace);
  A* xt = arena.take<A>(g.in * plan.batch_block);
  A* sums = arena.take<A>(spmm_sum_rows(g, resources.parallel.threads) * plan.batch_block);
  const std::vector<int64_t> bounds = split_rows(args.pattern, workers, resources.parallel);
  for (int64_t b0 = 0; b0 < args.x.rows; b0 += plan.batch_block) {
    const int64_t count = std::min(plan.batch_block, args.x.rows - b0);
    parallel_for(resources.parallel, workers, [&](int64_t worker) {
      kernels<A>().load_block(args.x, b0, count, block_width(count), g.in * worker / workers, g.in * (worker + 1) / workers, xt);
    });
    parallel_for(resources.parallel, workers, [&](int64_t worker) {
      const int64_t first = g.packing == Packing::kNarrow ? worker * spmm_rows_at_once(g) : bounds[worker];
      rows_of_block<A>(args, xt, sums + first * plan.batch_block, b0, count, bounds[worker], bounds[worker + 1]);
    });
  }
}

template <class A>
void stream(const SpmmArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  const int threads = resources.parallel.threads;
  isa();  // chosen here, where it may throw, not inside a parallel region
  const int64_t workers = stream_workers(g, plan.batch_block, args.x.rows, threads);
  if (has_private_blocks(g.in + spmm_rows_at_once(g), plan.batch_block, sizeof(A), threads)) stream_private<A>(args, plan, resources, workers);
  else stream_shared<A>(args, plan, resources, workers);
}

// y[:, panel] = x W[panel, :]^T, panel by panel of decoded rows.
template <class A>
void panels(const SpmmArgs& args, const Plan& plan, const CpuResources& resources) {
  const Geometry& g = args.pattern.geometry;
  Arena arena(resources.workspace);
  A* decoded = arena.take<A>(plan.panel_rows * g.in);
  const DenseOperand<A> x = dense_operand<A>(args.x, arena, resources.parallel);
  A* y = size_of(args.dtype) == sizeof(A) ? static_cast<A*>(args.y) : arena.take<A>(args.x.rows * g.out);
  for (int64_t r0 = 0; r0 < g.out; r0 += plan.panel_rows) {
    const int64_t rows = std::min(plan.panel_rows, g.out - r0);
    decode_rows<A>(args.pattern, args.dtype, args.values, r0, rows, decoded, resources.parallel);
    resources.gemm({.dtype = ElementTraits<A>::dtype, .m = args.x.rows, .n = rows, .k = g.in,
                    .a = x.data, .a_row_stride = x.row_stride, .a_col_stride = x.col_stride,
                    .b = decoded, .b_row_stride = 1, .b_col_stride = g.in, .c = y + r0, .c_row_stride = g.out});
  }
  if (has_nan(y, args.x.rows * g.out, resources.parallel)) return stream<A>(args, plan, resources);
  finish_rows<A>(y, args.x.rows, g.out, args.dtype, args.bias, args.y, resources.parallel);
}

}  // namespace

void spmm(const SpmmArgs& args, const Plan& plan, const CpuResources& resources) {
  snack::check(args);
  check({Operation::kSpmm, args.pattern.geometry, args.x.rows, args.dtype}, plan, resources);
  if (args.x.rows == 0 || args.pattern.geometry.out == 0) return;
  const bool is_panel = plan.regime == Regime::kPanel;
  if (args.dtype == DType::kFloat64) is_panel ? panels<double>(args, plan, resources) : stream<double>(args, plan, resources);
  else is_panel ? panels<float>(args, plan, resources) : stream<float>(args, plan, resources);
}

}  // namespace snack::cpu
