// Rules that choose connections: the CPU backend against the reference. (rewire: test_rewire.cpp)
#include <gtest/gtest.h>

#include "problem.hpp"
#include "snack/core/error.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {
namespace {

bool equal(const HostPattern& a, const HostPattern& b) {
  return a.geometry.nnz == b.geometry.nnz && a.index == b.index && a.tile_ptr == b.tile_ptr;
}

struct Shape {
  int64_t out, in, nnz;
};
const Shape kShapes[] = {{100, 2100, 9000}, {5, 5, 20}, {3000, 5000, 400}, {300, 1000, 150000}, {1, 1, 1}};

}  // namespace

TEST(Sample, EqualsTheReferenceAtAnyDensity) {
  for (const auto& [out, in, nnz] : {Shape{40, 1100, 900}, {40, 1100, 30000}, {40, 1100, 44000}, {40, 1100, 0}, {3, 7, 11}, {3, 7, 10}, {0, 0, 0}})
    EXPECT_TRUE(equal(cpu::sample(out, in, nnz, 5, threads(3)), reference::sample(out, in, nnz, 5))) << nnz;
  EXPECT_FALSE(equal(cpu::sample(40, 1100, 900, 5, serial()), cpu::sample(40, 1100, 900, 6, serial())));
}

TEST(Sample, IsUniform) {
  // Every one of 64 positions is drawn 1/4 of the time: 4000 draws, 6 standard deviations.
  std::vector<int> count(64);
  for (uint64_t key = 0; key < 4000; ++key) {
    const HostPattern pattern = cpu::sample(8, 8, 16, key, serial());
    std::vector<int32_t> rows(16), cols(16);
    unpack(pattern.view(), rows.data(), cols.data(), serial());
    for (int k = 0; k < 16; ++k) ++count[size_t(rows[k] * 8 + cols[k])];
  }
  for (const int c : count) EXPECT_NEAR(c, 1000, 6 * std::sqrt(4000 * 0.25 * 0.75));
}

TEST(Edits, EqualTheReference) {
  std::mt19937_64 rng(11);
  for (const auto& [out, in, nnz] : kShapes) {
    SCOPED_TRACE(nnz);
    const HostPattern pattern = cpu::sample(out, in, nnz, rng(), serial());
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
      Dense values(1, nnz, dtype, rng);
      with_type(dtype, [&](auto element) {  // ties
        using T = decltype(element);
        T* v = static_cast<T*>(const_cast<void*>(values.view.data));
        for (int64_t i = 0; i + 5 < nnz; i += 3) v[i] = v[i + 5];
      });
      const int64_t k = nnz / 5;
      const SelectArgs select{dtype, values.view.data, nnz, k, Sign::kAny};
      const std::vector<int64_t> drop = cpu::select_smallest(select);
      EXPECT_EQ(drop, reference::select_smallest(select));
      for (const Sign sign : {Sign::kPositive, Sign::kNegative}) {
        SelectArgs signed_select = select;
        signed_select.sign = sign;
        signed_select.k = nnz / 20;
        EXPECT_EQ(cpu::select_smallest(signed_select), reference::select_smallest(signed_select));
      }

      const EmptyPositions empty{pattern.view(), drop.data(), k};
      const Positions grown = cpu::grow_uniform(empty, k, 99);
      const Positions grown_ref = reference::grow_uniform(empty, k, 99);
      EXPECT_EQ(grown.rows, grown_ref.rows);
      EXPECT_EQ(grown.cols, grown_ref.cols);
    }
  }
}

TEST(GrowGradient, EqualsTheReferenceWithTies) {
  std::mt19937_64 rng(5);
  for (const auto& [out, in, nnz] : {Shape{60, 1500, 9000}, {1, 9, 3}, {700, 50, 100}}) {
    const HostPattern pattern = cpu::sample(out, in, nnz, rng(), serial());
    // Small integers: exact products, many ties.
    std::vector<double> x(size_t(4 * in)), dy(size_t(4 * out));
    for (double& v : x) v = double(int64_t(rng() % 5) - 2);
    for (double& v : dy) v = double(int64_t(rng() % 5) - 2);
    const std::vector<int64_t> drop = {0, nnz - 1};
    const GrowGradientArgs args{{pattern.view(), drop.data(), 2}, {dy.data(), DType::kFloat64, 4, out, out, 1},
                                {x.data(), DType::kFloat64, 4, in, in, 1}, std::min<int64_t>(5, out * in - nnz)};
    const Positions grown = cpu::grow_gradient(args, plain_gemm(), threads(2)), expected = reference::grow_gradient(args);
    EXPECT_EQ(grown.rows, expected.rows);
    EXPECT_EQ(grown.cols, expected.cols);
  }
}

TEST(Select, RefusesMoreThanThereAre) {
  const float values[] = {1, -2, 3};
  EXPECT_THROW(cpu::select_smallest({DType::kFloat32, values, 3, 4, Sign::kAny}), Error);
  EXPECT_THROW(cpu::select_smallest({DType::kFloat32, values, 3, 2, Sign::kNegative}), Error);
  const HostPattern full = cpu::sample(2, 2, 4, 1, serial());
  EXPECT_THROW(cpu::grow_uniform({full.view(), nullptr, 0}, 1, 1), Error);
}

TEST(Select, NanIsDroppedLast) {
  const float values[] = {NAN, -0.5f, INFINITY, 0.0f, -0.0f};
  EXPECT_EQ(cpu::select_smallest({DType::kFloat32, values, 5, 3, Sign::kAny}), (std::vector<int64_t>{1, 3, 4}));
  EXPECT_EQ(cpu::select_smallest({DType::kFloat32, values, 5, 4, Sign::kAny}), (std::vector<int64_t>{1, 2, 3, 4}));
}

}  // namespace snack::testing
