// The CUDA plan is a pure function of the problem and the card: testable anywhere.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>

#include "plan/cuda_layout.hpp"
#include "snack/core/error.hpp"
#include "snack/plan/plan.hpp"

namespace snack::testing {
namespace {

const CudaCapability kH200{9, 0, 132, 232448, 60 << 20}, kSmall{8, 6, 28, 101376, 3 << 20};

Plan plan(Operation operation, int64_t out, int64_t in, int64_t nnz, int64_t batch, DType dtype = DType::kFloat32,
          Regime regime = Regime::kAuto, const CudaCapability& card = kH200) {
  return make_cuda_plan({operation, make_geometry(out, in, nnz), batch, dtype}, regime, card);
}

TEST(CudaPlan, IsTheSameForTheSameProblem) {
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 5000000, 1), plan(Operation::kSpmm, 10000, 10000, 5000000, 1));
  EXPECT_NE(plan(Operation::kSpmm, 10000, 10000, 5000000, 1), plan(Operation::kSpmm, 10000, 10000, 5000000, 64));
}

TEST(CudaPlan, FitsEveryCardAndProblem) {
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 1}, {1, 65537, 65537}, {1000000, 1000000, 10000000}, {10000, 10000, 5000000},
                                                      {10, 100, 100}, {0, 5, 0}, {5, 0, 0}, {1 << 30, 2000, 1000000}, {3000000, 1024, 100000000}};
  for (const auto& card : {kH200, kSmall})
    for (const auto& [out, in, nnz] : shapes)
      for (const int64_t batch : {0, 1, 3, 8, 33, 257, 70000})
        for (const Operation operation : {Operation::kSpmm, Operation::kSpmmT, Operation::kSddmm, Operation::kSddmmUpdate})
          for (const Regime regime : {Regime::kAuto, Regime::kCoo}) {
            const Plan p = plan(operation, out, in, nnz, batch, DType::kBFloat16, regime, card);
            SCOPED_TRACE(std::string(p.kernel) + " batch " + std::to_string(batch) + " nnz " + std::to_string(nnz));
            EXPECT_GE(p.splits, 1);
            EXPECT_GE(p.batch_chunk, batch == 0 ? 0 : 1);
            EXPECT_LE(p.threads, 1024);
            EXPECT_EQ(p.threads % 32, 0);
            const std::string_view kernel = p.kernel;
            if (kernel == "spmm_stream") { EXPECT_LE(cuda::spmm_shared(p.strips, p.batch_block, p.threads) + 256, card.shared_bytes); }
            if (kernel == "spmm_t_stream") { EXPECT_LE(cuda::spmm_t_shared(p.batch_block, p.threads) + 256, card.shared_bytes); }
            if (kernel == "sddmm_stream") { EXPECT_LE(cuda::sddmm_shared(p.strips, p.batch_block) + 256, card.shared_bytes); }
            // Bounded scratch: one batch block of partial sums may be larger where a feature vector alone is long.
            const int64_t features = kernel == "spmm_batch" ? in + cuda::kPanelCols : operation == Operation::kSpmm ? out : in;
            EXPECT_LE(p.workspace_bytes, std::max<int64_t>(cuda::kWorkspaceBytes + 1024, (p.splits * 4 + 32) * features * p.batch_block + 1024));
          }
}

TEST(CudaPlan, BatchesTakeTheBatchKernel) {
  for (const int64_t batch : {9, 16, 33, 64, 256, 4096}) {
    EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 5000000, batch).kernel, "spmm_batch") << batch;
    EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 5000000, batch, DType::kBFloat16).kernel, "spmm_batch") << batch;
  }
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 5000000, 8).kernel, "spmm_rows");
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 100000, 64).kernel, "spmm_stream");   // no row starts
  EXPECT_EQ(plan(Operation::kSpmm, 10, 1 << 20, 1 << 20, 64).kernel, "spmm_stream");   // too few rows for the panels
  EXPECT_EQ(plan(Operation::kSpmmT, 10000, 10000, 5000000, 4).kernel, "spmm_t_rows");
  EXPECT_EQ(plan(Operation::kSpmmT, 10000, 10000, 1000000, 4).kernel, "spmm_t_stream");  // short segments
  EXPECT_EQ(plan(Operation::kSpmmT, 10000, 10000, 5000000, 64).kernel, "spmm_t_stream");
  // From shared memory where every line is read often and a window fits, else from L2.
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 5000000, 256).windows, 1);
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 1000000, 256).windows, 0);
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 5000000, 256, DType::kFloat32, Regime::kAuto, kSmall).windows, 0);
}

