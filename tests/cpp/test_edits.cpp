// Sampling a topology: the CPU backend against the reference. (rewire: test_rewire.cpp; rules that choose: test_select.cpp)
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

}  // namespace snack::testing
