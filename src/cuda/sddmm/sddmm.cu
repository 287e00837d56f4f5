#include "snack/kernels/sddmm.hpp"

#include "../host.hpp"
#include "chunks.cuh"
#include "kernels.cuh"

namespace snack::cuda {
namespace {

template <class T, int W>
void stream(const SddmmArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  SddmmStream<T> a{};
  a.index = static_cast<const uint16_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.dy = Strided<T>(args.dy), a.x = Strided<T>(args.x);
  a.dvalues = static_cast<T*>(args.dvalues);
  a.out = g.out, a.in = g.in, a.batch = args.x.rows;
  a.strips = g.strips(), a.runs = uint32_t(ceil_div(a.strips, plan.strips));
  a.strips_a_block = int(plan.strips);
  launch<sddmm_stream<T, W>>("sddmm", g.panels() * a.runs, plan.threads, sddmm_shared(plan.strips, W), resources.stream, a);
}

template <class T, int W>
void chunks(const SddmmArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  SddmmChunks<T> a{};
  a.index = static_cast<const uint16_t*>(args.pattern.index);
  a.tile_ptr = args.pattern.tile_ptr;
  a.dy = Strided<T>(args.dy), a.x = Strided<T>(args.x);
  a.dvalues = static_cast<T*>(args.dvalues);
  a.out = g.out, a.in = g.in;
  a.panels = uint32_t(g.panels()), a.splits = uint32_t(plan.splits), a.strips = uint32_t(g.strips()), a.slots = uint32_t(g.nnz);
  a.batch = int(args.x.rows);
  a.aligned = is_aligned_16(a.index) && is_aligned_16(a.dvalues);
  launch<sddmm_chunks<T, W>>("sddmm", g.panels() * plan.splits, plan.threads, chunks_shared(sizeof(T), W), resources.stream, a);
}

template <class T>
void slots(const SddmmArgs& args, const Plan& plan, const Resources& resources) {
  const Geometry& g = args.pattern.geometry;
  const auto run = [&](auto* index) {
    using Word = std::remove_const_t<std::remove_pointer_t<decltype(index)>>;
    launch<sddmm_slots<T, Word>>("sddmm", g.tiles() * plan.splits, plan.threads, 0, resources.stream, index, args.pattern.tile_ptr,
                                 Strided<T>(args.dy), Strided<T>(args.x), static_cast<T*>(args.dvalues), args.x.rows, g.strips(), plan.splits);
  };
  if (g.packing == Packing::kNarrow) run(static_cast<const uint16_t*>(args.pattern.index));
  else run(static_cast<const uint32_t*>(args.pattern.index));
}

}  // namespace

void sddmm(const SddmmArgs& args, const Plan& plan, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  if (g.nnz == 0) return;
  check({Operation::kSddmm, g, args.x.rows, args.dtype}, plan, resources);
  with_device_type("sddmm", args.dtype, [&](auto element) {
    using T = decltype(element);
    if (plan.regime == Regime::kCoo || g.packing == Packing::kTall || args.x.rows > kWidestWindow) slots<T>(args, plan, resources);
    else if (plan.strips == 0) {
      if (plan.batch_block == 1) chunks<T, 1>(args, plan, resources);
      else if (plan.batch_block == 2) chunks<T, 2>(args, plan, resources);
      else if (plan.batch_block == 4) chunks<T, 4>(args, plan, resources);
      else if constexpr (sizeof(T) == 2) chunks<T, 8>(args, plan, resources);
    } else if (plan.batch_block == 1) stream<T, 1>(args, plan, resources);
    else if (plan.batch_block == 4) stream<T, 4>(args, plan, resources);
    else stream<T, 8>(args, plan, resources);
  });
}

}  // namespace snack::cuda
