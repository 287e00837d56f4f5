// The host path of sddmm and sddmm_update: which kernel a plan means.
#pragma once

#include "../host.hpp"
#include "batch.cuh"
#include "chunks.cuh"
#include "kernels.cuh"

namespace snack::cuda {

/// The gradients of `args` (SddmmArgs or SddmmUpdateArgs), checked before, given to `sink`.
template <class Sink, class Args>
class SddmmRun {
 public:
  SddmmRun(const char* operation, const Args& args, const Plan& plan, Stream stream, const Sink& sink)
      : operation_(operation), g_(args.pattern.geometry), pattern_(args.pattern), dy_(args.dy), x_(args.x), batch_(args.x.rows), plan_(plan),
        stream_(stream), sink_(sink) {}

  void operator()() const {
    const int width = int(plan_.batch_block);
    if (plan_.kernel == "sddmm_slots") slots();
    else if (plan_.kernel == "sddmm_chunks") width == 1 ? chunks<1>() : width == 2 ? chunks<2>() : width == 4 ? chunks<4>() : chunks<8>();
    else if (plan_.kernel == "sddmm_batch") width == 16 ? batch<int(sizeof(T))>() : batch<2 * int(sizeof(T))>();
    else width == 1 ? stream<1>() : width == 4 ? stream<4>() : stream<8>();
  }

 private:
  using T = typename Sink::Element;

  template <int W>
  void chunks() const {
    if constexpr (sizeof(T) * W <= 16) {  // what one load from shared memory brings
      const auto* index = static_cast<const uint16_t*>(pattern_.index);
      const SddmmChunks<Sink> a{index, pattern_.tile_ptr, dy_, x_, sink_, g_.out, g_.in, uint32_t(g_.panels()), uint32_t(plan_.splits),
                                uint32_t(g_.strips()), uint32_t(g_.nnz), int(batch_), is_aligned_16(index)};
      launch<sddmm_chunks<Sink, W>>(evict_first(plan_, sink_.rewritten(), g_.nnz), operation_, g_.panels() * plan_.splits, plan_.threads, chunks_shared(sizeof(T), W), stream_, a);
    }
  }

  template <int kLanes>
  void batch() const {
    const SddmmBatch<Sink> a{static_cast<const uint16_t*>(pattern_.index), pattern_.tile_ptr, dy_, x_, sink_, g_.out, g_.in, batch_, g_.strips(),
                             uint32_t(g_.panels()), uint32_t(plan_.splits), int(plan_.slots)};
    launch<sddmm_batch<Sink, kLanes>>(operation_, g_.panels() * plan_.splits, plan_.threads, sddmm_batch_shared(Lines<T, kLanes>::kCols, sizeof(T), plan_.slots),
                                      stream_, a);
  }

  template <int W>
  void stream() const {
    const int64_t runs = ceil_div(g_.strips(), plan_.strips);
    const SddmmStream<Sink> a{static_cast<const uint16_t*>(pattern_.index), pattern_.tile_ptr, dy_, x_, sink_, g_.out, g_.in, batch_, g_.strips(),
                              uint32_t(runs), int(plan_.strips)};
    launch<sddmm_stream<Sink, W>>(operation_, g_.panels() * runs, plan_.threads, sddmm_shared(plan_.strips, W), stream_, a);
  }

  void slots() const {
    const auto run = [&](auto* index) {
      using Word = std::remove_const_t<std::remove_pointer_t<decltype(index)>>;
      launch<sddmm_slots<Sink, Word>>(operation_, g_.tiles() * plan_.splits, plan_.threads, 0, stream_, index, pattern_.tile_ptr, dy_, x_, sink_, batch_,
                                      g_.strips(), plan_.splits);
    };
    if (g_.packing == Packing::kNarrow) run(static_cast<const uint16_t*>(pattern_.index));
    else run(static_cast<const uint32_t*>(pattern_.index));
  }

  const char* operation_;
  const Geometry& g_;
  const PatternView& pattern_;
  Strided<T> dy_, x_;
  int64_t batch_;
  const Plan& plan_;
  Stream stream_;
  const Sink& sink_;
};

}  // namespace snack::cuda
