// The CUDA plan is a pure function of the problem and the card: testable anywhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <random>
#include <set>
#include <sstream>

#include "plan/cuda_layout.hpp"
#include "snack/core/error.hpp"
#include "snack/plan/costs.hpp"

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

TEST(CudaPlan, SharedMemoryServesTheBatchKernelWhereLinesAreReadOften) {
  const auto windows = [](int64_t nnz, const CudaCapability& card) {
    return make_cuda_plan({Operation::kSpmm, make_geometry(10000, 10000, nnz), 256, DType::kFloat32}, Regime::kAuto, card, "spmm_batch").windows;
  };
  EXPECT_EQ(windows(5000000, kH200), 1);
  EXPECT_EQ(windows(1000000, kH200), 0);
  EXPECT_EQ(windows(5000000, kSmall), 0);
}

// What spmm_batch takes for granted, on cards of every kind.
TEST(CudaPlan, BatchPlansAreSound) {
  const CudaCapability cards[] = {kH200, kSmall, {8, 0, 108, 166912, 40 << 20}, {12, 0, 170, 101376, 96 << 20}, {8, 6, 1, 101376, 1 << 20}};
  std::mt19937_64 rng(11);
  const auto up_to = [&](double most) { return int64_t(std::exp(std::uniform_real_distribution(0.0, std::log(most))(rng))); };
  int found = 0, staged = 0;
  for (int i = 0; i < 20000; ++i) {
    const int64_t out = up_to(3e6), in = up_to(3e6), batch = up_to(1e5);
    const double density = std::pow(0.5, std::uniform_real_distribution(0.0, 8.0)(rng));
    const DType dtype = i % 2 == 0 ? DType::kFloat32 : DType::kFloat16;
    const CudaCapability& card = cards[rng() % std::size(cards)];
    const Problem problem{Operation::kSpmm, make_geometry(out, in, int64_t(double(out) * double(in) * density)), batch, dtype};
    const std::vector<Candidate> all = cuda_candidates(problem, Regime::kAuto, card);
    const auto candidate = std::find_if(all.begin(), all.end(), [](const Candidate& c) { return c.plan.kernel == "spmm_batch"; });
    if (candidate == all.end()) continue;
    const Plan& p = candidate->plan;
    SCOPED_TRACE(::testing::Message() << out << "x" << in << " density " << density << " batch " << batch << " " << name(dtype) << " sm_" << card.major);
    ++found, staged += p.windows > 0;
    const int64_t bytes = size_of(dtype), panels = (in + cuda::kPanelCols - 1) / cuda::kPanelCols;
    const int64_t chunks = (p.batch_chunk + p.batch_block - 1) / p.batch_block, block_bytes = panels * cuda::panel_bytes(p.batch_block * bytes);
    const bool is_known = p.windows == 0 ? p.lanes == 8 || p.lanes == 4 : p.lanes == 4 || (p.lanes == 2 && bytes == 2);
    ASSERT_TRUE(is_known) << p.lanes << " lanes, " << p.windows << " windows";
    ASSERT_EQ(p.batch_block * bytes, p.lanes * 16 * (p.windows > 0 && p.lanes == 4 ? 2 : 1));
    ASSERT_EQ(p.rows * p.lanes % 32, 0);
    ASSERT_EQ(p.rows * p.lanes * p.groups * p.parts, p.threads);
    ASSERT_EQ(p.parts & (p.parts - 1), 0);
    ASSERT_GE(p.threads, 32);
    ASSERT_LE(p.threads, cuda::kBatchThreads);
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

// ---- what is chosen, and by what ----

constexpr Operation kOperations[] = {Operation::kSpmm, Operation::kSpmmT, Operation::kSddmm};
const CudaCapability kCards[] = {kH200, kSmall, {8, 0, 108, 166912, 40 << 20}, {12, 0, 170, 101376, 96 << 20}, {8, 6, 1, 101376, 1 << 20}};

// Calls f(problem, card) for problems of every kind.
template <class F>
void for_problems(F&& f) {
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 1}, {1, 65537, 65537}, {1000000, 1000000, 10000000}, {10000, 10000, 5000000}, {10000, 10000, 1000000},
                                                      {10, 100, 100}, {0, 5, 0}, {5, 0, 0}, {1 << 30, 2000, 1000000}, {3000000, 1024, 100000000}, {512, 512, 20000}};
  for (const CudaCapability& card : kCards)
    for (const auto& [out, in, nnz] : shapes)
      for (const int64_t batch : {0, 1, 2, 3, 5, 8, 33, 257, 70000})
        for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
          for (const Operation operation : kOperations) {
            SCOPED_TRACE(::testing::Message() << name(operation) << " " << out << "x" << in << " nnz " << nnz << " batch " << batch << " " << name(dtype) << " sm_" << card.major);
            f(Problem{operation, make_geometry(out, in, nnz), batch, dtype}, card);
          }
}

