#include <sstream>

#include "snack/kernels/select.hpp"

namespace snack::cuda {

// The sentences of the other backends.
std::string describe(const SelectStatus& status, const Geometry& g, int64_t k) {
  std::ostringstream text;
  switch (SelectError(status.error)) {
    case SelectError::kNone: break;
    case SelectError::kTooFewValues: text << "cannot drop " << k << " of " << status.number << " connections."; break;
    case SelectError::kSlotOutOfRange: text << "slot " << status.number << " to drop is outside 0 .. " << g.nnz - 1 << "."; break;
    case SelectError::kNoRoom:
      text << "cannot grow " << k << " connections: shape (" << g.out << ", " << g.in << ") has " << status.number << " empty positions.";
      break;
    case SelectError::kTooFewGradients:
      text << "grow_gradient: only " << status.number << " of the " << k << " positions asked for have a gradient that is a number; the others are NaN.";
      break;
  }
  return text.str();
}

}  // namespace snack::cuda
