// Rules that choose connections, of a backend (SNACK_TEST_BACKEND: a header), against the reference.
#include <gtest/gtest.h>

#include <limits>

#include SNACK_TEST_BACKEND
#include "snack/core/error.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {
namespace {

struct Shape {
  int64_t out, in, nnz;
};

// The last ones are for a card: more than one block looks at, and positions more than 2^31 or nearly all taken.
const Shape kShapes[] = {{100, 2100, 9000}, {5, 5, 20}, {3000, 5000, 400}, {300, 1000, 150000}, {1, 1, 1}, {700, 600, 200000}, {1000000, 1000000, 3000}};
const DType kAllDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

// Normal numbers, every third of them equal to another; and where asked, a few infinite ones and none.
Dense values_of(int64_t nnz, DType dtype, std::mt19937_64& rng, bool special = false) {
  Dense values(1, nnz, dtype, rng);
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    T* v = static_cast<T*>(const_cast<void*>(values.view.data));
    for (int64_t i = 0; i + 5 < nnz; i += 3) v[i] = v[i + 5];
    for (int64_t i = 0; special && i < nnz; i += 7) v[i] = T(i % 2 ? INFINITY : NAN);
    for (int64_t i = 3; special && i < nnz; i += 11) v[i] = T(i % 2 ? -0.0f : 0.0f);
  });
  return values;
}

void expect_same(const Positions& grown, const Positions& expected) {
  EXPECT_EQ(grown.rows, expected.rows);
  EXPECT_EQ(grown.cols, expected.cols);
}

template <class F>
void refuses(const std::string& reason, const F& call) {
  try {
    call();
    ADD_FAILURE() << "accepted, expected: " << reason;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

TEST(Select, EqualsTheReference) {
  std::mt19937_64 rng(11);
  for (const auto& shape : kShapes) {
    const int64_t nnz = shape.nnz;
    if (backend::is_left_out(nnz)) continue;
    for (const DType dtype : kAllDTypes) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(nnz));
      for (const bool special : {false, true}) {
        const Dense values = values_of(nnz, dtype, rng, special);
        for (const int64_t k : {int64_t{0}, nnz / 5, nnz - 1, nnz}) {
          const SelectArgs args{dtype, values.view.data, nnz, k, Sign::kAny};
          EXPECT_EQ(backend::select_smallest(args), reference::select_smallest(args)) << k;
        }
        for (const Sign sign : {Sign::kPositive, Sign::kNegative}) {
          const SelectArgs args{dtype, values.view.data, nnz, nnz / 20, sign};
          EXPECT_EQ(backend::select_smallest(args), reference::select_smallest(args)) << int(sign);
        }
      }
    }
  }
}

TEST(Select, TakesTheLowestOfEqualValues) {
  for (const int64_t nnz : {1000, 100000}) {
    std::vector<float> values(size_t(nnz), -0.25f);
    for (const int64_t k : {int64_t{1}, int64_t{37}, nnz / 3, nnz - 2}) {
      const std::vector<int64_t> slots = backend::select_smallest({DType::kFloat32, values.data(), nnz, k, Sign::kAny});
      ASSERT_EQ(int64_t(slots.size()), k);
      for (int64_t i = 0; i < k; ++i) ASSERT_EQ(slots[size_t(i)], i);
    }
  }
}

TEST(Select, FindsWhatASampleHardlyMeets) {
  // A few values of their own among many equal ones, at both ends.
  const int64_t nnz = backend::is_left_out(300000) ? 30000 : 300000;
  std::vector<float> values(size_t(nnz), 1.0f);
  for (int64_t i = 0; i < 40; ++i) values[size_t(i * (nnz / 43) + 13)] = i % 2 ? 2.0f + float(i) : 0.5f / float(i + 1);
  for (const int64_t k : {int64_t{1}, int64_t{7}, int64_t{20}, int64_t{21}, nnz - 20, nnz - 19, nnz - 1}) {
    const SelectArgs args{DType::kFloat32, values.data(), nnz, k, Sign::kAny};
    EXPECT_EQ(backend::select_smallest(args), reference::select_smallest(args)) << k;
  }
}

TEST(Select, FindsTheEdgeOfACluster) {
  // A third of the values are 0, as connections that were grown and never got a gradient; the rank lies close to their end.
  std::mt19937_64 rng(4);
  const int64_t nnz = backend::is_left_out(300000) ? 30000 : 300000;
  for (const DType dtype : kAllDTypes) {
    Dense values(1, nnz, dtype, rng);
    with_type(dtype, [&](auto element) {
      using T = decltype(element);
      for (int64_t i = 0; i < nnz; i += 3) static_cast<T*>(const_cast<void*>(values.view.data))[i] = T(0.0f);
    });
    for (const int64_t k : {nnz / 3 - 1, nnz / 3, nnz / 3 + 1, nnz / 3 + 700}) {
      const SelectArgs args{dtype, values.view.data, nnz, k, Sign::kAny};
      EXPECT_EQ(backend::select_smallest(args), reference::select_smallest(args)) << k;
    }
  }
}

