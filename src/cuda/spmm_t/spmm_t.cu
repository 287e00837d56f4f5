#include "snack/kernels/spmm_t.hpp"

#include "../coo.cuh"
#include "../host.hpp"
#include "batch.cuh"
#include "rows.cuh"
#include "stream.cuh"

namespace snack::cuda {
namespace {

// One launch of kKernel a batch chunk, and finish() where blocks share sums. `a` holds what is the kernel's own; `columns`: of the batch,
// a block.
template <auto kKernel, class T, template <class> class Args>
void run(const SpmmTArgs& args, const Plan& plan, const Resources& resources, int64_t columns, int64_t shared, Args<T> a) {
  const Geometry& g = args.pattern.geometry;
  a.index = static_cast<const uint16_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.values = static_cast<const T*>(args.values);
  a.dy = Strided<T>(args.dy);
  a.dx = static_cast<T*>(args.dx);
  a.partials = plan.splits > 1 ? static_cast<float*>(resources.workspace) : nullptr;
  a.out = g.out, a.in = g.in, a.strips = g.strips();
  a.panels = uint32_t(g.panels()), a.splits = uint32_t(plan.splits);
  for (a.b0 = 0; a.b0 < args.dy.rows; a.b0 += plan.batch_chunk) {
    a.batch = std::min(plan.batch_chunk, args.dy.rows - a.b0);
    launch<kKernel>(evict_first(plan, a.values, g.nnz), "spmm_t", g.panels() * plan.splits * ceil_div(a.batch, columns), plan.threads, shared,
                    resources.stream, a);
    if (a.partials != nullptr)
      finish("spmm_t", a.partials, a.splits, a.batch, a.in, nullptr, args.dtype, a.dx + a.b0 * a.in, resources.stream);
  }
}

template <class T, int W>
void stream(const SpmmTArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  SpmmTStream<T> a{};
  a.strips_a_split = plan.strips;
  const int64_t shared = spmm_t_shared(W, plan.threads);
  const bool has_long_rows = g.nnz >= kLongSegment * g.panels() * g.out;
  if (has_long_rows) run<spmm_t_stream<T, W, 4>>(args, plan, resources, W, shared, a);
  else run<spmm_t_stream<T, W, 1>>(args, plan, resources, W, shared, a);
}

template <class T, int W>
void rows(const SpmmTArgs& args, const Plan& plan, const Resources& resources) {
  SpmmTRows<T> a{};
  a.row_starts = args.pattern.row_starts();
  a.rows_a_split = plan.rows;
  const int64_t shared = rows_t_shared(W, plan.threads);
  if (plan.lanes == 32) run<spmm_t_rows<T, W, 1>>(args, plan, resources, W, shared, a);
  else if (plan.lanes == 64) run<spmm_t_rows<T, W, 2>>(args, plan, resources, W, shared, a);
  else run<spmm_t_rows<T, W, 4>>(args, plan, resources, W, shared, a);
}

template <class T>
void batch(const SpmmTArgs& args, const Plan& plan, const Resources& resources) {
  SpmmTBatch<T> a{};
  a.round_strips = int(plan.strips), a.round_slots = int(plan.slots);
  const int64_t shared = batch_t_shared(plan.batch_block, sizeof(T), plan.strips, plan.slots);
  constexpr int kLanes = sizeof(T);  // of a line of 16 columns
  if (plan.batch_block == 16) run<spmm_t_batch<T, kLanes>>(args, plan, resources, 16, shared, a);
  else run<spmm_t_batch<T, 2 * kLanes>>(args, plan, resources, 32, shared, a);
}

template <class T>
void fixed(const SpmmTArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  FixedProduct<T> a{};
  a.index = static_cast<const uint32_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.values = static_cast<const T*>(args.values);
  a.operand = Strided<T>(args.dy);
  a.features_in = g.out, a.features_out = g.in, a.nnz = g.nnz;
  a.strips = g.strips(), a.tiles = g.tiles(), a.pieces = plan.splits;
  fixed_product<T, true>("spmm_t", a, args.dy.rows, static_cast<const T*>(nullptr), static_cast<T*>(args.dx), plan, resources);
}

}  // namespace

void spmm_t(const SpmmTArgs& args, const Plan& plan, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  if (args.dy.rows == 0 || g.in == 0) return;
  check({Operation::kSpmmT, g, args.dy.rows, args.dtype}, plan, resources);
  with_device_type("spmm_t", args.dtype, [&](auto element) {
    using T = decltype(element);
    if (plan.regime == Regime::kCoo)
      coo_product<T, true>("spmm_t", args.pattern, static_cast<const T*>(args.values), args.dy, static_cast<const T*>(nullptr),
                           static_cast<T*>(args.dx), g.in, plan, resources);
    else if (g.packing == Packing::kTall) fixed<T>(args, plan, resources);
    else if (plan.kernel == "spmm_t_batch") batch<T>(args, plan, resources);
    else if (plan.kernel == "spmm_t_rows") plan.batch_block == 1   ? rows<T, 1>(args, plan, resources)
                            : plan.batch_block == 2 ? rows<T, 2>(args, plan, resources)
                                                    : rows<T, 4>(args, plan, resources);
    else plan.batch_block == 1 ? stream<T, 1>(args, plan, resources) : stream<T, 4>(args, plan, resources);
  });
}

}  // namespace snack::cuda
