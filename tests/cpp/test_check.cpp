// What a C++ caller can get wrong: one sentence each, from every entry, and nothing written.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "problem.hpp"
#include "snack/core/error.hpp"
#include "snack/kernels/check.hpp"

namespace snack::testing {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// A correct problem; every case below breaks one thing.
class BadInput : public ::testing::Test {
 protected:
  static constexpr int64_t kOut = 70, kIn = 1100, kNnz = 900, kBatch = 5;
  static constexpr DType kType = DType::kFloat32;

  std::mt19937_64 rng{1};
  HostPattern pattern = cpu::sample(kOut, kIn, kNnz, 3, serial());
  Dense values{1, kNnz, kType, rng}, x{kBatch, kIn, kType, rng}, dy{kBatch, kOut, kType, rng};
  Output y{kBatch * kOut, kType}, dx{kBatch * kIn, kType}, dvalues{kNnz, kType};
  SpmmArgs spmm{pattern.view(), kType, values.view.data, x.view, nullptr, y.data()};
  SpmmTArgs spmm_t{pattern.view(), kType, values.view.data, dy.view, dx.data()};
  SddmmArgs sddmm{pattern.view(), kType, dy.view, x.view, dvalues.data()};
  std::vector<uint8_t> scratch = std::vector<uint8_t>(4 << 20);
  CpuResources resources{serial(), {}, aligned_scratch(), 3 << 20};

  void* aligned_scratch() { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64); }
  Plan plan(Operation operation, int threads = 1) const {
    return make_cpu_plan({operation, pattern.geometry, kBatch, kType}, Regime::kAuto, {threads, false});
  }

  // The message of both backends, which must be the same; the outputs keep their poison.
  std::string refused(const SpmmArgs& args) {
    const std::string message = message_of([&] { cpu::spmm(args, plan(Operation::kSpmm), resources); });
    EXPECT_EQ(message, message_of([&] { reference::spmm(args); }));
    return message;
  }
  std::string refused(const SpmmTArgs& args) {
    const std::string message = message_of([&] { cpu::spmm_t(args, plan(Operation::kSpmmT), resources); });
    EXPECT_EQ(message, message_of([&] { reference::spmm_t(args); }));
    return message;
  }
  std::string refused(const SddmmArgs& args) {
    const std::string message = message_of([&] { cpu::sddmm(args, plan(Operation::kSddmm), resources); });
    EXPECT_EQ(message, message_of([&] { reference::sddmm(args); }));
    return message;
  }
  std::string refused(const SddmmUpdateArgs& args) {
    const std::string message = message_of([&] { cpu::sddmm_update(args, plan(Operation::kSddmmUpdate), resources); });
    EXPECT_EQ(message, message_of([&] { reference::sddmm_update(args); }));
    return message;
  }
  void TearDown() override {
    for (const Output* output : {&y, &dx, &dvalues})
      for (const uint8_t byte : output->bytes) ASSERT_EQ(byte, 0xff) << "a refused call wrote to its output";
  }
};

// The sentence holds `part` and ends as one.
void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(message.back(), '.') << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

TEST_F(BadInput, NullPointers) {
  SpmmArgs a = spmm;
  a.values = nullptr;
  expect_says(refused(a), "spmm: values is null, expected 900 elements");
  a = spmm, a.y = nullptr;
  expect_says(refused(a), "spmm: y is null, expected 350 elements");
  a = spmm, a.x.data = nullptr;
  expect_says(refused(a), "spmm: x is null, expected 5 x 1100 elements");
  a = spmm, a.pattern.index = nullptr;
  expect_says(refused(a), "spmm: the pattern's index is null");
  a = spmm, a.pattern.tile_ptr = nullptr;
  expect_says(refused(a), "spmm: the pattern's tile_ptr is null");
  SpmmTArgs t = spmm_t;
  t.dx = nullptr;
  expect_says(refused(t), "spmm_t: dx is null, expected 5500 elements");
  t = spmm_t, t.values = nullptr;
  expect_says(refused(t), "spmm_t: values is null");
  SddmmArgs s = sddmm;
  s.dvalues = nullptr;
  expect_says(refused(s), "sddmm: dvalues is null, expected 900 elements");
  s = sddmm, s.dy.data = nullptr;
  expect_says(refused(s), "sddmm: dy is null");
}

