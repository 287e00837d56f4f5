// Element types. Half and BFloat16 are storage types: arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace snack {

enum class DType : int { kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat64: return "float64";
  }
  return "unknown";
}

constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

/// bfloat16: the upper half of a float, rounded to nearest even.
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? uint16_t((word >> 16) | 0x40u) : uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

/// IEEE binary16, rounded to nearest even.
struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = uint16_t(sign | 0x7e00u);  // NaN
    } else if (magnitude >= 0x477ff000u) {
      bits = uint16_t(sign | 0x7c00u);  // rounds to infinity
    } else if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 lets the floating-point adder do the rounding at bit 2^-24.
      const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
      bits = uint16_t(sign | (std::bit_cast<uint32_t>(rounded) - 0x3f000000u));
    } else {
      bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
    }
  }
  explicit operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 31u, mantissa = bits & 0x3ffu;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {
      const float value = float(mantissa) * 0x1p-24f;
      return sign ? -value : value;
    }
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
};

template <class T>
struct ElementTraits;
template <>
struct ElementTraits<float> {
  using Accumulator = float;
  static constexpr DType dtype = DType::kFloat32;
};
template <>
struct ElementTraits<double> {
  using Accumulator = double;
  static constexpr DType dtype = DType::kFloat64;
};
template <>
struct ElementTraits<Half> {
  using Accumulator = float;
  static constexpr DType dtype = DType::kFloat16;
};
template <>
struct ElementTraits<BFloat16> {
  using Accumulator = float;
  static constexpr DType dtype = DType::kBFloat16;
};

/// The type in which products of T are summed: float for 16-bit types, else T itself.
template <class T>
using Accumulator = typename ElementTraits<T>::Accumulator;

/// Calls f with a default-constructed value of the C++ type of `dtype`.
template <class F>
decltype(auto) with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(Half{});
    case DType::kBFloat16: return f(BFloat16{});
    case DType::kFloat64: return f(double{});
    case DType::kFloat32: break;
  }
  return f(float{});
}

/// A dense matrix in memory it does not own; strides count elements and may be 0 or any order.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0, cols = 0;
  int64_t row_stride = 0, col_stride = 1;
};

/// The view of a contiguous (rows, cols) array of float, double, Half or BFloat16.
template <class T>
MatrixView matrix(const T* data, int64_t rows, int64_t cols) {
  return {data, ElementTraits<T>::dtype, rows, cols, cols, 1};
}

}  // namespace snack
