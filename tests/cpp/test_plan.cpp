#include <gtest/gtest.h>

#include "snack/core/error.hpp"
#include "snack/plan/plan.hpp"

namespace snack {
namespace {

Problem problem(int64_t batch, double density, DType dtype = DType::kFloat32) {
  return {Operation::kSpmm, make_geometry(2048, 2048, int64_t(density * 2048 * 2048)), batch, dtype};
}

}  // namespace

TEST(Plan, StreamsWhatIsSparseOrSmall) {
  EXPECT_EQ(make_cpu_plan(problem(1, 0.9), Regime::kAuto, {2, true}).regime, Regime::kStream);
  EXPECT_EQ(make_cpu_plan(problem(256, 0.05), Regime::kAuto, {2, true}).regime, Regime::kStream);
  EXPECT_EQ(make_cpu_plan(problem(1024, 0.9), Regime::kAuto, {2, true}).regime, Regime::kPanel);
  EXPECT_EQ(make_cpu_plan(problem(1024, 0.9), Regime::kAuto, {2, false}).regime, Regime::kStream);
}

TEST(Plan, NeverDecodesHyperSparseLayers) {
  const Problem p{Operation::kSpmm, make_geometry(1000000, 1000000, 10000000), 4096, DType::kFloat32};
  EXPECT_EQ(make_cpu_plan(p, Regime::kAuto, {2, true}).regime, Regime::kStream);
}

TEST(Plan, PanelsHoldAtMostAMebibyte) {
  const Plan plan = make_cpu_plan(problem(256, 0.9), Regime::kPanel, {2, true});
  EXPECT_EQ(plan.panel_rows, 128);
  EXPECT_EQ(plan.panel_rows * 2048 * 4, 1 << 20);
}

TEST(Plan, IsAComparablePrintableValue) {
  EXPECT_EQ(make_cpu_plan(problem(64, 0.1), Regime::kAuto, {2, true}), make_cpu_plan(problem(64, 0.1), Regime::kAuto, {2, true}));
  EXPECT_NE(to_string(make_cpu_plan(problem(64, 0.1), Regime::kAuto, {2, true})).find("stream"), std::string::npos);
}

TEST(Plan, RefusesWhatTheCpuDoesNotHave) {
  EXPECT_THROW(make_cpu_plan(problem(64, 0.1), Regime::kTensor, {2, true}), Error);
  EXPECT_THROW(make_cpu_plan(problem(64, 0.1), Regime::kCoo, {2, true}), Error);
  EXPECT_THROW(make_cpu_plan(problem(64, 0.1), Regime::kPanel, {2, false}), Error);
}

}  // namespace snack