TEST_F(BadInput, SizesAndTypes) {
  SpmmArgs a = spmm;
  a.x.rows = -1;
  expect_says(refused(a), "spmm: x has -1 rows; the batch cannot be negative");
  a = spmm, a.x.cols = kIn - 1;
  expect_says(refused(a), "spmm: x has 1099 columns, the pattern expects 1100");
  a = spmm, a.x.rows = int64_t{1} << 60;
  expect_says(refused(a), "is too large for features of 1100; split it");
  a = spmm, a.x.dtype = DType::kFloat64;
  expect_says(refused(a), "spmm: x is float64 and the values are float32; give both one dtype");
  a = spmm, a.dtype = DType(9);
  expect_says(refused(a), "spmm: dtype 9 does not exist");
  a = spmm, a.pattern.geometry.out = -3;
  expect_says(refused(a), "spmm: the pattern has shape (-3, 1100) and 900 connections; none of them can be negative");
  a = spmm, a.pattern.geometry.nnz = kOut * kIn + 1;
  expect_says(refused(a), "do not fit into shape (70, 1100)");
  a = spmm, a.pattern.geometry.packing = Packing::kTall;
  expect_says(refused(a), "packing is not that of its shape and 900 connections");
  SpmmTArgs t = spmm_t;
  t.dy = x.view;
  expect_says(refused(t), "spmm_t: dy has 1100 columns, the pattern expects 70");
  SddmmArgs s = sddmm;
  s.dy.rows = 4;
  expect_says(refused(s), "sddmm: dy has 4 rows and x has 5; both are the batch");
}

TEST_F(BadInput, Updates) {
  const SddmmUpdateArgs sgd{pattern.view(), kType, dvalues.data(), {}, dy.view, x.view};
  SddmmUpdateArgs a = sgd;
  a.values = nullptr;
  expect_says(refused(a), "sddmm_update: values is null, expected 900 elements");
  a = sgd, a.dy.rows = 4;
  expect_says(refused(a), "sddmm_update: dy has 4 rows and x has 5; both are the batch");
  a = sgd, a.sgd.momentum = 0.9;
  expect_says(refused(a), "sddmm_update: the momentum buffer is null");
  a = sgd, a.rule = Rule::kAdamW, a.state[0] = dvalues.data();
  expect_says(refused(a), "sddmm_update: the average of its square is null");
  a.state[1] = dvalues.data(), a.adamw.step = 0;
  expect_says(refused(a), "sddmm_update: step 0 was given; steps count from 1");
  a = sgd, a.rule = Rule(7);
  expect_says(refused(a), "sddmm_update: rule 7 does not exist");
  EXPECT_THROW(make_cpu_plan({Operation::kSddmmUpdate, pattern.geometry, kBatch, kType}, Regime::kPanel, {1, true}), Error);
}

TEST_F(BadInput, Workspaces) {
  const Plan p = plan(Operation::kSpmm);
  ASSERT_GT(p.workspace_bytes, 0);
  const auto run = [&](const CpuResources& r, const Plan& with) { return message_of([&] { cpu::spmm(spmm, with, r); }); };
  CpuResources r = resources;
  r.workspace = nullptr;
  expect_says(run(r, p), "spmm: no workspace was given, the plan needs " + std::to_string(p.workspace_bytes) + " bytes");
  r = resources, r.workspace_bytes = p.workspace_bytes - 1;
  expect_says(run(r, p), "spmm: the workspace has " + std::to_string(p.workspace_bytes - 1) + " bytes, the plan needs");
  r = resources, r.workspace = static_cast<char*>(r.workspace) + 8;
  expect_says(run(r, p), "spmm: the workspace is not aligned to 64 bytes");
  r = resources, r.parallel = threads(4);
  expect_says(run(r, p), "the plan was made for another problem");
  r = resources, r.parallel.threads = 0;
  expect_says(run(r, p), "the runner has 0 threads; give at least 1");
  Plan other = make_cpu_plan({Operation::kSpmm, make_geometry(8, 8, 8), kBatch, kType}, Regime::kAuto, {1, false});
  expect_says(run(resources, other), "the plan was made for another problem");
  other = p, other.regime = Regime::kPanel, other.panel_rows = 70;
  expect_says(run(resources, other), "regime 'panel' needs a dense product (gemm)");
  expect_says(run(resources, Plan{}), "the plan has batch blocks of 0; make the plan with make_cpu_plan");
  other = p, other.regime = Regime::kCoo;
  expect_says(run(resources, other), "the plan's regime 'coo' is not one of the CPU's");
}

