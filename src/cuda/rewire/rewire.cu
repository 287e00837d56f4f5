// rewire on the device: mark, sort, place, scan, move. Nothing is read back; an error travels in *status.
// Read and written: about 20 bytes a slot; the sort is of the grown positions alone.
#include "snack/kernels/rewire.hpp"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "../launch.hpp"
#include "../layout.hpp"
#include "../row_starts.cuh"
#include "kernels.cuh"
#include "snack/kernels/check.hpp"

namespace snack::cuda {
namespace {

constexpr int kKeyBits = 62;

RewireScratch cut(Layout& layout, int64_t nnz, int64_t grows) {
  RewireScratch s;
  s.shift = layout.take<int32_t>(nnz);
  s.dropped = layout.take<uint8_t>(nnz);
  s.keys_in = layout.take<SlotKey>(grows), s.keys = layout.take<SlotKey>(grows);
  s.order_in = layout.take<int64_t>(grows), s.order = layout.take<int64_t>(grows);
  s.before = layout.take<int64_t>(grows);
  return s;
}

size_t library_bytes(int64_t nnz, int64_t grows) {
  size_t sort = 0, scan = 0;
  SlotKey* keys = nullptr;
  int64_t* order = nullptr;
  int32_t* shift = nullptr;
  check(cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, keys, order, order, grows, 0, kKeyBits), "rewire");
  check(cub::DeviceScan::InclusiveSum(nullptr, scan, shift, shift, nnz), "rewire");
  return std::max(sort, scan);
}

}  // namespace

int64_t rewire_workspace(const Geometry& before, int64_t drops, int64_t grows) {
  SNACK_CHECK(drops >= 0 && grows >= 0, "rewire: ", drops, " slots to drop and ", grows, " positions to grow; neither may be negative.");
  capability(current_device());  // refuses a card that this binary has no code for
  Layout layout(nullptr);
  cut(layout, before.nnz, grows);
  layout.take<char>(int64_t(library_bytes(before.nnz, grows)));
  return layout.used();
}

void rewire(const RewireArgs& args, const RewireOutput& out, const Resources& resources) {
  snack::check(args);
  const Geometry& g = args.pattern.geometry;
  const Geometry edited = make_geometry(g.out, g.in, g.nnz - args.drops + args.grows);
  SNACK_CHECK(out.geometry.out == edited.out && out.geometry.in == edited.in && out.geometry.nnz == edited.nnz && out.geometry.packing == edited.packing,
              "rewire: the output is for ", out.geometry.nnz, " connections of shape (", out.geometry.out, ", ", out.geometry.in,
              "), the edit makes ", edited.nnz, "; use make_geometry.");
  SNACK_CHECK(out.tile_ptr != nullptr && out.status != nullptr && (edited.nnz == 0 || (out.index != nullptr && out.source != nullptr)),
              "rewire: an output pointer is null; index, tile_ptr, source and status are needed.");
  SNACK_CHECK(args.drops < kMaxExtent && args.grows < kMaxExtent, "rewire: one edit moves fewer than 2^31 connections; split it.");
  check_workspace("rewire", resources.workspace, resources.workspace_bytes, rewire_workspace(g, args.drops, args.grows), 256);

  Layout layout(resources.workspace);
  const RewireScratch s = cut(layout, g.nnz, args.grows);
  size_t bytes = library_bytes(g.nnz, args.grows);
  void* library = layout.take<char>(int64_t(bytes));
  const cudaStream_t stream = resources.stream;
  const DevicePattern old{g, args.pattern.index, args.pattern.tile_ptr};

  check(cudaMemsetAsync(out.status, 0, sizeof(RewireStatus), stream), "rewire");
  if (g.nnz > 0) {
    check(cudaMemsetAsync(s.shift, 0, size_t(g.nnz) * sizeof(int32_t), stream), "rewire");
    check(cudaMemsetAsync(s.dropped, 0, size_t(g.nnz), stream), "rewire");
  }
  launch<rewire_mark_drops>("rewire", blocks_for(args.drops), kThreads, 0, stream, args.drop, args.drops, g.nnz, s, out.status);
  launch<rewire_keys>("rewire", blocks_for(args.grows), kThreads, 0, stream, args.grow_rows, args.grow_cols, args.grows, g, s, out.status);
  if (args.grows > 0)
    check(cub::DeviceRadixSort::SortPairs(library, bytes, s.keys_in, s.keys, s.order_in, s.order, args.grows, 0, kKeyBits, stream), "rewire");
  launch<rewire_place_grown>("rewire", blocks_for(args.grows), kThreads, 0, stream, args.grows, old, s, out.status);
  if (g.nnz > 0) check(cub::DeviceScan::InclusiveSum(library, bytes, s.shift, s.shift, g.nnz, stream), "rewire");

  const int64_t pieces = std::clamp<int64_t>(4096 / std::max<int64_t>(1, g.tiles()), 1, std::max<int64_t>(1, blocks_for(g.nnz)));
  if (g.nnz > 0) {
    if (g.packing == Packing::kNarrow)
      launch<rewire_move_kept<uint16_t>>("rewire", g.tiles() * pieces, kThreads, 0, stream, static_cast<const uint16_t*>(args.pattern.index), old, pieces, s, out);
    else
      launch<rewire_move_kept<uint32_t>>("rewire", g.tiles() * pieces, kThreads, 0, stream, static_cast<const uint32_t*>(args.pattern.index), old, pieces, s, out);
  }
  launch<rewire_move_grown>("rewire", blocks_for(args.grows), kThreads, 0, stream, args.grows, s, out);
  launch<rewire_tile_pointers>("rewire", blocks_for(edited.tiles() + 1), kThreads, 0, stream, args.grows, old, s, out);
  find_row_starts_of("rewire", edited, out.index, out.tile_ptr, nullptr, stream);
}

}  // namespace snack::cuda
