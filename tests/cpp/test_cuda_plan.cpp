// The CUDA plan is a pure function of the problem and the card: testable anywhere.
#include <gtest/gtest.h>

#include <array>

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
        for (const Operation operation : {Operation::kSpmm, Operation::kSpmmT, Operation::kSddmm})
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
            const int64_t features = operation == Operation::kSpmm ? out : in;
            EXPECT_LE(p.workspace_bytes, std::max<int64_t>(cuda::kWorkspaceBytes + 1024, (p.splits * 4 + 32) * features * p.batch_block + 1024));
          }
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
