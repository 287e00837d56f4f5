#include <gtest/gtest.h>

#include "problem.hpp"
#include "snack/core/error.hpp"

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
