#include "backend.hpp"

namespace example {

std::unique_ptr<Backend> cuda_backend() {
  snack::fail("--device cuda: this program was built without CUDA (", SNACK_HAS_CUDA ? "nvcc was not found" : "so was its snack library",
              "); use --device cpu, or build both with nvcc.");
}

}  // namespace example
