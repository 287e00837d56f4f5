// exchange of a backend (SNACK_TEST_BACKEND: a header) against the reference: index, tile pointers and everything carried, bit for bit.
#include <gtest/gtest.h>

#include SNACK_TEST_BACKEND
#include "snack/core/error.hpp"
#include "snack/kernels/exchange.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing {
namespace {

struct Shape {
  int64_t out, in, nnz;
};

// What an exchange changes, on the host.
struct Layer {
  HostPattern pattern;
  std::vector<CarriedType> types;
  std::vector<std::vector<uint8_t>> carried;
  std::vector<float> fills;

  // Values of which many are equal, some infinite and some not a number; the other tensors hold the number of their slot.
  Layer(HostPattern p, std::vector<CarriedType> t, uint64_t seed, bool special = false) : pattern(std::move(p)), types(std::move(t)) {
    std::mt19937_64 rng(seed);
    const int64_t nnz = pattern.geometry.nnz;
    for (size_t i = 0; i < types.size(); ++i) {
      const int64_t size = size_of(types[i]);
      carried.emplace_back(size_t(nnz * size) + 16);
      fills.push_back(float(i) + 0.5f);
      for (int64_t slot = 0; slot < nnz; ++slot) {
        uint64_t bits = uint64_t(slot + 1);
        if (types[i] == CarriedType::kBool) bits %= 2;
        if (i == 0) {
          const float value = float(int64_t(rng() % 2001) - 1000) / 512;
          const double special_value = rng() % 9 == 0 ? NAN : rng() % 9 == 0 ? -INFINITY : double(value);
          bits = bits_of(types[0], special ? special_value : double(value));
        }
        std::memcpy(data(i) + slot * size, &bits, size_t(size));
      }
    }
  }

  uint8_t* data(size_t i) {  // aligned to 16 bytes
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(carried[i].data()) + 15) / 16 * 16);
  }

  static uint64_t bits_of(CarriedType type, double value) {
    if (type == CarriedType::kFloat64) return std::bit_cast<uint64_t>(value);
    if (type == CarriedType::kFloat16) return Half(float(value)).bits;
    if (type == CarriedType::kBFloat16) return BFloat16(float(value)).bits;
    return std::bit_cast<uint32_t>(float(value));
  }

  template <class Backend>
  ExchangeResult exchange(ExchangeArgs args, Backend backend) {
    std::vector<Carried> tensors;
    for (size_t i = 0; i < types.size(); ++i) tensors.push_back({types[i], data(i)});
    args.geometry = pattern.geometry, args.index = pattern.index.data(), args.tile_ptr = pattern.tile_ptr.data();
    args.carried = tensors.data(), args.carried_count = int64_t(tensors.size()), args.fills = fills.data();
    return backend(args);
  }
};

void expect_same(Layer& a, Layer& b) {
  EXPECT_EQ(a.pattern.index, b.pattern.index);
  EXPECT_EQ(a.pattern.tile_ptr, b.pattern.tile_ptr);
  for (size_t i = 0; i < a.types.size(); ++i)
    EXPECT_EQ(std::memcmp(a.data(i), b.data(i), size_t(a.pattern.geometry.nnz * size_of(a.types[i]))), 0) << "carried " << i;
}

// Two updates one after another.
void expect_equals_reference(const Layer& layer, ExchangeArgs args) {
  Layer ours = layer, expected = layer;
  for (int update = 0; update < 2; ++update, ++args.key) {
    const ExchangeResult result = ours.exchange(args, backend::exchange);
    const ExchangeResult wanted = expected.exchange(args, [](const ExchangeArgs& a) { return reference::exchange(a); });
    EXPECT_EQ(result.moved, wanted.moved);
    EXPECT_EQ(result.error, wanted.error);
    expect_same(ours, expected);
  }
}

using enum CarriedType;
const std::vector<CarriedType> kTwo = {kFloat32, kFloat32};

// Bits and lists, narrow and tall, one block and many, row starts and none, the last panel narrow, everything full.
const Shape kShapes[] = {{100, 2100, 9000}, {5, 5, 20},     {3000, 5000, 400}, {300, 1000, 90000}, {1, 1, 1},
                         {2000, 5, 4000},   {2000, 1, 1000}, {1, 3000, 200},    {130, 3000, 6000},  {1000000, 1000000, 2000}};