// Shared memory of a block, but for what is static.
int64_t shared_bytes(const Problem& p, const Plan& plan) {
  const int64_t bytes = size_of(p.dtype), panels = p.geometry.panels(), width = plan.batch_block;
  if (plan.kernel == "spmm_rows") return cuda::rows_shared(bytes, int(width), (panels + plan.splits - 1) / plan.splits, plan.rows);
  if (plan.kernel == "spmm_batch") return cuda::batch_shared(width * bytes, width, plan.rows, plan.threads, plan.groups * plan.windows);
  if (plan.kernel == "spmm_stream") return cuda::spmm_shared(plan.strips, width, plan.threads);
  if (plan.kernel == "spmm_t_rows") return cuda::rows_t_shared(width, plan.threads) + 4 * (cuda::kStagedRows + 1);
  if (plan.kernel == "spmm_t_stream") return cuda::spmm_t_shared(width, plan.threads);
  if (plan.kernel == "spmm_t_batch") return cuda::batch_t_shared(width, bytes, plan.strips, plan.slots) + 1024;
  if (plan.kernel == "sddmm_batch") return cuda::sddmm_batch_shared(width, bytes, plan.slots) + 256;
  if (plan.kernel == "sddmm_chunks") return cuda::chunks_shared(bytes, int(width));
  if (plan.kernel == "sddmm_stream") return cuda::sddmm_shared(plan.strips, width);
  return 0;
}

TEST(CudaPlan, EveryCandidateFitsEveryCard) {
  std::set<std::string_view> seen;
  for_problems([&](const Problem& p, const CudaCapability& card) {
    for (const Regime regime : {Regime::kAuto, Regime::kCoo}) {
      const std::vector<Candidate> all = cuda_candidates(p, regime, card);
      ASSERT_FALSE(all.empty());
      for (const auto& [plan, us] : all) {
        SCOPED_TRACE(std::string(plan.kernel));
        seen.insert(plan.kernel);
        ASSERT_EQ(plan, make_cuda_plan(p, plan.regime, card, plan.kernel));
        ASSERT_EQ(plan.regime, regime == Regime::kCoo ? Regime::kCoo : Regime::kStream);
        ASSERT_GE(plan.splits, 1);
        ASSERT_GE(plan.threads, 32);
        ASSERT_LE(plan.threads, plan.kernel == "spmm_t_rows" ? cuda::rows_t_threads(plan.batch_block) : 1024);
        ASSERT_EQ(plan.threads % 32, 0);
        ASSERT_LE(shared_bytes(p, plan) + 256, card.shared_bytes);
        ASSERT_GE(plan.batch_chunk, std::min<int64_t>(p.batch, 1));
        if (plan.kernel == "spmm_t_batch") {
          ASSERT_TRUE(plan.strips >= 1 && plan.strips <= cuda::kBatchStrips) << plan.strips;
          ASSERT_TRUE(plan.slots >= cuda::kPanelCols && plan.slots + cuda::kPanelCols <= 65535) << plan.slots;
          ASSERT_EQ(plan.threads, cuda::batch_t_threads(plan.batch_block));
        }
        if (plan.kernel == "sddmm_batch") { ASSERT_TRUE(plan.slots >= cuda::kPanelCols || p.batch <= plan.batch_block) << plan.slots; }
        ASSERT_GE(us, 0);
        const int64_t features = plan.kernel == "spmm_batch" ? p.geometry.in + cuda::kPanelCols : std::max(p.geometry.in, p.geometry.out);
        ASSERT_LE(plan.workspace_bytes, std::max<int64_t>(cuda::kWorkspaceBytes + 1024, (plan.splits * 4 + 32) * features * plan.batch_block + 1024));
        for (const double term : cost_terms(p, plan, card)) ASSERT_TRUE(std::isfinite(term) && term >= 0) << term;
      }
    }
  });
  EXPECT_EQ(seen, std::set<std::string_view>(std::begin(kCudaKernels), std::end(kCudaKernels)));
}

