// exchange: one update of dynamic sparse training, in place. Connections are dropped by their values, as many are grown at random or
// by gradient, and what belongs to a connection follows it. The number of connections and all addresses stay.
//
//   dropped = rule(carried[0]);  grown = rule(positions that are empty then);  carried[i][new slot] = carried[i][old slot] or fill[i]
//
// It gives what select_smallest, grow_uniform or grow_gradient and rewire (select.hpp, rewire.hpp) give one after another.
#pragma once

#include "snack/core/cuda.hpp"
#include "snack/core/gemm.hpp"
#include "snack/core/parallel.hpp"
#include "snack/core/types.hpp"
#include "snack/formats/pattern.hpp"

namespace snack {

/// kMagnitude: the k smallest |value|. kSigned (SET, Mocanu et al. 2018): floor(fraction * n) of the n negative values and as much of
/// the others, those nearest to 0; where that is more than k in all, both numbers are cut in proportion, rounded down. Ties: the lower
/// slot. NaN counts as largest.
enum class DropRule : int { kMagnitude, kSigned };

/// kUniform: the first empty positions that the random stream `key` draws, as grow_uniform. kGradient: those of largest |dy^T x|, as
/// grow_gradient. Positions of dropped connections are empty; one that is grown again starts anew.
enum class GrowRule : int { kUniform, kGradient };

/// What a tensor holds that follows its connections.
enum class CarriedType : int { kFloat32, kFloat16, kBFloat16, kFloat64, kInt8, kInt16, kInt32, kInt64, kBool };

constexpr int64_t size_of(CarriedType type) {
  switch (type) {
    case CarriedType::kInt8:
    case CarriedType::kBool: return 1;
    case CarriedType::kFloat16:
    case CarriedType::kBFloat16:
    case CarriedType::kInt16: return 2;
    case CarriedType::kFloat64:
    case CarriedType::kInt64: return 8;
    default: return 4;
  }
}

struct Carried {
  CarriedType type = CarriedType::kFloat32;
  void* data = nullptr;  // nnz elements in slot order, changed in place
};

/// Everything is changed in place: index, tile_ptr and the carried tensors. carried[0] are the values: a floating type.
struct ExchangeArgs {
  Geometry geometry;
  void* index = nullptr;        // geometry.nnz words
  int64_t* tile_ptr = nullptr;  // geometry.pointer_words()
  const Carried* carried = nullptr;  // on the host
  int64_t carried_count = 0;         // 1 .. kMaxCarried
  const float* fills = nullptr;      // one a carried tensor: what grown slots get, converted (integers: towards 0). Where the tensors are
  DropRule drop_rule = DropRule::kMagnitude;
  double fraction = 0;               // of kSigned, in [0, 1]
  int64_t k = 0;                     // connections to move, at most: 0 .. nnz
  GrowRule grow_rule = GrowRule::kUniform;
  uint64_t key = 0;                  // of kUniform
  MatrixView dy, x;                  // of kGradient: (batch, out), (batch, in), one dtype
};

inline constexpr int64_t kMaxCarried = 16;

enum class ExchangeError : int64_t {
  kNone,
  kTooFewGradients  // fewer empty positions have a gradient that is a number than connections were to be grown
};

/// What a backend reports. On an error nothing was changed.
struct ExchangeResult {
  int64_t moved = 0;  // connections dropped, and grown
  int64_t error = 0;  // an ExchangeError
};

/// Both throw Error where a card would report an ExchangeError.
namespace reference {
ExchangeResult exchange(const ExchangeArgs& args);
}
namespace cpu {
ExchangeResult exchange(const ExchangeArgs& args, const Gemm& gemm, const ParallelFor& runner);
}

namespace cuda {
/// Scratch of an exchange on the current device: at most 16 bytes a slot and 3 MiB where at most half of the connections may move and no
/// element is longer than 4 bytes; 4 bytes a slot more with elements of 8, and up to 12 more where all connections may move.
int64_t exchange_workspace(const ExchangeArgs& args);

/// The same on the device, without waiting for it; but for `carried`, pointers of `args` are device memory. *result is written last.
/// nnz < 2^31. The launch can be captured; other random numbers need another key, so another launch.
void exchange(const ExchangeArgs& args, ExchangeResult* result, const Resources& resources);
}  // namespace cuda

}  // namespace snack
