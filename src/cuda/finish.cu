#include "finish.hpp"

#include <algorithm>

#include "element.cuh"
#include "plan/cuda_layout.hpp"

namespace snack::cuda {
namespace {

// A block takes kThreads features of one batch column after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) finish_kernel(const float* partials, int splits, int64_t batch, int64_t features,
                                                         const T* bias, T* y, uint32_t blocks_a_column) {
  await_stream();
  constexpr int kAtOnce = kFinishAtOnce;
  const int64_t f = int64_t(blockIdx.x % blocks_a_column) * kThreads + threadIdx.x;
  if (f >= features) return;
  const float start = bias == nullptr ? 0.f : to_float(bias[f]);
  const int64_t elements = batch * features;
  for (int64_t b = blockIdx.x / blocks_a_column; b < batch; b += gridDim.x / blocks_a_column) {
    float sum = start;
    for (int s = 0; s < splits; s += kAtOnce) {  // loads in flight together, added in order
      float part[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part[i] = s + i < splits ? partials[(s + i) * elements + b * features + f] : 0.f;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sum += part[i];
    }
    y[b * features + f] = from_float<T>(sum);
  }
}

}  // namespace

void finish(const char* operation, const float* partials, int64_t splits, int64_t batch, int64_t features, const void* bias,
            DType dtype, void* y, Stream stream) {
  const int64_t blocks_a_column = ceil_div(features, kThreads), columns = std::clamp<int64_t>(kMaxGrid / blocks_a_column, 1, std::min<int64_t>(batch, 1024));
  with_device_type(operation, dtype, [&](auto element) {
    using T = decltype(element);
    launch<finish_kernel<T>>(operation, blocks_a_column * columns, kThreads, 0, stream, partials, int(splits), batch, features,
                             static_cast<const T*>(bias), static_cast<T*>(y), uint32_t(blocks_a_column));
  });
}

}  // namespace snack::cuda