TEST(Select, NanIsDroppedLast) {
  const float values[] = {NAN, -0.5f, INFINITY, 0.0f, -0.0f};
  EXPECT_EQ(backend::select_smallest({DType::kFloat32, values, 5, 3, Sign::kAny}), (std::vector<int64_t>{1, 3, 4}));
  EXPECT_EQ(backend::select_smallest({DType::kFloat32, values, 5, 4, Sign::kAny}), (std::vector<int64_t>{1, 2, 3, 4}));
}

TEST(Select, RefusesMoreThanThereAre) {
  const float values[] = {1, -2, 3};
  refuses("cannot drop 4 of 3 connections", [&] { backend::select_smallest({DType::kFloat32, values, 3, 4, Sign::kAny}); });
  refuses("cannot drop 2 of 1 connections", [&] { backend::select_smallest({DType::kFloat32, values, 3, 2, Sign::kNegative}); });
  refuses("cannot drop 4 of 2 connections", [&] { backend::select_smallest({DType::kFloat32, values, 3, 4, Sign::kPositive}); });
  refuses("cannot drop 1 of 0 connections", [&] { backend::select_smallest({DType::kFloat32, values, 0, 1, Sign::kAny}); });
  std::vector<float> many(100000, 1.0f);
  many[77] = -1.0f;
  refuses("cannot drop 2 of 1 connections", [&] { backend::select_smallest({DType::kFloat32, many.data(), 100000, 2, Sign::kNegative}); });
}

TEST(GrowUniform, EqualsTheReference) {
  std::mt19937_64 rng(12);
  for (const auto& [out, in, nnz] : kShapes) {
    SCOPED_TRACE(nnz);
    const HostPattern pattern = reference::sample(out, in, nnz, rng());
    std::vector<int64_t> drop;
    for (int64_t slot = 0; slot < nnz; slot += 4) drop.push_back(slot);
    if (!drop.empty()) drop.push_back(drop.front());  // twice is once
    const EmptyPositions empty{pattern.view(), drop.data(), int64_t(drop.size())}, whole{pattern.view(), nullptr, 0};
    const int64_t k = std::min(nnz / 4, int64_t(drop.size()) - 1);
    expect_same(backend::grow_uniform(empty, k, 99), reference::grow_uniform(empty, k, 99));
    const int64_t some = std::min<int64_t>(out * in - nnz, nnz / 3);
    expect_same(backend::grow_uniform(whole, some, 1), reference::grow_uniform(whole, some, 1));
    expect_same(backend::grow_uniform(whole, 0, 1), {});
  }
}

TEST(GrowUniform, FillsAMatrixToTheLastPosition) {
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {40, 70}, {1, 3000}, {300, 90}}) {
    const int64_t positions = out * in;
    for (const int64_t nnz : {int64_t{0}, positions / 2, positions - 1, positions}) {
      const HostPattern pattern = reference::sample(out, in, nnz, 5);
      const EmptyPositions empty{pattern.view(), nullptr, 0};
      expect_same(backend::grow_uniform(empty, positions - nnz, 3), reference::grow_uniform(empty, positions - nnz, 3));
      std::vector<int64_t> all(static_cast<size_t>(nnz));
      for (int64_t slot = 0; slot < nnz; ++slot) all[size_t(slot)] = slot;
      const EmptyPositions nothing{pattern.view(), all.data(), nnz};
      expect_same(backend::grow_uniform(nothing, nnz, 4), reference::grow_uniform(nothing, nnz, 4));
    }
  }
}

TEST(GrowUniform, RefusesWhatDoesNotFit) {
  const HostPattern full = reference::sample(2, 2, 4, 1);
  const int64_t one[] = {1, 1}, beyond[] = {4}, below[] = {-1};
  refuses("cannot grow 1 connections: shape (2, 2) has 0 empty positions", [&] { backend::grow_uniform({full.view(), nullptr, 0}, 1, 1); });
  refuses("cannot grow 2 connections: shape (2, 2) has 1 empty positions", [&] { backend::grow_uniform({full.view(), one, 2}, 2, 1); });
  refuses("cannot grow 9 connections: shape (2, 2) has 0 empty positions", [&] { backend::grow_uniform({full.view(), nullptr, 0}, 9, 1); });
  refuses("slot 4 to drop is outside 0 .. 3", [&] { backend::grow_uniform({full.view(), beyond, 1}, 0, 1); });
  refuses("slot -1 to drop is outside 0 .. 3", [&] { backend::grow_uniform({full.view(), below, 1}, 1, 1); });
}