TEST_F(BadInput, Plans) {
  const auto planned = [&](int64_t batch, int threads) {
    return message_of([&] { make_cpu_plan({Operation::kSpmm, pattern.geometry, batch, kType}, Regime::kAuto, {threads, false}); });
  };
  expect_says(planned(-1, 1), "spmm: batch -1 was given; the batch cannot be negative");
  expect_says(planned(1, 0), "spmm: a plan for 0 threads was asked for; give at least 1");
}

TEST_F(BadInput, Edits) {
  const int64_t slot = 0, row = 1, col = 1;
  const auto both = [&](const RewireArgs& args) {
    const std::string message = message_of([&] { cpu::rewire(args, serial()); });
    EXPECT_EQ(message, message_of([&] { reference::rewire(args); }));
    return message;
  };
  expect_says(both({pattern.view(), nullptr, 1, nullptr, nullptr, 0}), "rewire: drop is null, expected 1 elements");
  expect_says(both({pattern.view(), &slot, -2, nullptr, nullptr, 0}), "rewire: -2 entries of drop were given");
  expect_says(both({pattern.view(), nullptr, 0, &row, nullptr, 1}), "rewire: grow_cols is null");
  expect_says(both({pattern.view(), nullptr, 0, &row, &col, -1}), "rewire: -1 entries of grow_rows were given");
  expect_says(both({{pattern.geometry, nullptr, nullptr}, &slot, 1, &row, &col, 1}), "rewire: the pattern's index is null");

  const float value = 1;
  const auto selected = [&](const SelectArgs& args) {
    const std::string message = message_of([&] { cpu::select_smallest(args); });
    EXPECT_EQ(message, message_of([&] { reference::select_smallest(args); }));
    return message;
  };
  expect_says(selected({.values = nullptr, .nnz = 3, .k = 1}), "select_smallest: values is null, expected 3 elements");
  expect_says(selected({.values = &value, .nnz = -1, .k = 0}), "select_smallest: -1 entries of values were given");
  expect_says(selected({.values = &value, .nnz = 1, .k = -1}), "cannot drop -1 of 1 connections");
  expect_says(selected({.values = &value, .nnz = 1, .k = 0, .sign = Sign(7)}), "select_smallest: sign 7 does not exist");

  expect_says(message_of([&] { cpu::grow_uniform({pattern.view(), nullptr, 2}, 1, 0); }), "grow_uniform: drop is null");
  expect_says(message_of([&] { cpu::grow_uniform({pattern.view()}, -1, 0); }), "cannot grow -1 connections");
  const GrowGradientArgs gradient{{pattern.view()}, dy.view, x.view, 3};
  expect_says(message_of([&] { cpu::grow_gradient(gradient, {}, serial()); }), "grow_gradient: no dense product (gemm) was given");
  GrowGradientArgs wrong = gradient;
  wrong.x.rows = 3;
  expect_says(message_of([&] { cpu::grow_gradient(wrong, plain_gemm(), serial()); }), "grow_gradient: dy has 5 rows and x has 3");
  expect_says(message_of([&] { cpu::sample(-1, 4, 0, 0, serial()); }), "Pattern: shape (-1, 4) is outside");
  expect_says(message_of([&] { cpu::sample(4, 4, 17, 0, serial()); }), "17 connections do not fit into shape (4, 4)");
}

TEST_F(BadInput, EmptyProblemsNeedNoMemory) {
  // Null is a valid pointer to nothing: empty batches, empty patterns.
  const HostPattern none = encode({}, make_geometry(3, 4, 0));
  const Plan p = make_cpu_plan({Operation::kSpmm, none.geometry, 0, kType}, Regime::kAuto, {1, false});
  const SpmmArgs args{{none.geometry, nullptr, none.tile_ptr.data()}, kType, nullptr, {nullptr, kType, 0, 4, 4, 1}, nullptr, nullptr};
  EXPECT_NO_THROW(cpu::spmm(args, p, resources));
  EXPECT_NO_THROW(reference::spmm(args));
}

}  // namespace
}  // namespace snack::testing