TEST(CudaPlan, TheFastestIsTakenAndTheNextIsAnother) {
  int compared = 0;
  for_problems([&](const Problem& p, const CudaCapability& card) {
    const std::vector<Candidate> all = cuda_candidates(p, Regime::kAuto, card);
    ASSERT_EQ(make_cuda_plan(p, Regime::kAuto, card), all[0].plan);
    for (size_t i = 1; i < all.size(); ++i, ++compared) {
      ASSERT_LE(all[i - 1].predicted_us, all[i].predicted_us);
      ASSERT_NE(all[i - 1].plan.kernel, all[i].plan.kernel);
    }
  });
  EXPECT_GT(compared, 1000);
}

TEST(CudaPlan, PredictionsGrowWithTheConnections) {
  for (const Operation operation : kOperations)
    for (const int64_t batch : {1, 4, 16, 256})
      for (const std::string_view kernel : kCudaKernels) {
        double before = 0;
        int variant = 0;
        for (int64_t nnz = 1 << 20; nnz < 80000000; nnz += nnz / 7) {
          const Problem p{operation, make_geometry(10000, 10000, nnz), batch, DType::kFloat32};
          for (const auto& [plan, us] : cuda_candidates(p, Regime::kAuto, kH200))
            if (plan.kernel == kernel) {
              if (cost_form(p, plan).variant != variant) before = 0, variant = cost_form(p, plan).variant;
              EXPECT_GE(us, 0.8 * before) << kernel << " batch " << batch << " nnz " << nnz;  // plans change by steps
              before = std::max(before, us);
            }
        }
      }
}

TEST(CudaPlan, FollowsTheKnownWinners) {
  const auto kernel = [](Operation operation, int64_t nnz, int64_t batch) { return plan(operation, 10000, 10000, nnz, batch).kernel; };
  EXPECT_EQ(kernel(Operation::kSpmm, 5000000, 1), "spmm_rows");
  EXPECT_EQ(kernel(Operation::kSpmm, 5000000, 4), "spmm_rows");
  EXPECT_EQ(kernel(Operation::kSpmm, 5000000, 64), "spmm_batch");
  EXPECT_EQ(kernel(Operation::kSpmmT, 5000000, 1), "spmm_t_rows");
  EXPECT_EQ(kernel(Operation::kSddmm, 5000000, 1), "sddmm_chunks");
  EXPECT_EQ(kernel(Operation::kSpmmT, 5000000, 64), "spmm_t_batch");
  EXPECT_EQ(kernel(Operation::kSddmm, 5000000, 64), "sddmm_batch");
  EXPECT_EQ(plan(Operation::kSpmm, 10000, 10000, 100000, 64).kernel, "spmm_stream");  // no row starts
}

TEST(CudaPlan, AKernelCanBeForced) {
  const Problem p{Operation::kSpmm, make_geometry(10000, 10000, 5000000), 16, DType::kFloat32};
  for (const std::string_view kernel : {"spmm_rows", "spmm_batch", "spmm_stream", "spmm_coo"}) EXPECT_EQ(make_cuda_plan(p, Regime::kAuto, kH200, kernel).kernel, kernel);
  EXPECT_EQ(make_cuda_plan(p, Regime::kAuto, kH200, "spmm_coo").regime, Regime::kCoo);
  for (const std::string_view kernel : {"spmm_fixed", "sddmm_chunks", "spmm"}) EXPECT_THROW(make_cuda_plan(p, Regime::kAuto, kH200, kernel), Error) << kernel;
}

// ---- tables ----

