// exchange on the host, made of the list operations of a backend:
//   std::vector<int64_t> select_smallest(const SelectArgs&);  Positions grow_uniform(const EmptyPositions&, int64_t k, uint64_t key);
//   Positions grow_gradient(const GrowGradientArgs&);  RewireResult rewire(const RewireArgs&);  ParallelFor runner
#pragma once

#include <algorithm>
#include <cstring>

#include "snack/core/error.hpp"
#include "snack/kernels/check.hpp"

namespace snack {

inline DType dtype_of(CarriedType type) {
  switch (type) {
    case CarriedType::kFloat16: return DType::kFloat16;
    case CarriedType::kBFloat16: return DType::kBFloat16;
    case CarriedType::kFloat64: return DType::kFloat64;
    default: return DType::kFloat32;
  }
}

inline int64_t count_negatives(const Carried& values, int64_t nnz) {
  return with_type(dtype_of(values.type), [&](auto element) {
    using T = decltype(element);
    const T* v = static_cast<const T*>(values.data);
    return int64_t(std::count_if(v, v + nnz, [](T value) {
      if constexpr (sizeof(T) == 2) return float(value) < 0;
      else return value < 0;
    }));
  });
}

template <class Lists>
std::vector<int64_t> slots_to_drop(const ExchangeArgs& args, const Lists& lists) {
  SelectArgs select{dtype_of(args.carried[0].type), args.carried[0].data, args.geometry.nnz, args.k, Sign::kAny};
  if (args.drop_rule == DropRule::kMagnitude) return lists.select_smallest(select);
  const int64_t negatives = count_negatives(args.carried[0], select.nnz);
  int64_t below = int64_t(args.fraction * double(negatives)), above = int64_t(args.fraction * double(select.nnz - negatives));
  if (const int64_t sum = below + above; sum > args.k) above = above * args.k / sum, below = below * args.k / sum;
  select.sign = Sign::kPositive, select.k = above;
  std::vector<int64_t> drop = lists.select_smallest(select);
  select.sign = Sign::kNegative, select.k = below;
  const std::vector<int64_t> negative = lists.select_smallest(select);
  drop.insert(drop.end(), negative.begin(), negative.end());
  return drop;
}

template <class Lists>
Positions positions_to_grow(const ExchangeArgs& args, const std::vector<int64_t>& drop, const Lists& lists) {
  const int64_t k = int64_t(drop.size());
  const EmptyPositions empty{{args.geometry, args.index, args.tile_ptr}, drop.data(), k};
  if (args.grow_rule == GrowRule::kUniform) return lists.grow_uniform(empty, k, args.key);
  return lists.grow_gradient({empty, args.dy, args.x, k});
}

/// `fill` as an element of `type`.
template <class F>
void with_fill(CarriedType type, float fill, F&& f) {
  switch (type) {
    case CarriedType::kFloat32: return f(fill);
    case CarriedType::kFloat16: return f(Half(fill));
    case CarriedType::kBFloat16: return f(BFloat16(fill));
    case CarriedType::kFloat64: return f(double(fill));
    case CarriedType::kInt8: return f(int8_t(int64_t(fill)));  // of uint8 too: the bits of 255 and -1 are the same
    case CarriedType::kInt16: return f(int16_t(int64_t(fill)));
    case CarriedType::kInt32: return f(int32_t(int64_t(fill)));
    case CarriedType::kInt64: return f(int64_t(fill));
    case CarriedType::kBool: return f(uint8_t(fill != 0));
  }
}

inline void carry(const Carried& tensor, float fill, const std::vector<int64_t>& source, const ParallelFor& runner) {
  const int64_t count = int64_t(source.size());
  constexpr int64_t kChunk = 1 << 16;
  with_fill(tensor.type, fill, [&](auto grown) {
    using T = decltype(grown);
    T* data = static_cast<T*>(tensor.data);
    const std::vector<T> old(data, data + count);
    parallel_for(runner, ceil_div(count, kChunk), [&](int64_t chunk) {
      for (int64_t slot = chunk * kChunk; slot < std::min((chunk + 1) * kChunk, count); ++slot)
        data[slot] = source[slot] < 0 ? grown : old[source[slot]];
    });
  });
}

template <class Lists>
ExchangeResult exchange_lists(const ExchangeArgs& args, const Lists& lists) {
  check(args);
  const std::vector<int64_t> drop = slots_to_drop(args, lists);
  const int64_t moved = int64_t(drop.size());
  if (moved == 0) return {};
  const Positions grow = positions_to_grow(args, drop, lists);
  const RewireResult edited = lists.rewire({{args.geometry, args.index, args.tile_ptr}, drop.data(), moved, grow.rows.data(), grow.cols.data(), moved});
  for (int64_t i = 0; i < args.carried_count; ++i) carry(args.carried[i], args.fills[i], edited.source, lists.runner);
  std::copy(edited.pattern.index.begin(), edited.pattern.index.end(), static_cast<uint8_t*>(args.index));
  std::copy(edited.pattern.tile_ptr.begin(), edited.pattern.tile_ptr.end(), args.tile_ptr);
  return {moved, 0};
}

}  // namespace snack
