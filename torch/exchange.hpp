// exchange_ on tensors of any device: everything is checked and the arguments of the kernels are filled in. A `Backend` does it:
//   static Tensor run(const Tensor& index, const ExchangeArgs&)  -> int64 (2,): connections moved, error
#pragma once

#include <array>

#include "products.hpp"
#include "snack/kernels/exchange.hpp"

namespace snack::torch_face {

inline CarriedType carried_type(const Tensor& t, int64_t i) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return CarriedType::kFloat32;
    case ScalarType::Half: return CarriedType::kFloat16;
    case ScalarType::BFloat16: return CarriedType::kBFloat16;
    case ScalarType::Double: return CarriedType::kFloat64;
    case ScalarType::Char:
    case ScalarType::Byte: return CarriedType::kInt8;
    case ScalarType::Short: return CarriedType::kInt16;
    case ScalarType::Int: return CarriedType::kInt32;
    case ScalarType::Long: return CarriedType::kInt64;
    case ScalarType::Bool: return CarriedType::kBool;
    default: fail("exchange_: carried[", i, "] has a dtype that cannot be carried; floats of 2, 4 or 8 bytes, integers and bool can.");
  }
}

inline Carried carried_tensor(const Tensor& t, int64_t i, const Tensor& index) {
  check_device("exchange_", "a carried tensor", t, index);
  SNACK_CHECK(t.dim() == 1 && t.is_contiguous() && t.numel() == index.numel(), "exchange_: carried[", i, "] has ", t.numel(),
              " entries, the pattern has ", index.numel(), " connections (what is carried must be contiguous and 1-D).");
  return {carried_type(t, i), t.data_ptr()};
}

inline void set_gradient(ExchangeArgs& args, const std::optional<Tensor>& dy, const std::optional<Tensor>& x, const Tensor& index) {
  SNACK_CHECK(dy && x, "exchange_: growth by gradient needs dy and x.");
  check_matrix("exchange_", "dy", *dy, index, args.geometry.out, "out_features");
  check_matrix("exchange_", "x", *x, index, args.geometry.in, "in_features");
  SNACK_CHECK(dy->size(0) == x->size(0), "exchange_: dy has ", dy->size(0), " rows and x has ", x->size(0), "; both are the batch.");
  const DType dtype = dtype_of(*x, "exchange_", "x");
  check_same("exchange_", dtype_of(*dy, "exchange_", "dy"), "dy", dtype, "x");
  args.dy = matrix(*dy, dtype);
  args.x = matrix(*x, dtype);
}

template <class Backend>
Tensor exchange(const Tensor& index, const Tensor& tile_ptr, const std::vector<Tensor>& carried, const Tensor& fills, int64_t drop_rule,
                double fraction, int64_t k, int64_t grow_rule, int64_t key, std::optional<Tensor> dy, std::optional<Tensor> x, int64_t out,
                int64_t in) {
  const PatternView pattern = pattern_view("exchange_", index, tile_ptr, out, in);
  const int64_t count = int64_t(carried.size());
  SNACK_CHECK(count >= 1 && count <= kMaxCarried, "exchange_: ", count, " tensors are to be carried, expected the values and at most ",
              kMaxCarried - 1, " more.");
  std::array<Carried, kMaxCarried> tensors;
  for (int64_t i = 0; i < count; ++i) tensors[size_t(i)] = carried_tensor(carried[size_t(i)], i, index);
  dtype_of(carried[0], "exchange_", "the values, carried[0],");
  check_device("exchange_", "fills", fills, index);
  SNACK_CHECK(fills.dim() == 1 && fills.is_contiguous() && fills.numel() == count && fills.scalar_type() == ScalarType::Float,
              "exchange_: fills must be a contiguous 1-D float32 tensor of ", count, " entries, one a carried tensor.");
  ExchangeArgs args{pattern.geometry, index.data_ptr(), static_cast<int64_t*>(tile_ptr.data_ptr()), tensors.data(), count,
                    static_cast<const float*>(fills.data_ptr()), DropRule(drop_rule), fraction, k, GrowRule(grow_rule), uint64_t(key), {}, {}};
  if (args.grow_rule == GrowRule::kGradient) set_gradient(args, dy, x, index);
  return Backend::run(index, args);
}

}  // namespace snack::torch_face