// What spmm_batch takes for granted, on cards of every kind.
TEST(CudaPlan, BatchPlansAreSound) {
  const CudaCapability cards[] = {kH200, kSmall, {8, 0, 108, 166912, 40 << 20}, {12, 0, 170, 101376, 96 << 20}, {8, 0, 1, 49152, 1 << 20}};
  std::mt19937_64 rng(11);
  const auto up_to = [&](double most) { return int64_t(std::exp(std::uniform_real_distribution(0.0, std::log(most))(rng))); };
  int found = 0, staged = 0;
  for (int i = 0; i < 20000; ++i) {
    const int64_t out = up_to(3e6), in = up_to(3e6), batch = up_to(1e5);
    const double density = std::pow(0.5, std::uniform_real_distribution(0.0, 8.0)(rng));
    const DType dtype = i % 2 == 0 ? DType::kFloat32 : DType::kFloat16;
    const CudaCapability& card = cards[rng() % std::size(cards)];
    const Plan p = plan(Operation::kSpmm, out, in, int64_t(double(out) * double(in) * density), batch, dtype, Regime::kAuto, card);
    if (p.kernel != "spmm_batch") continue;
    SCOPED_TRACE(::testing::Message() << out << "x" << in << " density " << density << " batch " << batch << " " << name(dtype) << " sm_" << card.major);
    ++found, staged += p.windows > 0;
    const int64_t bytes = size_of(dtype), panels = (in + cuda::kPanelCols - 1) / cuda::kPanelCols;
    const int64_t chunks = (p.batch_chunk + p.batch_block - 1) / p.batch_block, block_bytes = panels * cuda::panel_bytes(p.batch_block * bytes);
    const bool is_known = p.windows == 0 ? p.lanes == 8 || p.lanes == 4 : p.lanes == 4 || (p.lanes == 2 && bytes == 2);
    ASSERT_TRUE(is_known) << p.lanes << " lanes, " << p.windows << " windows";
    ASSERT_EQ(p.batch_block * bytes, p.lanes * 16 * (p.windows > 0 && p.lanes == 4 ? 2 : 1));
    ASSERT_EQ(p.rows * p.lanes % 32, 0);
    ASSERT_EQ(p.rows * p.lanes * p.groups, p.threads);
    ASSERT_GE(p.threads, 32);
    ASSERT_LE(p.threads, cuda::batch_threads(p.windows > 0));
    ASSERT_LE(p.groups, std::min<int64_t>(panels, cuda::kBatchGroups));
    ASSERT_LE(p.windows, 2);
    ASSERT_LE(cuda::batch_shared(p.batch_block * bytes, p.batch_block, p.rows, p.threads, p.groups * p.windows) + 1024, card.shared_bytes);
    ASSERT_EQ(p.workspace_bytes, chunks * block_bytes);
    ASSERT_LE(p.workspace_bytes, std::max(cuda::kWorkspaceBytes, block_bytes));
    ASSERT_LE(chunks * std::max((out + p.rows - 1) / p.rows, cuda::kPanelTiles * panels), (int64_t{1} << 31) - 1);
    ASSERT_GE(p.batch_chunk, std::min(batch, p.batch_block));
  }
  EXPECT_GT(found, 1000);
  EXPECT_GT(staged, 100);
}

TEST(CudaPlan, SmallMatricesNeedNoSecondLaunch) {
  EXPECT_EQ(plan(Operation::kSpmm, 500, 500, 12500, 1).splits, 1);
  EXPECT_EQ(plan(Operation::kSpmm, 500, 500, 12500, 1).workspace_bytes, 0);
}

TEST(CudaPlan, RefusesInOneSentence) {
  EXPECT_THROW(plan(Operation::kSpmm, 10, 10, 50, 1, DType::kFloat64), Error);
  EXPECT_THROW(plan(Operation::kSpmm, 10, 10, 50, 1, DType::kFloat32, Regime::kPanel), Error);
  EXPECT_THROW(plan(Operation::kSpmm, 10, 10, 50, -1), Error);
  EXPECT_THROW(plan(Operation::kSpmm, 10, 10, 50, 1, DType::kFloat32, Regime::kAuto, {}), Error);
}

TEST(Architectures, RunOnWhatTheyAreFor) {
  EXPECT_TRUE(cuda::runs_on("80 90 90a 120+PTX", 8, 6));
  EXPECT_TRUE(cuda::runs_on("80 90 90a 120+PTX", 9, 0));
  EXPECT_FALSE(cuda::runs_on("80 90 90a 120+PTX", 7, 5));
  EXPECT_FALSE(cuda::runs_on("80 90 90a 120+PTX", 10, 0));
  EXPECT_TRUE(cuda::runs_on("80 90 90a 120+PTX", 12, 1));
  EXPECT_TRUE(cuda::runs_on("80+PTX", 13, 0));
  EXPECT_FALSE(cuda::runs_on("90a", 9, 1));
  EXPECT_FALSE(cuda::runs_on("", 9, 0));
}

}  // namespace
}  // namespace snack::testing
