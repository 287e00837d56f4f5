// Element access of the reference: any dtype, any stride, as double.
#pragma once

#include "snack/core/types.hpp"

namespace snack::reference {

template <class T>
double as_double(T value) {
  if constexpr (sizeof(T) == 2) return double(float(value));
  else return double(value);
}

template <class T>
T from_double(double value) {
  if constexpr (sizeof(T) == 2) return T(float(value));
  else return T(value);
}

template <class T>
double at(const MatrixView& m, int64_t row, int64_t col) {
  return as_double(static_cast<const T*>(m.data)[row * m.row_stride + col * m.col_stride]);
}

}  // namespace snack::reference
