#include "snack/formats/pattern.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "snack/core/error.hpp"

namespace snack {
namespace {

constexpr int64_t kChunk = 1 << 16;  // slots a parallel task handles

template <class F>
decltype(auto) with_index(Packing packing, F&& f) {
  if (packing == Packing::kNarrow) return f(uint16_t{});
  return f(uint32_t{});
}

int64_t tile_of(const Geometry& g, SlotKey key) {
  const int64_t panel = int64_t(key >> 41);
  return panel * g.strips() + (key_row(key) >> row_bits(g.packing));
}

SlotKey first_key_of_tile(const Geometry& g, int64_t tile) {
  const int64_t panel = tile / g.strips(), strip = tile % g.strips();
  return slot_key(strip << row_bits(g.packing), panel << kTileColBits);
}

// Row starts of all tiles; they are bytes behind the pointers, so they are copied as bytes.
void fill_row_starts(const SlotKey* keys, const Geometry& g, int64_t* tile_ptr, const ParallelFor& runner) {
  tile_ptr[g.pointer_words() - 1] = 0;
  auto* starts = reinterpret_cast<unsigned char*>(tile_ptr + g.tiles() + 1);
  parallel_for(runner, g.tiles(), [&](int64_t tile) {
    const int64_t panel = tile / g.strips(), first = tile % g.strips() * tile_rows(g.packing);
    int64_t slot = tile_ptr[tile];
    for (int64_t row = first; row < std::min(g.out, first + tile_rows(g.packing)); ++row) {
      while (slot < tile_ptr[tile + 1] && key_row(keys[slot]) < row) ++slot;
      const auto start = uint16_t(slot - tile_ptr[tile]);
      std::memcpy(starts + 2 * (panel * g.out + row), &start, sizeof start);
    }
  });
}

}  // namespace

Geometry make_geometry(int64_t out, int64_t in, int64_t nnz) {
  SNACK_CHECK(out >= 0 && in >= 0 && out <= kMaxExtent && in <= kMaxExtent, "Pattern: shape (", out, ", ", in,
              ") is outside 0 .. 2147483647; split the layer.");
  SNACK_CHECK(nnz >= 0 && nnz <= out * in, "Pattern: ", nnz, " connections do not fit into shape (", out, ", ", in,
              "), which has ", out * in, " positions.");
  Geometry narrow{out, in, nnz, Packing::kNarrow};
  // out * in < 2^62, so tiles() of narrow tiles cannot overflow.
  if (nnz > 0 && nnz / kNarrowMeanSlots >= narrow.tiles()) return narrow;
  return {out, in, nnz, Packing::kTall};
}

void encode(const SlotKey* keys, const Geometry& g, void* index, int64_t* tile_ptr, const ParallelFor& runner) {
  const int64_t tiles = g.tiles();
  parallel_for(runner, ceil_div(tiles + 1, kChunk), [&](int64_t chunk) {
    const int64_t begin = chunk * kChunk, end = std::min(begin + kChunk, tiles + 1);
    // One search for the first tile, then a walk: pointers are monotone.
    int64_t slot = begin == tiles ? g.nnz : std::lower_bound(keys, keys + g.nnz, first_key_of_tile(g, begin)) - keys;
    for (int64_t tile = begin; tile < end; ++tile) {
      while (slot < g.nnz && tile_of(g, keys[slot]) < tile) ++slot;
      tile_ptr[tile] = slot;
    }
  });
  if (g.has_row_starts()) fill_row_starts(keys, g, tile_ptr, runner);
  with_index(g.packing, [&](auto word) {
    using Word = decltype(word);
    auto* words = static_cast<Word*>(index);
    const SlotKey mask = (SlotKey{1} << (row_bits(g.packing) + kTileColBits)) - 1;
    parallel_for(runner, ceil_div(g.nnz, kChunk), [&](int64_t chunk) {
      const int64_t end = std::min((chunk + 1) * kChunk, g.nnz);
      for (int64_t slot = chunk * kChunk; slot < end; ++slot) words[slot] = Word(keys[slot] & mask);
    });
  });
}

HostPattern encode(const std::vector<SlotKey>& keys, const Geometry& geometry, const ParallelFor& runner) {
  HostPattern pattern{geometry, std::vector<uint8_t>(size_t(geometry.nnz * index_bytes(geometry.packing))),
                      std::vector<int64_t>(size_t(geometry.pointer_words()))};
  encode(keys.data(), geometry, pattern.index.data(), pattern.tile_ptr.data(), runner);
  return pattern;
}

void decode_keys(const PatternView& pattern, int64_t begin, int64_t end, SlotKey* keys) {
  if (begin >= end) return;
  const Geometry& g = pattern.geometry;
  int64_t tile = std::upper_bound(pattern.tile_ptr, pattern.tile_ptr + g.tiles() + 1, begin) - pattern.tile_ptr - 1;
  with_index(g.packing, [&](auto word) {
    const auto* words = static_cast<const decltype(word)*>(pattern.index);
    for (int64_t slot = begin; slot < end; ++tile) {
      const SlotKey base = first_key_of_tile(g, tile);
      const int64_t stop = std::min(end, pattern.tile_ptr[tile + 1]);
      for (; slot < stop; ++slot) keys[slot - begin] = base + words[slot];
    }
  });
}

void unpack(const PatternView& pattern, int32_t* rows, int32_t* cols, const ParallelFor& runner) {
  const int64_t nnz = pattern.geometry.nnz;
  constexpr int64_t kBlock = 4096;
  parallel_for(runner, ceil_div(nnz, kBlock), [&](int64_t block) {
    SlotKey keys[kBlock];
    const int64_t begin = block * kBlock, end = std::min(begin + kBlock, nnz);
    decode_keys(pattern, begin, end, keys);
    for (int64_t slot = begin; slot < end; ++slot) {
      rows[slot] = int32_t(key_row(keys[slot - begin]));
      cols[slot] = int32_t(key_col(keys[slot - begin]));
    }
  });
}

SortedCoo sort_coo(const int64_t* rows, const int64_t* cols, int64_t count, int64_t out, int64_t in) {
  SortedCoo sorted{std::vector<SlotKey>(size_t(count)), std::vector<int64_t>(size_t(count))};
  for (int64_t i = 0; i < count; ++i) {
    SNACK_CHECK(rows[i] >= 0 && rows[i] < out, "connection ", i, " has row ", rows[i], ", outside 0 .. ", out - 1, ".");
    SNACK_CHECK(cols[i] >= 0 && cols[i] < in, "connection ", i, " has column ", cols[i], ", outside 0 .. ", in - 1, ".");
    sorted.keys[i] = slot_key(rows[i], cols[i]);
  }
  std::iota(sorted.order.begin(), sorted.order.end(), int64_t{0});
  if (std::is_sorted(sorted.keys.begin(), sorted.keys.end())) return sorted;
  std::stable_sort(sorted.order.begin(), sorted.order.end(),
                   [&](int64_t a, int64_t b) { return sorted.keys[a] < sorted.keys[b]; });
  std::sort(sorted.keys.begin(), sorted.keys.end());
  return sorted;
}

int64_t find_slot(const PatternView& pattern, SlotKey key) {
  const Geometry& g = pattern.geometry;
  const int64_t tile = tile_of(g, key);
  const SlotKey local = key - first_key_of_tile(g, tile);
  return with_index(g.packing, [&](auto word) -> int64_t {
    using Word = decltype(word);
    const auto* words = static_cast<const Word*>(pattern.index);
    const Word* end = words + pattern.tile_ptr[tile + 1];
    const Word* at = std::lower_bound(words + pattern.tile_ptr[tile], end, Word(local));
    return at != end && *at == Word(local) ? at - words : -1;
  });
}

}  // namespace snack
