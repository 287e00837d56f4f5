#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "snack/core/random.hpp"
#include "snack/core/types.hpp"

namespace snack {

TEST(Half, RoundTripsEveryFiniteValue) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    Half half;
    half.bits = uint16_t(bits);
    const float value = float(half);
    if (std::isnan(value)) EXPECT_TRUE(std::isnan(float(Half(value))));
    else EXPECT_EQ(Half(value).bits, half.bits) << bits;
  }
}

TEST(Half, RoundsToNearestEven) {
  EXPECT_EQ(float(Half(2049.0f)), 2048.0f);  // halfway between 2048 and 2050, even mantissa wins
  EXPECT_EQ(float(Half(2051.0f)), 2052.0f);
  EXPECT_EQ(float(Half(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(float(Half(65520.0f))));
  EXPECT_EQ(float(Half(0x1p-25f)), 0.0f);
  EXPECT_EQ(float(Half(0x1.8p-25f)), 0x1p-24f);
}

TEST(BFloat16, RoundsToNearestEvenAndKeepsNaN) {
  EXPECT_EQ(float(BFloat16(257.0f)), 256.0f);
  EXPECT_EQ(float(BFloat16(259.0f)), 260.0f);
  EXPECT_TRUE(std::isnan(float(BFloat16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(float(BFloat16(std::numeric_limits<float>::max()))));
}

TEST(Random, IsSplitMix64) {
  // First outputs of the published generator seeded with 1234567.
  EXPECT_EQ(random_bits(1234567, 0), 6457827717110365317ull);
  EXPECT_EQ(random_bits(1234567, 1), 3203168211198807973ull);
  EXPECT_EQ(random_bits(1234567, 2), 9817491932198370423ull);
}

TEST(Random, BoundedStaysInside) {
  EXPECT_EQ(bounded(~uint64_t{0}, 10), 9u);
  EXPECT_EQ(bounded(0, 10), 0u);
  EXPECT_EQ(bounded(uint64_t{1} << 63, 10), 5u);
}

}  // namespace snack
