#include <sstream>

#include "snack/kernels/rewire.hpp"

namespace snack::cuda {

std::string describe(const RewireStatus& status, const Geometry& before) {
  const RewireError error = RewireError(status.error);
  if (error == RewireError::kNone) return "";
  std::ostringstream text;
  if (error == RewireError::kDropOutOfRange) {
    text << "rewire: slot " << status.row_or_slot << " to drop is outside 0 .. " << before.nnz - 1 << ".";
  } else if (error == RewireError::kDropTwice) {
    text << "rewire: slot " << status.row_or_slot << " is named twice in drop.";
  } else {
    text << "rewire: position (" << status.row_or_slot << ", " << status.col << ") to grow is ";
    if (error == RewireError::kGrowOutOfRange) text << "outside the shape (" << before.out << ", " << before.in << ").";
    else text << "occupied or named twice.";
  }
  return text.str();
}

}  // namespace snack::cuda
