// The last step of a product whose sums were made in parts.
#pragma once

#include "launch.hpp"
#include "snack/core/types.hpp"

namespace snack::cuda {

/// y (batch, features) = bias + partials[0] + ... + partials[splits - 1], added in this order; partials: float
/// (splits, batch, features). bias may be null. Reads 4 * splits and writes size_of(dtype) bytes an element.
void finish(const char* operation, const float* partials, int64_t splits, int64_t batch, int64_t features, const void* bias,
            DType dtype, void* y, Stream stream);

}  // namespace snack::cuda