TEST(Exchange, EqualsTheReference) {
  uint64_t seed = 1;
  for (const auto& [out, in, nnz] : kShapes) {
    SCOPED_TRACE(std::to_string(out) + " x " + std::to_string(in) + ", " + std::to_string(nnz));
    ++seed;
    const Layer layer(reference::sample(out, in, nnz, seed), kTwo, seed);
    expect_equals_reference(layer, {.drop_rule = DropRule::kMagnitude, .k = nnz / 4, .key = seed});
    expect_equals_reference(layer, {.drop_rule = DropRule::kSigned, .fraction = 0.3, .k = nnz * 3 / 10, .key = seed});
  }
}

TEST(Exchange, FullTiles) {
  for (const auto& [out, in, nnz] : {Shape{64, 1024, 65536}, {70, 1025, 71750}}) {
    Layer ours(reference::sample(out, in, nnz, 1), {kFloat32}, 2), expected = ours;
    const ExchangeArgs args{.k = nnz / 50, .key = 3};
    EXPECT_EQ(ours.exchange(args, backend::exchange).moved, nnz / 50);
    expected.exchange(args, [](const ExchangeArgs& a) { return reference::exchange(a); });
    expect_same(ours, expected);
  }
}

TEST(Exchange, MovesNothingOrEverything) {
  for (const auto& [out, in, nnz] : {Shape{40, 70, 900}, {40, 70, 2800}, {300, 1000, 20000}, {50, 20000, 700}, {3, 4, 0}, {1, 1, 1}}) {
    SCOPED_TRACE(nnz);
    const Layer layer(reference::sample(out, in, nnz, 3), kTwo, 4);
    for (const int64_t k : {int64_t{0}, std::min<int64_t>(1, nnz), nnz}) {
      expect_equals_reference(layer, {.k = k, .key = 7});
      expect_equals_reference(layer, {.drop_rule = DropRule::kSigned, .fraction = 1, .k = k, .key = 8});
    }
    expect_equals_reference(layer, {.drop_rule = DropRule::kSigned, .fraction = 0, .k = nnz, .key = 8});
  }
}

TEST(Exchange, CarriesEveryType) {
  for (const auto& [out, in, nnz] : {Shape{300, 1000, 100000}, {300, 3000, 3001}}) {
    for (const CarriedType values : {kFloat32, kFloat16, kBFloat16, kFloat64}) {
      const Layer layer(reference::sample(out, in, nnz, 5), {values, kFloat64, kInt8, kBFloat16, kInt64, kBool, kFloat16, kInt16, kInt32, kFloat32}, 6, true);
      expect_equals_reference(layer, {.k = nnz / 3, .key = 9});
      expect_equals_reference(layer, {.drop_rule = DropRule::kSigned, .fraction = 0.5, .k = nnz / 3, .key = 9});
    }
  }
}

// dy and x of small whole numbers: sums are exact, and many of them equal.
struct Operands {
  std::vector<uint8_t> dy_bytes, x_bytes;
  MatrixView dy, x;
  Operands(const Geometry& g, int64_t batch, DType dtype, uint64_t seed, int range = 3) {
    std::mt19937_64 rng(seed);
    with_type(dtype, [&](auto element) {
      using T = decltype(element);
      const auto fill = [&](std::vector<uint8_t>& bytes, int64_t cols) {
        bytes.resize(size_t(batch * cols) * sizeof(T) + 16);
        T* data = reinterpret_cast<T*>(bytes.data());
        for (int64_t i = 0; i < batch * cols; ++i) data[i] = T(float(int64_t(rng() % uint64_t(2 * range + 1)) - range));
        return matrix(data, batch, cols);
      };
      dy = fill(dy_bytes, g.out), x = fill(x_bytes, g.in);
    });
  }
};

