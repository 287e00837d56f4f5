// The packed pattern: where the non-zeros of a sparse matrix W (out, in) are, in one index that serves W and W^T.
//
// Slot order, version 1: slots are sorted by (column panel, row, column), a panel being kTileCols = 1024 columns.
// `values` is stored in this order; optimiser states and files depend on it, so it never changes silently.
//
// Packing: the positions are cut into tiles of one panel x `tile_rows` rows (a strip). Tiles are listed panel by panel,
// strip by strip, so every tile is a contiguous run of slots: tile_ptr[t] .. tile_ptr[t + 1]. One word a slot holds
// (row in tile << 10) | column in tile. Two packings of the same order:
//   narrow  uint16 words, tiles of 64 rows          2 bytes a slot; used at a mean of >= 32 slots a tile
//   tall    uint32 words, tiles of 4,194,304 rows   4 bytes a slot; for layers too sparse to fill narrow tiles
// Tile pointers cost at most 8/32 byte a slot (narrow) or 8 * ceil(in / 1024) * ceil(out / 2^22) bytes (tall): nothing here
// ever grows with out * in at a rate that matters (at most 4 bytes * max(out, in) + 16 for any 31-bit shape).
//
// A segment is the run of slots of one row in one panel. Narrow patterns with a mean of at least kSegmentMeanSlots a segment
// also know where each begins: row_starts[panel * out + row], uint16, counted from the start of the row's tile (the first slots
// of a tile's 64 rows lie below 63 * 1024). They lie behind the tile pointers, in the same array, and cost at most half a byte
// a slot; the last word is filled up with zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "snack/core/parallel.hpp"

namespace snack {

inline constexpr int kSlotOrderVersion = 1;
inline constexpr int kTileColBits = 10;
inline constexpr int64_t kTileCols = int64_t{1} << kTileColBits;
inline constexpr int64_t kMaxExtent = (int64_t{1} << 31) - 1;
inline constexpr int64_t kNarrowMeanSlots = 32;
inline constexpr int64_t kSegmentMeanSlots = 4;

enum class Packing : int { kNarrow, kTall };

constexpr int row_bits(Packing packing) { return packing == Packing::kNarrow ? 6 : 22; }
constexpr int64_t tile_rows(Packing packing) { return int64_t{1} << row_bits(packing); }
constexpr int64_t index_bytes(Packing packing) { return packing == Packing::kNarrow ? 2 : 4; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Shape of the packed arrays for a matrix of `out` rows and `in` columns with `nnz` slots.
struct Geometry {
  int64_t out = 0, in = 0, nnz = 0;
  Packing packing = Packing::kTall;

  constexpr bool operator==(const Geometry&) const = default;
  constexpr int64_t strips() const { return ceil_div(out, tile_rows(packing)); }
  constexpr int64_t panels() const { return ceil_div(in, kTileCols); }
  constexpr int64_t tiles() const { return strips() * panels(); }
  constexpr int64_t segments() const { return out * panels(); }
  constexpr bool has_row_starts() const { return packing == Packing::kNarrow && nnz / kSegmentMeanSlots >= segments(); }
  /// int64 words of tile_ptr: tiles() + 1 pointers, then the row starts.
  constexpr int64_t pointer_words() const { return tiles() + 1 + (has_row_starts() ? ceil_div(2 * segments(), 8) : 0); }
};

/// The packing is a function of shape and nnz alone. Throws Error on extents outside [0, 2^31) or nnz > out * in.
Geometry make_geometry(int64_t out, int64_t in, int64_t nnz);

/// Non-owning view of a packed pattern; valid while the arrays live. Host or device memory, as the function says that takes
/// it. Nothing checks the contents: they must come from `encode`, `sample` or `rewire`, and may be read by many threads.
struct PatternView {
  Geometry geometry;
  const void* index = nullptr;        // nnz words
  const int64_t* tile_ptr = nullptr;  // pointer_words(): tiles + 1 offsets into index, then the row starts
  /// Null where the geometry has none.
  const uint16_t* row_starts() const {
    return geometry.has_row_starts() ? reinterpret_cast<const uint16_t*>(tile_ptr + geometry.tiles() + 1) : nullptr;
  }
};

/// Owning packed pattern on the host.
struct HostPattern {
  Geometry geometry;
  std::vector<uint8_t> index;
  std::vector<int64_t> tile_ptr;
  PatternView view() const { return {geometry, index.data(), tile_ptr.data()}; }
};

// A position as one integer that sorts in slot order: panel (21 bits) | row (31 bits) | column in panel (10 bits).
using SlotKey = uint64_t;
constexpr SlotKey slot_key(int64_t row, int64_t col) {
  return (SlotKey(col >> kTileColBits) << 41) | (SlotKey(row) << kTileColBits) | SlotKey(col & (kTileCols - 1));
}
constexpr int64_t key_row(SlotKey key) { return int64_t(key >> kTileColBits) & kMaxExtent; }
constexpr int64_t key_col(SlotKey key) {
  return (int64_t(key >> 41) << kTileColBits) | int64_t(key & SlotKey(kTileCols - 1));
}

/// Writes index (nnz words) and tile_ptr (pointer_words()) of sorted, distinct keys.
void encode(const SlotKey* keys, const Geometry& geometry, void* index, int64_t* tile_ptr, const ParallelFor& runner);
HostPattern encode(const std::vector<SlotKey>& keys, const Geometry& geometry, const ParallelFor& runner = serial());

/// Keys of slots [begin, end), which must lie in 0 .. nnz.
void decode_keys(const PatternView& pattern, int64_t begin, int64_t end, SlotKey* keys);
/// Row and column of every slot; both arrays have room for nnz entries.
void unpack(const PatternView& pattern, int32_t* rows, int32_t* cols, const ParallelFor& runner);

/// Sorts a COO list into slot order: `keys` and `order` (slot -> position in the list), equal keys in list order.
/// Throws Error, naming the first offender, on an index outside the shape.
struct SortedCoo {
  std::vector<SlotKey> keys;
  std::vector<int64_t> order;
};
SortedCoo sort_coo(const int64_t* rows, const int64_t* cols, int64_t count, int64_t out, int64_t in);

/// The slot of the position `key`, which must lie in the shape, or -1 if it is empty.
int64_t find_slot(const PatternView& pattern, SlotKey key);

}  // namespace snack
