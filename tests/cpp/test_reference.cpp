// The specification against matrices small enough to check by hand.
#include <gtest/gtest.h>

#include "problem.hpp"

namespace snack::testing {
namespace {

// W = [[2, 0, 3], [0, 0, 0], [0, 5, 7]]; slot order is by row here, since all columns are in one panel.
const HostPattern kPattern = pattern_of({{0, 0}, {0, 2}, {2, 1}, {2, 2}}, 3, 3);
const float kValues[] = {2, 3, 5, 7};

MatrixView view(const float* data, int64_t rows, int64_t cols) { return {data, DType::kFloat32, rows, cols, cols, 1}; }

}  // namespace

TEST(Reference, Spmm) {
  const float x[] = {1, 10, 100, -1, 0, 2}, bias[] = {0.5, 1, -1};
  float y[6];
  reference::spmm({kPattern.view(), DType::kFloat32, kValues, view(x, 2, 3), bias, y});
  const float expected[] = {2 + 300 + 0.5f, 1, 50 + 700 - 1, -2 + 6 + 0.5f, 1, 14 - 1};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(y[i], expected[i]);
}

TEST(Reference, SpmmT) {
  const float dy[] = {1, 10, 100};
  float dx[3];
  reference::spmm_t({kPattern.view(), DType::kFloat32, kValues, view(dy, 1, 3), dx});
  const float expected[] = {2, 500, 3 + 700};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(dx[i], expected[i]);
}

TEST(Reference, Sddmm) {
  const float dy[] = {1, 10, 100, 2, 20, 200}, x[] = {3, 4, 5, 6, 7, 8};
  float dvalues[4];
  reference::sddmm({kPattern.view(), DType::kFloat32, view(dy, 2, 3), view(x, 2, 3), dvalues});
  const float expected[] = {1 * 3 + 2 * 6, 1 * 5 + 2 * 8, 100 * 4 + 200 * 7, 100 * 5 + 200 * 8};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(dvalues[i], expected[i]);
}

TEST(Reference, StridesOfAnyKind) {
  const float column[] = {1, 10, 100, -1, 0, 2};  // x is stored column by column: x[b][c] = column[c * 2 + b]
  float y[6];
  const MatrixView x{column, DType::kFloat32, 2, 3, 1, 2};
  reference::spmm({kPattern.view(), DType::kFloat32, kValues, x, nullptr, y});
  EXPECT_EQ(y[0], 2 * 1 + 3 * 0);
  EXPECT_EQ(y[3], 2 * 10 + 3 * 2);
}

}  // namespace snack::testing
