// Rules that choose connections: which slots to drop, which positions to grow, which to start from.
// They throw Error on null pointers, negative numbers, slots out of range, and when there are fewer than k to choose from.
#pragma once

#include <string>
#include <vector>

#include "snack/core/cuda.hpp"
#include "snack/core/gemm.hpp"
#include "snack/core/parallel.hpp"
#include "snack/formats/pattern.hpp"

namespace snack {

enum class Sign : int { kAny, kPositive, kNegative };  // positive: value >= 0 (so +-0 and grown zeros belong to it)

/// The k slots of smallest |value| among those of `sign`, ascending. Ties: lower slot first. NaN counts as largest.
/// Throws Error when fewer than k slots have that sign.
struct SelectArgs {
  DType dtype = DType::kFloat32;
  const void* values = nullptr;
  int64_t nnz = 0;
  int64_t k = 0;
  Sign sign = Sign::kAny;
};

/// A topology and a list of its slots that count as empty (`drop`, may be null).
struct EmptyPositions {
  PatternView pattern;
  const int64_t* drop = nullptr;
  int64_t drops = 0;
};

struct Positions {
  std::vector<int64_t> rows, cols;
};

/// dy (batch, out), x (batch, in): candidates are scored by |sum_b dy[b, row] x[b, col]|.
struct GrowGradientArgs {
  EmptyPositions empty;
  MatrixView dy;
  MatrixView x;
  int64_t k = 0;
};

namespace reference {
std::vector<int64_t> select_smallest(const SelectArgs& args);
/// The first k distinct empty positions of the random stream `key`, in the order drawn: draw i is the linear position
/// floor(random_bits(key, i) * out * in / 2^64), row-major.
Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key);
/// The k empty positions of largest score, best first; ties: the position that is first in slot order. NaN is no score:
/// throws Error when fewer than k positions have one.
Positions grow_gradient(const GrowGradientArgs& args);
/// nnz distinct uniform positions: the first nnz distinct draws of the stream `key` (as in grow_uniform); above half
/// density the draws name the empty positions instead, so the cost is O(nnz log nnz) at any density.
HostPattern sample(int64_t out, int64_t in, int64_t nnz, uint64_t key);
}  // namespace reference

namespace cpu {
std::vector<int64_t> select_smallest(const SelectArgs& args);
Positions grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key);
/// Exact without a dense gradient: panels of dy^T x of at most 1 MiB (or one row) through `gemm`, a running selection of k.
Positions grow_gradient(const GrowGradientArgs& args, const Gemm& gemm, const ParallelFor& runner);
HostPattern sample(int64_t out, int64_t in, int64_t nnz, uint64_t key, const ParallelFor& runner);
}  // namespace cpu

namespace cuda {

/// Why nothing was chosen, written by the device.
enum class SelectError : int { kNone, kTooFewValues, kSlotOutOfRange, kNoRoom, kTooFewGradients };
struct SelectStatus {
  int64_t error = 0;   // a SelectError
  int64_t number = 0;  // how many values or positions there are, or the slot that does not exist
};

/// Scratch of the operations below on the current device.
int64_t select_smallest_workspace(DType dtype, int64_t nnz);
int64_t grow_uniform_workspace(const Geometry& geometry, int64_t k);
int64_t grow_gradient_workspace(const Geometry& geometry, int64_t k, DType dtype);

/// The same choices on the device, without waiting for it: pointers of the arguments are device memory, results go to device memory.
/// *status is written last; on an error the results are not defined. Fewer than 2^31 slots.
void select_smallest(const SelectArgs& args, int64_t* slots, SelectStatus* status, const Resources& resources);
void grow_uniform(const EmptyPositions& empty, int64_t k, uint64_t key, int64_t* rows, int64_t* cols, SelectStatus* status, const Resources& resources);
/// Sums are float (of float64 operands double). Time is that of a dense product without tensor cores, two or three times.
void grow_gradient(const GrowGradientArgs& args, int64_t* rows, int64_t* cols, SelectStatus* status, const Resources& resources);

/// The sentence for a status that the host has read, after a choice of k; empty when there was no error.
std::string describe(const SelectStatus& status, const Geometry& geometry, int64_t k);

}  // namespace cuda

}  // namespace snack