const char* kTable = R"(snack-costs 1
# of a card that has spmm_stream at its best
card Some card
kernels 0123456789abcdef
capability 9 0 132 232448 62914560 4000
copy_tb_s 2.0
spmm_rows 4 1 0 100 0 0 0 0 0
spmm_stream 4 1 0 1 0 0 0 0.5 0  # half a microsecond a megabyte
)";

TEST(CostTable, OfTheUserChangesTheChoice) {
  const CostTable table = parse_costs(kTable);
  EXPECT_EQ(table.card, "Some card");
  EXPECT_EQ(table.kernels, "0123456789abcdef");
  CudaCapability card{9, 0, 132, 232448, 60 << 20, 4000, &table};
  EXPECT_EQ(card.l2_bytes, table.capability.l2_bytes);
  const Problem p{Operation::kSpmm, make_geometry(10000, 10000, 5000000), 1, DType::kFloat32};
  EXPECT_EQ(make_cuda_plan(p, Regime::kAuto, kH200).kernel, "spmm_rows");
  EXPECT_EQ(make_cuda_plan(p, Regime::kAuto, card).kernel, "spmm_stream");
  const std::vector<Candidate> all = cuda_candidates(p, Regime::kAuto, card);
  EXPECT_DOUBLE_EQ(all[0].predicted_us, double(all[0].plan.splits > 1 ? 2 : 1) + 15.0);  // 30 MB
  EXPECT_DOUBLE_EQ(all[1].predicted_us, 100.0);
  EXPECT_DOUBLE_EQ(floor_us(30e6, card), 15.0);
  // A card of half the bandwidth, which nobody measured.
  card.memory_gb_s = 2000;
  EXPECT_DOUBLE_EQ(floor_us(30e6, card), 30.0);
  EXPECT_DOUBLE_EQ(predict_us(p, all[0].plan, card), all[0].predicted_us);  // from L2
  card.l2_bytes = 0;
  EXPECT_DOUBLE_EQ(predict_us(p, all[0].plan, card), 30.0);  // no sooner than the bytes can come
  // What the table lacks is known to nobody, and is still computed by somebody.
  const Problem half{Operation::kSpmm, p.geometry, 1, DType::kFloat16};
  EXPECT_TRUE(std::isinf(cuda_candidates(half, Regime::kAuto, card)[0].predicted_us));
  EXPECT_EQ(make_cuda_plan(half, Regime::kAuto, card).kernel, "spmm_rows");
}

TEST(CostTable, RefusesWhatIsNone) {
  const std::string good = kTable;
  const auto with = [&](const std::string& line) { return good + line + "\n"; };
  for (const std::string& bad : {std::string(), std::string("snack-costs 2\n"), good.substr(0, 60), good.substr(good.find('\n') + 1), with("spmm_rows 4 1 0 1 2"),
                                 with("spmm_rows 4 1 0 1 2 3 4 5 -6"), with("spmm_rows 3 1 0 1 2 3 4 5 6"), with("spmm_rows 4 0 0 1 2 3 4 5 6"), with("spmm_rows 4 1 2 1 2 3 4 5 6"),
                                 with("nothing 4 1 0 1 2 3 4 5 6"), with("spmm_rows 4 1 0 1 2 3 4 5 nan"), with("copy_tb_s 0")})
    EXPECT_THROW(parse_costs(bad), Error) << bad;
}

TEST(CostTable, OfTheLibraryKnowsEveryStreamKernel) {
  EXPECT_GT(built_in_costs().copy_tb_s, 0);
  for (const Operation operation : kOperations)
    for (const int64_t batch : {1, 2, 3, 5, 8, 16, 64, 256})
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
        for (const auto& [plan, us] : cuda_candidates({operation, make_geometry(4096, 4096, 800000), batch, dtype}, Regime::kAuto, kH200))
          EXPECT_TRUE(std::isfinite(us)) << plan.kernel << " batch " << batch << " " << name(dtype);
}

