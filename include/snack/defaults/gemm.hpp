// A dense product for programs that link no BLAS.
#pragma once

#include "snack/core/gemm.hpp"

namespace snack {

/// float32 and float64, blocked for the caches, on the calling thread; any strides. Correct and portable, several times
/// slower than a BLAS. Good enough for grow_gradient. For the products prefer no gemm at all to this one, as cpu::Context
/// does: a plan takes a gemm for a vendor's and would choose decoded panels where streaming is faster.
Gemm default_gemm();

}  // namespace snack
