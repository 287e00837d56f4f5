// rewire of a backend (SNACK_TEST_BACKEND: a header) against the reference, and refusals that change nothing.
#include <gtest/gtest.h>

#include <numeric>

#include SNACK_TEST_BACKEND
#include "snack/core/error.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {
namespace {

void expect_equals_reference(const RewireArgs& args) {
  const RewireResult result = backend::rewire(args), expected = reference::rewire(args);
  EXPECT_EQ(result.pattern.geometry.nnz, args.pattern.geometry.nnz - args.drops + args.grows);
  EXPECT_EQ(result.pattern.index, expected.pattern.index);
  EXPECT_EQ(result.pattern.tile_ptr, expected.pattern.tile_ptr);
  EXPECT_EQ(result.source, expected.source);
}

struct Shape {
  int64_t out, in, nnz;
};

TEST(Rewire, EqualsTheReference) {
  std::mt19937_64 rng(11);
  for (const auto& [out, in, nnz] : {Shape{100, 2100, 9000}, {5, 5, 20}, {3000, 5000, 400}, {300, 1000, 150000}, {1, 1, 1}, {2000, 70000, 90000}}) {
    SCOPED_TRACE(nnz);
    const HostPattern pattern = reference::sample(out, in, nnz, rng());
    std::vector<int64_t> drop(static_cast<size_t>(nnz));
    std::iota(drop.begin(), drop.end(), 0);
    std::shuffle(drop.begin(), drop.end(), rng);
    drop.resize(size_t(nnz / 5));
    const int64_t drops = int64_t(drop.size());
    // Dropped positions are empty: some of them are grown again by the same edit.
    const Positions grown = reference::grow_uniform({pattern.view(), drop.data(), drops}, drops, 99);
    expect_equals_reference({pattern.view(), drop.data(), drops, grown.rows.data(), grown.cols.data(), drops});
    expect_equals_reference({pattern.view(), nullptr, 0, nullptr, nullptr, 0});
  }
}

TEST(Rewire, GrowsAgainWhatItDrops) {
  const HostPattern pattern = pattern_of({{0, 0}, {1, 1025}, {70, 3}}, 100, 2000);
  const std::vector<int64_t> drop = {2, 0, 1}, rows = {70, 0, 1}, cols = {3, 0, 1025};
  expect_equals_reference({pattern.view(), drop.data(), 3, rows.data(), cols.data(), 3});
}

TEST(Rewire, ChangesNnzInBothDirections) {
  const HostPattern pattern = reference::sample(64, 1024, 40, 1);  // narrow
  std::vector<int64_t> drop(20);
  for (int64_t i = 0; i < 20; ++i) drop[size_t(i)] = 2 * i;
  expect_equals_reference({pattern.view(), drop.data(), 20, nullptr, nullptr, 0});  // becomes tall
  const Positions grown = reference::grow_uniform({pattern.view(), nullptr, 0}, 500, 3);
  expect_equals_reference({pattern.view(), nullptr, 0, grown.rows.data(), grown.cols.data(), 500});
  const HostPattern few = reference::sample(200, 3000, 10, 1);  // tall
  const Positions many = reference::grow_uniform({few.view(), nullptr, 0}, 5000, 3);
  expect_equals_reference({few.view(), nullptr, 0, many.rows.data(), many.cols.data(), 5000});  // becomes narrow
  std::vector<int64_t> all(10);
  std::iota(all.begin(), all.end(), 0);
  expect_equals_reference({few.view(), all.data(), 10, nullptr, nullptr, 0});  // becomes empty
  const HostPattern none = reference::sample(200, 3000, 0, 1);
  expect_equals_reference({none.view(), nullptr, 0, many.rows.data(), many.cols.data(), 5000});
}

TEST(Rewire, RefusesBadEdits) {
  const HostPattern pattern = pattern_of({{0, 0}, {1, 1}, {2, 2}}, 3, 3);
  const auto refuses = [&](std::vector<int64_t> drop, std::vector<int64_t> rows, std::vector<int64_t> cols, const std::string& reason) {
    const RewireArgs args{pattern.view(), drop.data(), int64_t(drop.size()), rows.data(), cols.data(), int64_t(rows.size())};
    EXPECT_THROW(reference::rewire(args), Error);
    try {
      backend::rewire(args);
      ADD_FAILURE() << "accepted, expected: " << reason;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  };
  refuses({3}, {}, {}, "slot 3 to drop is outside 0 .. 2");
  refuses({-1}, {}, {}, "slot -1 to drop is outside 0 .. 2");
  refuses({1, 1}, {}, {}, "slot 1 is named twice in drop");
  refuses({}, {1}, {1}, "position (1, 1) to grow is occupied or named twice");
  refuses({}, {0, 0}, {1, 1}, "position (0, 1) to grow is occupied or named twice");
  refuses({0}, {0, 0}, {0, 0}, "position (0, 0) to grow is occupied or named twice");
  refuses({}, {3}, {0}, "position (3, 0) to grow is outside the shape (3, 3)");
  refuses({}, {0}, {-1}, "position (0, -1) to grow is outside the shape (3, 3)");
}

}  // namespace
}  // namespace snack::testing
