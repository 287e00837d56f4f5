#include <cstdlib>
#include <sstream>

#include "snack/core/cuda.hpp"

namespace snack::cuda {

// Machine code for X.Y runs on X.Z with Z >= Y; of an architecture with suffix 'a' on X.Y alone; PTX on everything later.
bool runs_on(const char* architectures, int major, int minor) {
  std::istringstream list(architectures);
  std::string entry;
  while (list >> entry) {
    char* rest = nullptr;
    const long number = std::strtol(entry.c_str(), &rest, 10);
    const int code_major = int(number / 10), code_minor = int(number % 10);
    const bool is_exact = *rest == 'a';
    const bool has_ptx = entry.find("+PTX") != std::string::npos && !is_exact;
    if (code_major == major && (is_exact ? code_minor == minor : code_minor <= minor)) return true;
    if (has_ptx && (code_major < major || (code_major == major && code_minor <= minor))) return true;
  }
  return false;
}

}  // namespace snack::cuda
