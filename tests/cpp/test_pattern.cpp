#include <gtest/gtest.h>

#include <cstring>

#include "problem.hpp"
#include "snack/core/error.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {

TEST(SlotKey, SortsByPanelRowColumn) {
  EXPECT_LT(slot_key(5, 1023), slot_key(0, 1024));
  EXPECT_LT(slot_key(0, 1023), slot_key(1, 0));
  EXPECT_LT(slot_key(1, 3), slot_key(1, 4));
  const SlotKey far = slot_key(kMaxExtent - 1, kMaxExtent - 1);
  EXPECT_EQ(key_row(far), kMaxExtent - 1);
  EXPECT_EQ(key_col(far), kMaxExtent - 1);
}

TEST(Geometry, PackingFollowsTheMeanTile) {
  EXPECT_EQ(make_geometry(64, 1024, 32).packing, Packing::kNarrow);
  EXPECT_EQ(make_geometry(64, 1024, 31).packing, Packing::kTall);
  EXPECT_EQ(make_geometry(1000000, 1000000, 10000000).packing, Packing::kTall);
  EXPECT_EQ(make_geometry(0, 7, 0).tiles(), 0);
}

TEST(Geometry, IndexStaysWithinItsBound) {
  // 12 bytes a slot + 8 * (out + in) at any shape.
  const int64_t shapes[][3] = {{1000000, 1000000, 10000000}, {kMaxExtent, 3, 1000}, {3, kMaxExtent, 1000}, {kMaxExtent, kMaxExtent, 10},
                               {10000, 10000, 5000000}, {64, 1024, 32}, {4096, 4096, 8192}};
  for (const auto& [out, in, nnz] : shapes) {
    const Geometry g = make_geometry(out, in, nnz);
    EXPECT_LE(nnz * index_bytes(g.packing) + 8 * g.pointer_words(), 12 * nnz + 8 * (out + in)) << out << " " << in;
  }
}

TEST(Geometry, RowStartsCostAtMostHalfAByteASlot) {
  std::mt19937_64 rng(2);
  for (int i = 0; i < 20000; ++i) {
    const int64_t out = 1 + rng() % (1 << rng() % 18), in = 1 + rng() % (1 << rng() % 18);
    const Geometry g = make_geometry(out, in, int64_t(rng() % uint64_t(out * in + 1)));
    const int64_t bytes = 8 * (g.pointer_words() - g.tiles() - 1);
    EXPECT_EQ(bytes > 0, g.has_row_starts());
    EXPECT_LE(bytes, g.nnz / 2 + 8);
  }
}

TEST(Geometry, RefusesImpossibleShapes) {
  EXPECT_THROW(make_geometry(-1, 3, 0), Error);
  EXPECT_THROW(make_geometry(kMaxExtent + 1, 3, 0), Error);
  EXPECT_THROW(make_geometry(2, 3, 7), Error);
}

TEST(Pattern, UnpackInvertsEncode) {
  std::mt19937_64 rng(1);
  for (const auto& [out, in, nnz] : {std::array<int64_t, 3>{100, 3000, 9000}, {1, 5000, 60}, {5000, 1, 60}, {70000, 2100, 300}, {7, 7, 49}}) {
    std::set<std::pair<int64_t, int64_t>> positions;
    while (int64_t(positions.size()) < nnz) positions.emplace(rng() % out, rng() % in);
    const HostPattern pattern = pattern_of(positions, out, in);
    std::vector<int32_t> rows(nnz), cols(nnz);
    unpack(pattern.view(), rows.data(), cols.data(), threads(3));
    std::set<std::pair<int64_t, int64_t>> seen;
    for (int64_t k = 0; k < nnz; ++k) {
      seen.emplace(rows[k], cols[k]);
      EXPECT_EQ(find_slot(pattern.view(), slot_key(rows[k], cols[k])), k);
      if (k > 0) {
        EXPECT_LT(slot_key(rows[k - 1], cols[k - 1]), slot_key(rows[k], cols[k]));
      }
    }
    EXPECT_EQ(seen, positions);
  }
}

TEST(Pattern, RowStartsAreWhereRowsBegin) {
  for (const auto& [out, in, nnz] : {std::array<int64_t, 3>{100, 3000, 9000}, {64, 1024, 65536}, {129, 1025, 4000}, {1, 5000, 400}, {5000, 8, 30000}}) {
    const HostPattern pattern = reference::sample(out, in, nnz, 5);
    const PatternView view = pattern.view();
    ASSERT_NE(view.row_starts(), nullptr);
    std::vector<SlotKey> keys(size_t(nnz) + 1);
    decode_keys(view, 0, nnz, keys.data());
    for (int64_t panel = 0; panel < view.geometry.panels(); ++panel)
      for (int64_t row = 0; row < out; ++row) {
        const int64_t slot = std::lower_bound(keys.begin(), keys.end() - 1, slot_key(row, panel * kTileCols)) - keys.begin();
        uint16_t start;
        std::memcpy(&start, view.row_starts() + panel * out + row, sizeof start);
        ASSERT_EQ(view.tile_ptr[panel * view.geometry.strips() + row / 64] + start, slot) << panel << " " << row;
      }
  }
  EXPECT_EQ(reference::sample(1000, 1000, 3000, 5).view().row_starts(), nullptr);  // too few slots a segment
}

TEST(Pattern, FindSlotSaysAbsent) {
  const HostPattern pattern = pattern_of({{0, 0}, {2, 1500}, {63, 1023}}, 64, 2000);
  EXPECT_EQ(find_slot(pattern.view(), slot_key(0, 1)), -1);
  EXPECT_EQ(find_slot(pattern.view(), slot_key(63, 1999)), -1);
  EXPECT_EQ(find_slot(pattern.view(), slot_key(2, 1500)), 2);
}

TEST(Pattern, SortCooIsStableAndChecksIndices) {
  const int64_t rows[] = {1, 0, 1}, cols[] = {0, 5, 0}, bad[] = {0, 9, 0}, negative[] = {0, -1, 0};
  const SortedCoo sorted = sort_coo(rows, cols, 3, 2, 6);
  EXPECT_EQ(sorted.order, (std::vector<int64_t>{1, 0, 2}));
  EXPECT_THROW(sort_coo(rows, bad, 3, 2, 6), Error);
  EXPECT_THROW(sort_coo(negative, cols, 3, 2, 6), Error);
}

}  // namespace snack::testing
