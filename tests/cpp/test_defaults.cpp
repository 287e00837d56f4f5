// What the library brings for programs without threads, BLAS or workspaces of their own.
#include <gtest/gtest.h>

#include <atomic>

#include "problem.hpp"
#include "snack/core/error.hpp"
#include "snack/defaults/context.hpp"
#include "snack/defaults/gemm.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (const int thread_count : {1, 2, 5}) {
    const ThreadPool pool(thread_count);
    const ParallelFor runner = pool.runner();
    EXPECT_EQ(runner.threads, thread_count);
    for (const int64_t count : {0, 1, 2, 3, 7, 1000}) {
      for (int repeat = 0; repeat < 200; ++repeat) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        parallel_for(runner, count, [&](int64_t i) { ++hits[size_t(i)]; });
        for (const auto& hit : hits) ASSERT_EQ(hit, 1) << thread_count << " threads, " << count;
      }
    }
  }
}

TEST(ThreadPool, UsesItsThreads) {
  // Three tasks that wait for each other can only end on three threads.
  const ThreadPool pool(3);
  std::atomic<int> arrived{0};
  parallel_for(pool.runner(), 3, [&](int64_t) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 3);
}

TEST(ThreadPool, NestedAndConcurrentCalls) {
  const ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  const auto nested = [&] {
    parallel_for(pool.runner(), 10, [&](int64_t i) { parallel_for(pool.runner(), 10, [&](int64_t j) { sum += 10 * i + j; }); });
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) callers.emplace_back([&] { for (int i = 0; i < 50; ++i) nested(); });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 50 * 4950);
}

TEST(ThreadPool, RefusesNoThreads) { EXPECT_THROW(ThreadPool(0), Error); }

TEST(ThreadPool, DefaultIsOnePool) {
  EXPECT_GE(available_processors(), 1);
  EXPECT_EQ(default_threads().threads, available_processors());
  EXPECT_EQ(default_threads().context, default_threads().context);
}

TEST(DefaultGemm, EqualsTheObviousOne) {
  std::mt19937_64 rng(5);
  struct Shape {
    int64_t m, n, k;
  };
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const auto& [m, n, k] : {Shape{1, 1, 1}, {3, 200, 70}, {5, 129, 65}, {2, 128, 64}, {4, 3, 0}, {0, 3, 2}, {3, 0, 2}}) {
      for (const bool is_transposed : {false, true}) {
        for (const bool accumulates : {false, true}) {
          const Dense a(m, k, dtype, rng, 2), b(is_transposed ? n : k, is_transposed ? k : n, dtype, rng, 1), start(m, n, dtype, rng);
          Output got(m * n, dtype), expected(m * n, dtype);
          if (accumulates)
            for (Output* out : {&got, &expected}) std::copy_n(start.bytes.begin(), out->bytes.size(), out->bytes.begin());
          GemmArgs args{.dtype = dtype, .m = m, .n = n, .k = k, .a = a.view.data, .a_row_stride = k + 2, .a_col_stride = 1,
                        .b = b.view.data, .b_row_stride = is_transposed ? 1 : n + 1, .b_col_stride = is_transposed ? k + 1 : 1,
                        .c = got.data(), .c_row_stride = n, .accumulate = accumulates};
          default_gemm()(args);
          args.c = expected.data();
          plain_gemm()(args);
          EXPECT_LE(relative_error(got.data(), expected.data(), dtype, m * n), tolerance(dtype)) << m << " " << n << " " << k;
        }
      }
    }
  }
}

TEST(DefaultGemm, RefusesWhatItCannotDo) {
  float c = 0;
  EXPECT_THROW(default_gemm()({.dtype = DType::kFloat16, .m = 1, .n = 1, .k = 0, .c = &c, .c_row_stride = 1}), Error);
  EXPECT_THROW(default_gemm()({.m = -1, .n = 1, .k = 0, .c = &c, .c_row_stride = 1}), Error);
  EXPECT_THROW(default_gemm()({.m = 1, .n = 1, .k = 1, .c = &c, .c_row_stride = 1}), Error);
}

