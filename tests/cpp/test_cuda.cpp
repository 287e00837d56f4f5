// What only a card can get wrong: repeatability, capture, streams, bad arguments. Products and rewire: test_products.cpp,
// test_rewire.cpp with backend_cuda.hpp.
#include <gtest/gtest.h>

#include "backend_cuda.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {
namespace {

using backend::check;
using backend::DeviceMatrix;
using backend::DevicePatternCopy;
using backend::Memory;

// spmm of one problem whose operands stay on the card.
struct Bench {
  HostPattern host;
  DType dtype;
  DevicePatternCopy pattern;
  Dense values_host, x_host;
  Memory values, y;
  DeviceMatrix x;
  Plan plan;
  Memory workspace;

  Bench(int64_t out, int64_t in, int64_t nnz, int64_t batch, DType dtype, std::mt19937_64& rng)
      : host(reference::sample(out, in, nnz, rng())), dtype(dtype), pattern(host.view()), values_host(1, nnz, dtype, rng),
        x_host(batch, in, dtype, rng), values(Memory::copy_of(values_host.view.data, nnz * size_of(dtype))), y(batch * out * size_of(dtype)),
        x(x_host.view), plan(make_cuda_plan({Operation::kSpmm, host.geometry, batch, dtype}, Regime::kAuto, cuda::capability(cuda::current_device()))),
        workspace(plan.workspace_bytes) {}

  SpmmArgs args() { return {pattern.view(), dtype, values.data(), x.view(), nullptr, y.data()}; }
  void run(cudaStream_t stream) { cuda::spmm(args(), plan, {stream, workspace.data(), plan.workspace_bytes}); }
  std::vector<uint8_t> result() {
    std::vector<uint8_t> bytes(size_t(x_host.view.rows * host.geometry.out * size_of(dtype)));
    y.to(bytes.data(), int64_t(bytes.size()));
    return bytes;
  }
};

struct StreamHolder {
  cudaStream_t stream;
  StreamHolder() { check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~StreamHolder() { cudaStreamDestroy(stream); }
};

TEST(Cuda, RepeatsBitForBit) {
  std::mt19937_64 rng(1);
  for (const int64_t nnz : {200000, 900})  // narrow, tall
    for (const int64_t batch : {1, 7, 40}) {
      Bench bench(3000, 4000, nnz, batch, DType::kFloat32, rng);
      bench.run(nullptr);
      const std::vector<uint8_t> first = bench.result();
      for (int i = 0; i < 5; ++i) {
        check(cudaMemset(bench.y.data(), 0xff, first.size()));
        bench.run(nullptr);
        EXPECT_EQ(bench.result(), first);
      }
    }
}

TEST(Cuda, ACapturedProductFollowsItsOperands) {
  std::mt19937_64 rng(2);
  for (const int64_t nnz : {200000, 900}) {
    Bench bench(3000, 4000, nnz, 3, DType::kBFloat16, rng);
    StreamHolder s;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal));
    bench.run(s.stream);
    check(cudaStreamEndCapture(s.stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    // Other values at the same address.
    const Dense other(1, nnz, DType::kBFloat16, rng);
    check(cudaMemcpy(bench.values.data(), other.view.data, size_t(nnz * 2), cudaMemcpyHostToDevice));
    check(cudaGraphLaunch(executable, s.stream));
    check(cudaStreamSynchronize(s.stream));
    const std::vector<uint8_t> replayed = bench.result();
    check(cudaMemset(bench.y.data(), 0xff, replayed.size()));
    bench.run(nullptr);
    EXPECT_EQ(bench.result(), replayed);
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
  }
}

// Where values and pattern overfill the L2 cache, the launch says that the values leave it first.
TEST(Cuda, ValuesOfALargeLayerHaveAnAccessPolicy) {
  std::mt19937_64 rng(8);
  const int64_t l2 = cuda::capability(cuda::current_device()).l2_bytes;
  for (const int64_t nnz : {l2 / 60, l2 / 6}) {
    Bench bench(8192, 8192, nnz, 1, DType::kFloat32, rng);
    EXPECT_EQ(bench.plan.evict_first, nnz == l2 / 6);
    StreamHolder s;
    cudaGraph_t graph;
    cudaGraphNode_t node;
    size_t count = 1;
    check(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal));
    bench.run(s.stream);
    check(cudaStreamEndCapture(s.stream, &graph));
    check(cudaGraphGetNodes(graph, &node, &count));
    ASSERT_EQ(count, 1u);
    cudaLaunchAttributeValue policy = {};
    check(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeAccessPolicyWindow, &policy));
    EXPECT_EQ(policy.accessPolicyWindow.num_bytes, bench.plan.evict_first ? size_t(nnz * 4) : 0u);
    EXPECT_EQ(policy.accessPolicyWindow.base_ptr, bench.plan.evict_first ? bench.values.data() : nullptr);
    check(cudaGraphDestroy(graph));
  }
}