// dy and x of small whole numbers: sums are exact, and many of them equal.
struct Operands {
  std::vector<uint8_t> bytes[2];
  MatrixView dy, x;
  Operands(const Geometry& g, int64_t batch, DType dtype, std::mt19937_64& rng, int64_t range = 2) {
    const auto fill = [&](std::vector<uint8_t>& memory, int64_t cols) {
      return with_type(dtype, [&](auto element) {
        using T = decltype(element);
        memory.resize(size_t(batch * cols) * sizeof(T) + 16);
        T* data = reinterpret_cast<T*>(memory.data());
        for (int64_t i = 0; i < batch * cols; ++i) data[i] = T(float(int64_t(rng() % uint64_t(2 * range + 1)) - range));
        return matrix(data, batch, cols);
      });
    };
    dy = fill(bytes[0], g.out), x = fill(bytes[1], g.in);
  }
};

TEST(GrowGradient, EqualsTheReferenceWithTies) {
  std::mt19937_64 rng(5);
  for (const auto& [out, in, nnz] : {Shape{60, 1500, 9000}, {1, 9, 3}, {700, 50, 100}, {300, 1000, 90000}, {500, 1100, 50}, {1, 1, 0}, {1025, 300, 2000}}) {
    if (backend::is_left_out(out * in)) continue;
    SCOPED_TRACE(nnz);
    const HostPattern pattern = reference::sample(out, in, nnz, rng());
    const std::vector<int64_t> drop = nnz == 0 ? std::vector<int64_t>{} : std::vector<int64_t>{0, nnz - 1};
    for (const int64_t batch : {0, 4, 17}) {
      for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
        const Operands operands(pattern.geometry, batch, dtype, rng, batch == 4 ? 2 : 50);
        for (const int64_t k : {std::min<int64_t>(5, out * in - nnz), (out * in - nnz) / 30, out * in - nnz}) {
          const GrowGradientArgs args{{pattern.view(), drop.data(), int64_t(drop.size())}, operands.dy, operands.x, k};
          expect_same(backend::grow_gradient(args), reference::grow_gradient(args));
        }
      }
    }
  }
}

TEST(GrowGradient, TakesAnyStridesAndSmallTypes) {
  std::mt19937_64 rng(6);
  const HostPattern pattern = reference::sample(90, 1200, 20000, 3);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Operands operands(pattern.geometry, 8, dtype, rng, 5);
    operands.dy.rows = operands.x.rows = 4;  // every second row
    operands.dy.row_stride *= 2, operands.x.row_stride *= 2;
    const GrowGradientArgs args{{pattern.view(), nullptr, 0}, operands.dy, operands.x, 900};
    expect_same(backend::grow_gradient(args), reference::grow_gradient(args));
    operands.dy.row_stride = 0;  // one row for all, as the gradient of a sum arrives
    const GrowGradientArgs expanded{{pattern.view(), nullptr, 0}, operands.dy, operands.x, 900};
    expect_same(backend::grow_gradient(expanded), reference::grow_gradient(expanded));
  }
}

TEST(GrowGradient, RefusesWhatIsNotThere) {
  std::mt19937_64 rng(7);
  for (const auto& [out, in, nnz] : {Shape{2, 2, 3}, {300, 900, 1000}}) {
    const HostPattern pattern = reference::sample(out, in, nnz, 1);
    const int64_t room = out * in - nnz, twice[] = {1, 1}, beyond[] = {nnz};
    Operands operands(pattern.geometry, 2, DType::kFloat32, rng);
    const auto grow = [&](const int64_t* drop, int64_t drops, int64_t k) {
      return [=, &pattern, &operands] { backend::grow_gradient({{pattern.view(), drop, drops}, operands.dy, operands.x, k}); };
    };
    refuses("cannot grow " + std::to_string(room + 1) + " connections", grow(nullptr, 0, room + 1));
    refuses("has " + std::to_string(room + 1) + " empty positions", grow(twice, 2, room + 2));
    refuses("slot " + std::to_string(nnz) + " to drop is outside", grow(beyond, 1, 1));
    float* x = reinterpret_cast<float*>(operands.bytes[1].data());
    for (int64_t i = 0; i < 2 * in; ++i) x[i] = NAN;
    refuses("grow_gradient: only 0 of the 1 positions", grow(nullptr, 0, 1));
  }
}

}  // namespace
}  // namespace snack::testing