TEST(DefaultGemm, ServesGrowGradient) {
  std::mt19937_64 rng(6);
  const HostPattern pattern = cpu::sample(40, 1100, 900, 3, serial());
  const Dense dy(6, 40, DType::kFloat64, rng), x(6, 1100, DType::kFloat64, rng);
  const GrowGradientArgs args{{pattern.view()}, dy.view, x.view, 50};
  const Positions got = cpu::grow_gradient(args, default_gemm(), default_threads()), expected = reference::grow_gradient(args);
  EXPECT_EQ(got.rows, expected.rows);
  EXPECT_EQ(got.cols, expected.cols);
}

TEST(Context, ServesGrowingProblems) {
  std::mt19937_64 rng(7);
  const ThreadPool pool(2);
  for (const Gemm& gemm : {Gemm{}, default_gemm()}) {
    cpu::Context context(pool.runner(), gemm);
    int64_t bytes = 0;
    for (const int64_t batch : {1, 70, 3}) {
      const HostPattern pattern = skewed_pattern(90, 1200, 9000, rng);
      const int64_t nnz = pattern.geometry.nnz;
      const Dense values(1, nnz, DType::kFloat32, rng), x(batch, 1200, DType::kFloat32, rng), dy(batch, 90, DType::kFloat32, rng);
      for (const Regime regime : {Regime::kAuto, Regime::kPanel}) {
        if (regime == Regime::kPanel && !gemm) continue;
        Output y(batch * 90, DType::kFloat32), y_ref(batch * 90, DType::kFloat32);
        SpmmArgs args{pattern.view(), DType::kFloat32, values.view.data, x.view, nullptr, y.data()};
        context.spmm(args, regime);
        args.y = y_ref.data();
        reference::spmm(args);
        EXPECT_LE(relative_error(y.data(), y_ref.data(), DType::kFloat32, batch * 90), 1e-5);

        Output dx(batch * 1200, DType::kFloat32), dx_ref(batch * 1200, DType::kFloat32);
        SpmmTArgs t_args{pattern.view(), DType::kFloat32, values.view.data, dy.view, dx.data()};
        context.spmm_t(t_args, regime);
        t_args.dx = dx_ref.data();
        reference::spmm_t(t_args);
        EXPECT_LE(relative_error(dx.data(), dx_ref.data(), DType::kFloat32, batch * 1200), 1e-5);

        Output dv(nnz, DType::kFloat32), dv_ref(nnz, DType::kFloat32);
        SddmmArgs s_args{pattern.view(), DType::kFloat32, dy.view, x.view, dv.data()};
        context.sddmm(s_args, regime);
        s_args.dvalues = dv_ref.data();
        reference::sddmm(s_args);
        EXPECT_LE(relative_error(dv.data(), dv_ref.data(), DType::kFloat32, nnz), 1e-5);
      }
      Dense one = values, other = values;
      SddmmUpdateArgs u_args{pattern.view(), DType::kFloat32, one.bytes.data(), {}, dy.view, x.view, Rule::kSgd, {.lr = 0.5}};
      context.sddmm_update(u_args);
      u_args.values = other.bytes.data();
      reference::sddmm_update(u_args);
      EXPECT_LE(relative_error(one.bytes.data(), other.bytes.data(), DType::kFloat32, nnz), 1e-5);
      EXPECT_GT(relative_error(one.bytes.data(), values.bytes.data(), DType::kFloat32, nnz), 1e-3);
      EXPECT_GE(context.workspace_bytes(), bytes);
      bytes = context.workspace_bytes();
    }
  }
}

TEST(Context, RefusesBeforePlanning) {
  cpu::Context context(serial());
  EXPECT_THROW(context.spmm({}), Error);
  EXPECT_EQ(context.workspace_bytes(), 0);
  const HostPattern pattern = cpu::sample(4, 4, 3, 1, serial());
  const float values[3] = {}, x[4] = {};
  float y[4];
  const SpmmArgs args{.pattern = pattern.view(), .values = values, .x = {.data = x, .rows = 1, .cols = 4}, .y = y};
  EXPECT_THROW(context.spmm(args, Regime::kPanel), Error);  // it has no gemm
  EXPECT_NO_THROW(context.spmm(args));
}

}  // namespace
}  // namespace snack::testing