TEST(CostTable, ExplainsForPeople) {
  const Problem p{Operation::kSpmm, make_geometry(10000, 10000, 5000000), 1, DType::kFloat32};
  const std::string text = explain(cuda_candidates(p, Regime::kAuto, kH200), kH200);
  EXPECT_TRUE(text.starts_with("kernel spmm_rows: stream, ")) << text;
  std::ostringstream floor;
  floor << "floor " << std::fixed << std::setprecision(1) << floor_us(30e6, kH200) << " us";
  for (const std::string& words : {std::string("workspace 0 bytes"), std::string("format 30000000 bytes"), std::string("predicted "), floor.str(), std::string("runner-up spmm_stream ")})
    EXPECT_NE(text.find(words), std::string::npos) << text;
}

TEST(CudaPlan, SmallMatricesNeedNoSecondLaunch) {
  EXPECT_EQ(plan(Operation::kSpmm, 500, 500, 12500, 1).splits, 1);
  EXPECT_EQ(plan(Operation::kSpmm, 500, 500, 12500, 1).workspace_bytes, 0);
}

// With the pattern they would overfill the cache, and a call would find nothing again.
TEST(CudaPlan, ValuesOfALargeLayerLeaveTheCacheFirst) {
  const auto evicts = [](Operation operation, int64_t nnz, int64_t batch) {
    return make_cuda_plan({operation, make_geometry(10000, 10000, nnz), batch, DType::kFloat32}, Regime::kAuto, kH200).evict_first;
  };
  for (const Operation operation : {Operation::kSpmm, Operation::kSpmmT, Operation::kSddmmUpdate}) {
    EXPECT_FALSE(evicts(operation, 5000000, 4)) << name(operation);
    EXPECT_TRUE(evicts(operation, 10000000, 4)) << name(operation);
  }
  EXPECT_TRUE(evicts(Operation::kSpmm, 50000000, 4));
  EXPECT_FALSE(evicts(Operation::kSpmm, 10000000, 8));         // of two widths of the batch, one finds what the other read
  EXPECT_FALSE(evicts(Operation::kSddmmUpdate, 50000000, 4));  // what is written comes back anyway
  EXPECT_FALSE(evicts(Operation::kSddmm, 10000000, 4));        // reads no values
  const Problem p{Operation::kSpmm, make_geometry(10000, 10000, 10000000), 1, DType::kFloat32};
  EXPECT_NE(explain(cuda_candidates(p, Regime::kAuto, kH200), kH200).find("values leave the L2 cache first"), std::string::npos);
}

// Two copies of x and two tables lie in shared memory together, and there are no more blocks than places.
TEST(CudaPlan, TwoBlocksOfSpmmRowsFitWhereTheyArePlanned) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const auto& [out, in] : std::vector<std::array<int64_t, 2>>{{30000, 18432}, {40000, 14336}, {20000, 22528}, {10000, 10000}}) {
      const Problem p{Operation::kSpmm, make_geometry(out, in, out * in / 10), 1, dtype};
      const Plan plan = make_cuda_plan(p, Regime::kAuto, kH200, "spmm_rows");
      const int64_t blocks = (out + plan.rows - 1) / plan.rows;
      SCOPED_TRACE(::testing::Message() << out << "x" << in << " " << name(dtype) << ": " << to_string(plan));
      EXPECT_EQ(plan.splits, 1);
      EXPECT_GT(blocks, kH200.multiprocessors);
      EXPECT_LE(blocks, 2 * kH200.multiprocessors);
      EXPECT_LE(2 * (shared_bytes(p, plan) + 512 + 1024), kH200.shared_bytes + 1024);  // static, and what the system keeps of each
    }
}

TEST(CudaPlan, TwoBlocksShareAMultiprocessorWhereThereIsMuchToRead) {
  const auto rows = [](int64_t n, int64_t nnz, DType dtype) { return plan(Operation::kSpmm, n, n, nnz, 1, dtype).rows; };
  EXPECT_EQ(rows(20000, 20000000, DType::kFloat32), 76);
  EXPECT_EQ(rows(20000, 8000000, DType::kFloat32), 76);
  EXPECT_EQ(rows(20000, 4000000, DType::kFloat32), 152);
  EXPECT_EQ(rows(10000, 5000000, DType::kFloat32), 76);
  EXPECT_EQ(rows(10000, 5000000, DType::kBFloat16), 38);
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