TEST(Cuda, TwoStreamsAtOnce) {
  std::mt19937_64 rng(3);
  Bench a(4000, 5000, 500000, 4, DType::kFloat32, rng), b(4000, 5000, 1000, 4, DType::kFloat32, rng);
  a.run(nullptr), b.run(nullptr);
  const auto expected_a = a.result(), expected_b = b.result();
  StreamHolder s, t;
  for (int i = 0; i < 20; ++i) a.run(s.stream), b.run(t.stream);
  check(cudaDeviceSynchronize());
  EXPECT_EQ(a.result(), expected_a);
  EXPECT_EQ(b.result(), expected_b);
}

TEST(Cuda, RewireIsCapturedAndLeavesARefusedPatternAsItWas) {
  const HostPattern pattern = reference::sample(200, 3000, 20000, 1);
  const DevicePatternCopy device(pattern.view());
  const int64_t bad[] = {4, 4}, row[] = {0, 0}, col[] = {0, 1};
  const Memory drop = Memory::copy_of(bad, 16), rows = Memory::copy_of(row, 16), cols = Memory::copy_of(col, 16);
  const RewireArgs args{device.view(), reinterpret_cast<int64_t*>(drop.data()), 2, reinterpret_cast<int64_t*>(rows.data()),
                        reinterpret_cast<int64_t*>(cols.data()), 2};
  const int64_t bytes = cuda::rewire_workspace(pattern.geometry, 2, 2);
  const Memory index(int64_t(pattern.index.size())), pointers(int64_t(pattern.tile_ptr.size() * 8)), source(20000 * 8), status(sizeof(cuda::RewireStatus)),
      workspace(bytes);
  StreamHolder s;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  check(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal));
  cuda::rewire(args, {pattern.geometry, index.data(), reinterpret_cast<int64_t*>(pointers.data()), reinterpret_cast<int64_t*>(source.data()),
                      reinterpret_cast<cuda::RewireStatus*>(status.data())}, {s.stream, workspace.data(), bytes});
  check(cudaStreamEndCapture(s.stream, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  check(cudaGraphLaunch(executable, s.stream));
  check(cudaStreamSynchronize(s.stream));
  std::vector<uint8_t> words(pattern.index.size());
  std::vector<int64_t> tile_ptr(pattern.tile_ptr.size()), from(20000);
  index.to(words.data(), int64_t(words.size()));
  pointers.to(tile_ptr.data(), int64_t(tile_ptr.size() * 8));
  source.to(from.data(), 20000 * 8);
  cuda::RewireStatus said;
  status.to(&said, sizeof(said));
  EXPECT_EQ(cuda::describe(said, pattern.geometry), "rewire: slot 4 is named twice in drop.");
  EXPECT_EQ(words, pattern.index);
  EXPECT_EQ(tile_ptr, pattern.tile_ptr);
  for (int64_t slot = 0; slot < 20000; ++slot) ASSERT_EQ(from[size_t(slot)], slot);
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
}

TEST(Cuda, ManyTilesAtTheWidestWindow) {
  // Blocks of eight strips and eight columns: the most shared memory that a product asks for.
  std::mt19937_64 rng(6);
  const HostPattern pattern = reference::sample(64 * 600, 8192, 200000, 3);
  const Dense x(8, 8192, DType::kFloat32, rng), dy(8, 64 * 600, DType::kFloat32, rng), values(1, 200000, DType::kFloat32, rng);
  Output ours(200000, DType::kFloat32), expected(200000, DType::kFloat32), y(8 * 64 * 600, DType::kFloat32), y_expected(8 * 64 * 600, DType::kFloat32);
  SddmmArgs sampled{pattern.view(), DType::kFloat32, dy.view, x.view, ours.data()};
  backend::sddmm(sampled, Regime::kStream, 1);
  sampled.dvalues = expected.data();
  reference::sddmm(sampled);
  EXPECT_LE(relative_error(ours.data(), expected.data(), DType::kFloat32, 200000), tolerance(DType::kFloat32));
  SpmmArgs product{pattern.view(), DType::kFloat32, values.view.data, x.view, nullptr, y.data()};
  backend::spmm(product, Regime::kStream, 1);
  product.y = y_expected.data();
  reference::spmm(product);
  EXPECT_LE(relative_error(y.data(), y_expected.data(), DType::kFloat32, 8 * 64 * 600), tolerance(DType::kFloat32));
}

TEST(Cuda, LongRowsOfLargeBatches) {
  // Rows so full that panels are staged where shared memory suffices, and a row that the teams of a block share.
  std::mt19937_64 rng(7);
  constexpr int64_t kOut = 1300, kIn = 1030, kBatch = 130;
  const HostPattern pattern = skewed_pattern(kOut, kIn, 400000, rng);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Dense values(1, pattern.geometry.nnz, dtype, rng), x(kBatch, kIn, dtype, rng), bias(1, kOut, dtype, rng);
    Output y(kBatch * kOut, dtype), expected(kBatch * kOut, dtype);
    SpmmArgs args{pattern.view(), dtype, values.view.data, x.view, bias.view.data, y.data()};
    backend::spmm(args, Regime::kStream, 1);
    args.y = expected.data();
    reference::spmm(args);
    EXPECT_LE(relative_error(y.data(), expected.data(), dtype, kBatch * kOut), tolerance(dtype)) << name(dtype);
  }
}