TEST(Exchange, ByGradientEqualsTheReference) {
  uint64_t seed = 100;
  for (const auto& [out, in, nnz] : {Shape{100, 2100, 9000}, {300, 1000, 90000}, {300, 1100, 900}, {5, 5, 20}, {1, 1, 1}, {2000, 5, 4000}, {3, 3000, 200}, {300, 1000, 3000}, {60, 1500, 9000}}) {
    if (backend::is_left_out(out * in)) continue;
    SCOPED_TRACE(std::to_string(out) + " x " + std::to_string(in) + ", " + std::to_string(nnz));
    ++seed;
    const Layer layer(reference::sample(out, in, nnz, seed), kTwo, seed);
    for (const int64_t batch : {0, 1, 4, 19}) {
      const DType dtype = batch == 1 ? DType::kFloat16 : batch == 4 ? DType::kBFloat16 : batch == 19 ? DType::kFloat64 : DType::kFloat32;
      const Operands operands(layer.pattern.geometry, batch, dtype, seed);
      expect_equals_reference(layer, {.drop_rule = DropRule::kMagnitude, .k = nnz / 4, .grow_rule = GrowRule::kGradient, .dy = operands.dy, .x = operands.x});
    }
    const Operands operands(layer.pattern.geometry, 9, DType::kFloat32, seed, 40);
    expect_equals_reference(layer, {.drop_rule = DropRule::kSigned, .fraction = 0.3, .k = nnz, .grow_rule = GrowRule::kGradient, .dy = operands.dy, .x = operands.x});
  }
}

TEST(Exchange, GradientsThatAreNoNumber) {
  for (const auto& [out, in, nnz] : {Shape{60, 50, 300}, {300, 1000, 30000}, {300, 1000, 500}}) {
    const Layer layer(reference::sample(out, in, nnz, 3), kTwo, 4);
    Operands operands(layer.pattern.geometry, 3, DType::kFloat32, 5);
    float* x = reinterpret_cast<float*>(operands.x_bytes.data());
    float* dy = reinterpret_cast<float*>(operands.dy_bytes.data());
    for (int64_t col = 0; col < in; col += 3) x[col] = NAN;
    dy[2] = INFINITY;
    const ExchangeArgs args{.k = nnz / 3, .grow_rule = GrowRule::kGradient, .dy = operands.dy, .x = operands.x};
    expect_equals_reference(layer, args);

    for (int64_t col = 1; col < in; ++col) x[col] = NAN;  // one column is left, with fewer positions than are to grow
    Layer ours = layer, untouched = layer;
    ExchangeArgs all = args;
    all.k = std::max(nnz / 2, 2 * out) > nnz ? nnz : std::max(nnz / 2, 2 * out);
    try {
      const ExchangeResult result = ours.exchange(all, backend::exchange);
      EXPECT_EQ(result.moved, 0);
      EXPECT_EQ(result.error, int64_t(ExchangeError::kTooFewGradients));
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("grow_gradient: only"), std::string::npos) << error.what();
    }
    expect_same(ours, untouched);
  }
}

TEST(Exchange, RowsThatAreFullOrEmpty) {
  std::mt19937_64 rng(2);
  for (const int64_t nnz : {5000, 60000}) {
    const Layer layer(skewed_pattern(200, 1300, nnz, rng), kTwo, 8);
    expect_equals_reference(layer, {.k = nnz / 2, .key = 10});
  }
}

TEST(Exchange, RefusesBadArguments) {
  Layer layer(reference::sample(30, 40, 100, 5), kTwo, 6);
  Layer before = layer;
  const auto refuses = [&](const ExchangeArgs& args, const std::string& reason) {
    try {
      layer.exchange(args, backend::exchange);
      ADD_FAILURE() << "accepted, expected: " << reason;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  };
  refuses({.k = 101}, "k=101 is outside 0 .. 100");
  refuses({.k = -1}, "k=-1");
  refuses({.drop_rule = DropRule::kSigned, .fraction = 1.5, .k = 1}, "fraction=1.5");
  refuses({.drop_rule = DropRule::kSigned, .fraction = NAN, .k = 1}, "fraction=nan");
  refuses({.drop_rule = DropRule(7), .k = 1}, "drop rule 7");
  refuses({.k = 1, .grow_rule = GrowRule(7)}, "grow rule 7");
  expect_same(layer, before);
}

}  // namespace
}  // namespace snack::testing
