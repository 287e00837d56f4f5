// A backend (SNACK_TEST_BACKEND: a header) against the reference: shapes, batches, dtypes, layouts, regimes and thread counts.
#include <gtest/gtest.h>

#include SNACK_TEST_BACKEND

namespace snack::testing {
namespace {

struct Case {
  int64_t out, in, nnz, batch;
};

const Case kCases[] = {
    {1, 1, 1, 1},       {3, 5, 7, 2},        {64, 1024, 5000, 1},  {65, 1025, 6000, 4},   {129, 2050, 9000, 16},
    {300, 784, 23000, 65}, {10, 3000, 40, 3}, {5000, 40, 60, 33},   {2000, 20000, 300, 5}, {70, 1030, 6000, 130},
    {4, 9, 0, 3},       {0, 4, 0, 2},        {4, 0, 0, 2}, {6, 5, 9, 0},         {100, 100, 9900, 7},
    {1, 65537, 900, 3}, {1500, 3000, 300000, 5}, {20000, 900, 30000, 4}, {2100, 1030, 500000, 9}};

class Products : public ::testing::TestWithParam<std::tuple<DType, Regime, int>> {};

TEST_P(Products, EqualTheReference) {
  const auto [dtype, regime, thread_count] = GetParam();
  std::mt19937_64 rng(7);
  for (const Case& c : kCases) {
    SCOPED_TRACE(::testing::Message() << c.out << "x" << c.in << " nnz " << c.nnz << " batch " << c.batch);
    if (regime == Regime::kPanel && backend::is_left_out(int64_t{c.out} * c.in * c.batch / 200)) continue;  // dense products in plain loops
    const HostPattern pattern = skewed_pattern(c.out, c.in, c.nnz, rng);
    const int64_t nnz = pattern.geometry.nnz;
    const Dense values(1, nnz, dtype, rng, 0, 1), x(c.batch, c.in, dtype, rng, 3, 1), dy(c.batch, c.out, dtype, rng, 1, 3), bias(1, c.out, dtype, rng);

    Output y(c.batch * c.out, dtype), y_ref(c.batch * c.out, dtype);
    SpmmArgs spmm_args{pattern.view(), dtype, values.view.data, x.view, bias.view.data, y.data()};
    backend::spmm(spmm_args, regime, thread_count);
    spmm_args.y = y_ref.data();
    reference::spmm(spmm_args);
    EXPECT_LE(relative_error(y.data(), y_ref.data(), dtype, c.batch * c.out), tolerance(dtype)) << "spmm";

    Output dx(c.batch * c.in, dtype), dx_ref(c.batch * c.in, dtype);
    SpmmTArgs spmm_t_args{pattern.view(), dtype, values.view.data, dy.view, dx.data()};
    backend::spmm_t(spmm_t_args, regime, thread_count);
    spmm_t_args.dx = dx_ref.data();
    reference::spmm_t(spmm_t_args);
    EXPECT_LE(relative_error(dx.data(), dx_ref.data(), dtype, c.batch * c.in), tolerance(dtype)) << "spmm_t";

    Output dv(nnz, dtype), dv_ref(nnz, dtype);
    SddmmArgs sddmm_args{pattern.view(), dtype, dy.view, x.view, dv.data()};
    backend::sddmm(sddmm_args, regime, thread_count);
    sddmm_args.dvalues = dv_ref.data();
    reference::sddmm(sddmm_args);
    EXPECT_LE(relative_error(dv.data(), dv_ref.data(), dtype, nnz), tolerance(dtype)) << "sddmm";
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Products,
    ::testing::Combine(::testing::ValuesIn(backend::kDTypes), ::testing::ValuesIn(backend::kRegimes),
                       ::testing::ValuesIn(backend::kThreadCounts)),
    [](const auto& info) {
      return std::string(name(std::get<0>(info.param))) + "_" + name(std::get<1>(info.param)) + "_" +
             std::to_string(std::get<2>(info.param)) + "threads";
    });

// The three forms of a step: without state, with momentum, with two averages; numbers given, and read from memory.
struct Step {
  const char* name;
  Rule rule;
  int states;
  SgdNumbers sgd;
  AdamWNumbers adamw;
};

const Step kSteps[] = {
    {"SGD", Rule::kSgd, 0, {.lr = 0.5, .weight_decay = 0.1}, {}},
    {"first", Rule::kSgd, 1, {.lr = 0.5, .momentum = 0.9, .dampening = 0.2, .is_first = true}, {}},
    {"momentum", Rule::kSgd, 1, {.lr = 0.5, .momentum = 0.9, .dampening = 0.2, .maximize = true}, {}},
    {"nesterov", Rule::kSgd, 1, {.lr = 0.5, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}, {}},
    {"AdamW", Rule::kAdamW, 2, {}, {.lr = 0.1, .weight_decay = 0.1, .step = 3}},
    {"AdamW up", Rule::kAdamW, 2, {}, {.lr = 0.1, .beta1 = 0.5, .beta2 = 0.8, .eps = 1e-3, .step = 100000, .maximize = true}}};

// Values and states of a problem, `offset` elements from where vectors of 16 bytes begin.
struct Trained {
  int64_t nnz;
  DType dtype;
  Dense values, average, square;
  Trained(int64_t nnz, DType dtype, int64_t offset, std::mt19937_64 rng)
      : nnz(nnz), dtype(dtype), values(1, nnz, dtype, rng, 0, offset), average(1, nnz, dtype, rng, 0, offset),
        square(1, nnz, dtype, rng, 0, offset) {
    with_type(dtype, [&](auto element) {
      using T = decltype(element);
      T* data = static_cast<T*>(const_cast<void*>(square.view.data));
      for (int64_t k = 0; k < nnz; ++k) data[k] = T(float(1 + std::abs(element_at(data, dtype, k))));
    });
  }
  SddmmUpdateArgs args(const PatternView& pattern, const MatrixView& dy, const MatrixView& x, const Step& step) {
    SddmmUpdateArgs a{pattern, dtype, const_cast<void*>(values.view.data)};
    const Dense* states[] = {&average, &square};
    for (int i = 0; i < step.states; ++i) a.state[i] = const_cast<void*>(states[i]->view.data);
    a.dy = dy, a.x = x, a.rule = step.rule, a.sgd = step.sgd, a.adamw = step.adamw;
    return a;
  }
  double error(const Trained& other, const Dense Trained::*what) const {
    return relative_error((this->*what).view.data, (other.*what).view.data, dtype, nnz);
  }
};

class Updates : public ::testing::TestWithParam<std::tuple<DType, int>> {};

TEST_P(Updates, EqualTheReference) {
  const auto [dtype, thread_count] = GetParam();
  std::mt19937_64 rng(7);
  for (const Case& c : kCases) {
    const HostPattern pattern = skewed_pattern(c.out, c.in, c.nnz, rng);
    const Dense x(c.batch, c.in, dtype, rng, 3, 1), dy(c.batch, c.out, dtype, rng, 1, 3);
    const int64_t offset = c.batch % 2;  // vectors, and one by one
    for (const Step& step : kSteps) {
      if (c.nnz > 100000 && step.rule == Rule::kSgd) continue;  // long ranges of slots are the same for all
      SCOPED_TRACE(::testing::Message() << step.name << " " << c.out << "x" << c.in << " nnz " << c.nnz << " batch " << c.batch);
      Trained before(pattern.geometry.nnz, dtype, offset, rng), one(pattern.geometry.nnz, dtype, offset, rng), other(pattern.geometry.nnz, dtype, offset, rng);
      const float lr = 0.25f, number = 7;
      SddmmUpdateArgs args = one.args(pattern.view(), dy.view, x.view, step), expected = other.args(pattern.view(), dy.view, x.view, step);
      if (c.batch % 3 == 0) args.lr = &lr, args.step = &number, expected.lr = &lr, expected.step = &number;
      backend::sddmm_update(args, Regime::kAuto, thread_count);
      reference::sddmm_update(expected);
      EXPECT_LE(one.error(other, &Trained::values), tolerance(dtype)) << "values";
      EXPECT_LE(one.error(other, &Trained::average), tolerance(dtype)) << "first state";
      EXPECT_LE(one.error(other, &Trained::square), tolerance(dtype)) << "second state";
      if (c.batch > 0 && pattern.geometry.nnz > 0) { EXPECT_GT(before.error(other, &Trained::values), 1e-3) << "nothing was changed"; }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Updates, ::testing::Combine(::testing::ValuesIn(backend::kDTypes), ::testing::ValuesIn(backend::kThreadCounts)),
                         [](const auto& info) { return std::string(name(std::get<0>(info.param))) + "_" + std::to_string(std::get<1>(info.param)) + "threads"; });

TEST(Spmm, RepeatsBitForBitAtAnyNumberOfThreads) {
  std::mt19937_64 rng(3);
  for (const int64_t batch : {1, 5, 66}) {
    const HostPattern pattern = skewed_pattern(400, 2100, 90000, rng);
    const Dense values(1, pattern.geometry.nnz, DType::kFloat32, rng), x(batch, 2100, DType::kFloat32, rng);
    Output one(batch * 400, DType::kFloat32), many(batch * 400, DType::kFloat32);
    SpmmArgs args{pattern.view(), DType::kFloat32, values.view.data, x.view, nullptr, one.data()};
    backend::spmm(args, Regime::kStream, 1);
    args.y = many.data();
    backend::spmm(args, Regime::kStream, 5);
    EXPECT_EQ(one.bytes, many.bytes) << batch;
  }
}

TEST(SmallOutputs, AreKeptBesideLargeOnes) {
  // Two connections of a pattern far too sparse for tiles; numbers beside them that are 10^30 times as large.
  const HostPattern pattern = pattern_of({{0, 0}, {2000, 3000}}, 2500, 4000);
  const float values[] = {0.5f, 1e20f};
  std::vector<float> x(4000), dy(2500), y(2500), dx(4000);
  x[0] = 0.25f, x[1] = 1e30f, x[3000] = 1e15f;
  dy[0] = 0.25f, dy[1] = 1e30f, dy[2000] = 1e15f;
  backend::spmm({pattern.view(), DType::kFloat32, values, {x.data(), DType::kFloat32, 1, 4000, 4000, 1}, nullptr, y.data()}, Regime::kStream, 1);
  EXPECT_EQ(y[0], 0.125f);
  EXPECT_EQ(y[1], 0.0f);
  EXPECT_FLOAT_EQ(y[2000], 1e35f);
  backend::spmm_t({pattern.view(), DType::kFloat32, values, {dy.data(), DType::kFloat32, 1, 2500, 2500, 1}, dx.data()}, Regime::kStream, 1);
  EXPECT_EQ(dx[0], 0.125f);
  EXPECT_EQ(dx[1], 0.0f);
  EXPECT_FLOAT_EQ(dx[3000], 1e35f);
}

TEST(Spmm, StructuralZerosDoNotSpreadInfinity) {
  // Column 1 of W is empty: Inf there must not reach y; column 0 is live in row 0 only.
  const HostPattern pattern = pattern_of({{0, 0}, {1, 2}, {1, 3}, {1, 4}, {1, 5}}, 2, 6);
  const float values[] = {1, 1, 1, 1, 1};
  const float inf = INFINITY, x[] = {inf, inf, 1, 1, 1, 1};
  float y[2];
  SpmmArgs args{pattern.view(), DType::kFloat32, values, {x, DType::kFloat32, 1, 6, 6, 1}, nullptr, y};
  backend::spmm(args, Regime::kStream, 1);
  EXPECT_EQ(y[0], inf);
  EXPECT_EQ(y[1], 4.0f);

  // The same for many samples: column 1 is empty; rows of other lengths beside one another; column 5 is live in odd rows only.
  constexpr int64_t kOut = 70, kIn = 1200, kBatch = 33;
  std::set<std::pair<int64_t, int64_t>> positions;
  for (int64_t r = 0; r < kOut; ++r)
    for (int64_t c = 2; c < 20 + 3 * r; ++c)
      if (c != 5 || r % 2 == 1) positions.emplace(r, c);
  for (int64_t c = 1100; c < kIn; ++c) positions.emplace(7, c);
  const HostPattern many = pattern_of(positions, kOut, kIn);
  const std::vector<float> ones(size_t(many.geometry.nnz), 1.0f);
  std::vector<float> samples(kBatch * kIn, 1.0f), sums(kBatch * kOut);
  for (int64_t b = 0; b < kBatch; ++b) samples[size_t(b * kIn + 1)] = NAN, samples[size_t(b * kIn + 5)] = inf;
  backend::spmm({many.view(), DType::kFloat32, ones.data(), {samples.data(), DType::kFloat32, kBatch, kIn, kIn, 1}, nullptr, sums.data()}, Regime::kStream, 1);
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t r = 0; r < kOut; ++r)
      EXPECT_EQ(sums[size_t(b * kOut + r)], r % 2 == 1 ? inf : float(17 + 3 * r)) << "sample " << b << ", row " << r;
}

}  // namespace
}  // namespace snack::testing