TEST(Cuda, RefusesBadArgumentsInOneSentence) {
  std::mt19937_64 rng(4);
  Bench bench(300, 4000, 50000, 12, DType::kFloat32, rng);
  const auto refuses = [&](SpmmArgs args, const Plan& plan, const cuda::Resources& resources, const std::string& reason) {
    try {
      cuda::spmm(args, plan, resources);
      ADD_FAILURE() << "accepted, expected: " << reason;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  };
  const cuda::Resources enough{nullptr, bench.workspace.data(), bench.plan.workspace_bytes};
  SpmmArgs args = bench.args();
  args.values = nullptr;
  refuses(args, bench.plan, enough, "values");
  args = bench.args();
  args.x.rows = -1;
  refuses(args, bench.plan, enough, "-1");
  args = bench.args();
  args.x.rows = 1;
  refuses(args, bench.plan, enough, "the plan is of another problem");
  ASSERT_GT(bench.plan.workspace_bytes, 0);
  refuses(bench.args(), bench.plan, {nullptr, bench.workspace.data(), bench.plan.workspace_bytes - 1}, "workspace");
  refuses(bench.args(), bench.plan, {nullptr, nullptr, 0}, "workspace");
  EXPECT_THROW(cuda::capability(-1), Error);
  EXPECT_THROW(cuda::capability(cuda::device_count()), Error);
}

}  // namespace
}  // namespace snack::testing
