#include "snack/kernels/spmm.hpp"

#include <bit>

#include "../coo.cuh"
#include "../host.hpp"
#include "batch.cuh"
#include "rows.cuh"
#include "stream.cuh"

namespace snack::cuda {
namespace {

template <class T, int W>
void stream(const SpmmArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  const int64_t batch = args.x.rows;
  SpmmStream<T> a{};
  a.index = static_cast<const uint16_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.values = static_cast<const T*>(args.values);
  a.x = Strided<T>(args.x);
  a.bias = static_cast<const T*>(args.bias);
  a.y = static_cast<T*>(args.y);
  a.partials = plan.splits > 1 ? static_cast<float*>(resources.workspace) : nullptr;
  a.out = g.out, a.in = g.in, a.nnz = g.nnz;
  a.strips = g.strips(), a.panels = g.panels();
  a.strips_a_block = int(plan.strips);
  a.runs = uint32_t(ceil_div(a.strips, plan.strips));
  a.splits = uint32_t(plan.splits);
  a.panels_a_block = ceil_div(std::max<int64_t>(1, a.panels), plan.splits);
  a.aligned = is_aligned_16(a.index) && is_aligned_16(a.values);
  for (a.b0 = 0; a.b0 < batch; a.b0 += plan.batch_chunk) {
    a.batch = std::min(plan.batch_chunk, batch - a.b0);
    launch<spmm_stream<T, W>>("spmm", int64_t{a.runs} * a.splits * ceil_div(a.batch, W), plan.threads,
                              spmm_shared(plan.strips, W, plan.threads), resources.stream, a);
    if (a.partials != nullptr)
      finish("spmm", a.partials, a.splits, a.batch, a.out, args.bias, args.dtype, a.y + a.b0 * a.out, resources.stream);
  }
}

template <class T, int W>
void rows(const SpmmArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  SpmmRows<T> a{};
  a.index = static_cast<const uint16_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.row_starts = args.pattern.row_starts();
  a.values = static_cast<const T*>(args.values);
  a.x = Strided<T>(args.x);
  a.bias = static_cast<const T*>(args.bias);
  a.y = static_cast<T*>(args.y);
  a.partials = plan.splits > 1 ? static_cast<float*>(resources.workspace) : nullptr;
  a.out = g.out, a.in = g.in;
  a.strips = uint32_t(g.strips()), a.panels = int(g.panels());
  a.runs = uint32_t(ceil_div(g.out, plan.rows)), a.splits = uint32_t(plan.splits);
  a.panels_a_split = int(ceil_div(g.panels(), plan.splits));
  a.slots = uint32_t(g.nnz);
  a.whole_chunks = is_aligned_16(a.index) && is_aligned_16(a.values) ? a.slots / 8 : 0;
  a.rows_a_block = int(plan.rows);
  a.log_rows = int(std::bit_width(uint64_t(plan.rows - 1)));
  a.log_lanes = std::countr_zero(unsigned(plan.lanes)), a.log_team = std::countr_zero(unsigned(plan.lanes * plan.groups));
  a.long_chunks = int(kLongSegments * std::max<int64_t>(plan.lanes, g.nnz / (8 * g.segments()) + 1));
  for (a.b0 = 0; a.b0 < args.x.rows; a.b0 += plan.batch_chunk) {
    a.batch = std::min(plan.batch_chunk, args.x.rows - a.b0);
    launch<spmm_rows<T, W>>(evict_first(plan, a.values, g.nnz), "spmm", int64_t{a.runs} * a.splits * ceil_div(a.batch, W), plan.threads,
                            rows_shared(sizeof(T), W, a.panels_a_split, plan.rows), resources.stream, a);
    if (a.partials != nullptr)
      finish("spmm", a.partials, a.splits, a.batch, a.out, args.bias, args.dtype, a.y + a.b0 * a.out, resources.stream);
  }
}

template <class T, int kLanes, int kPieces, bool kStaged>
void batch(const SpmmArgs& args, const Plan& plan, const Resources& resources) {
  using L = Lines<T, kLanes, kPieces>;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  const Geometry& g = args.pattern.geometry;
  char* lines = static_cast<char*>(resources.workspace);
  SpmmBatch<T> a{};
  a.index = static_cast<const uint16_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.row_starts = args.pattern.row_starts();
  a.values = static_cast<const T*>(args.values);
  a.lines = lines;
  a.bias = static_cast<const T*>(args.bias);
  a.out = g.out, a.strips = int(g.strips()), a.panels = int(g.panels());
  a.panels_a_group = int(ceil_div(g.panels(), plan.groups));
  a.teams = int(plan.rows), a.groups = plan.groups, a.windows = plan.windows, a.log_parts = std::countr_zero(unsigned(plan.parts));
  a.longest = int(kLongSegments * std::max<int64_t>(16, g.nnz / g.segments()));
  a.row_blocks = uint32_t(ceil_div(g.out, plan.rows));
  const uint32_t tiles = uint32_t(g.panels() * kPanelTiles);
  for (int64_t b0 = 0; b0 < args.x.rows; b0 += plan.batch_chunk) {
    Strided<Bits> x(args.x);
    x.data += b0 * x.row_stride;
    a.y = static_cast<T*>(args.y) + b0 * g.out;
    a.batch = std::min(plan.batch_chunk, args.x.rows - b0);
    const int64_t chunks = ceil_div(a.batch, L::kCols);
    launch<transpose_lines<Bits, kLanes * kPieces>>("spmm", tiles * chunks, kTransposeThreads, 0, resources.stream, x, g.in, a.batch, tiles, lines);
    launch<spmm_batch<T, kLanes, kPieces, kStaged>>("spmm", a.row_blocks * chunks, plan.threads,
                                                    batch_shared(L::kBytes, L::kCols, plan.rows, plan.threads, plan.groups * plan.windows),
                                                    resources.stream, a);
  }
}

template <class T>
void batch(const SpmmArgs& args, const Plan& plan, const Resources& resources) {
  if (plan.lanes == 8) return batch<T, 8, 1, false>(args, plan, resources);
  if (plan.lanes == 4 && plan.windows == 0) return batch<T, 4, 1, false>(args, plan, resources);
  if (plan.lanes == 4) return batch<T, 4, 2, true>(args, plan, resources);
  if constexpr (sizeof(T) == 2) batch<T, 2, 1, true>(args, plan, resources);
}

template <class T>
void fixed(const SpmmArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  FixedProduct<T> a{};
  a.index = static_cast<const uint32_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.values = static_cast<const T*>(args.values);
  a.operand = Strided<T>(args.x);
  a.features_in = g.in, a.features_out = g.out, a.nnz = g.nnz;
  a.strips = g.strips(), a.tiles = g.tiles(), a.pieces = plan.splits;
  fixed_product<T, false>("spmm", a, args.x.rows, static_cast<const T*>(args.bias), static_cast<T*>(args.y), plan, resources);
}

}  // namespace

void spmm(const SpmmArgs& args, const Plan& plan, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  if (args.x.rows == 0 || g.out == 0) return;
  check({Operation::kSpmm, g, args.x.rows, args.dtype}, plan, resources);
  with_device_type("spmm", args.dtype, [&](auto element) {
    using T = decltype(element);
    if (plan.regime == Regime::kCoo)
      coo_product<T, false>("spmm", args.pattern, static_cast<const T*>(args.values), args.x, static_cast<const T*>(args.bias),
                            static_cast<T*>(args.y), g.out, plan, resources);
    else if (g.packing == Packing::kTall) fixed<T>(args, plan, resources);
    else if (plan.kernel == "spmm_batch") batch<T>(args, plan, resources);
    else if (plan.kernel == "spmm_rows") {
      if (plan.batch_block == 1) rows<T, 1>(args, plan, resources);
      else if (plan.batch_block == 2) rows<T, 2>(args, plan, resources);
      else if (plan.batch_block == 4) rows<T, 4>(args, plan, resources);
      else if constexpr (sizeof(T) == 2) rows<T, 8>(args, plan, resources);
    }
    else if (plan.batch_block == 1) stream<T, 1>(args, plan, resources);
    else if (plan.batch_block == 4) stream<T, 4>(args, plan, resources);
    else stream<T, 8>(args, plan, resources);
  });
}

}  // namespace snack::cuda
