#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "backend.hpp"

namespace example {
namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw snack::Error(std::string(what) + ": " + cudaGetErrorString(status) + ".");
}

constexpr int kThreads = 256;
unsigned blocks_for(int64_t count) { return unsigned(std::min<int64_t>((count + kThreads - 1) / kThreads, 4096)); }

// f(i) for i in [0, count), a grid-stride loop.
template <class F>
__global__ void each(int64_t count, F f) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) f(i);
}

// One thread a row: there are few classes.
__global__ void softmax_rows(float* logits, const uint8_t* labels, int64_t batch, int64_t classes, Score* score) {
  const int64_t b = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (b >= batch) return;
  float* row = logits + b * classes;
  int64_t largest = 0;
  for (int64_t c = 1; c < classes; ++c) largest = row[c] > row[largest] ? c : largest;
  const float shift = row[largest], own = row[labels[b]] - shift;
  float sum = 0;
  for (int64_t c = 0; c < classes; ++c) sum += row[c] = expf(row[c] - shift);
  for (int64_t c = 0; c < classes; ++c) row[c] = (row[c] / sum - float(c == labels[b])) / float(batch);
  atomicAdd(&score->loss, double(logf(sum) - own));
  atomicAdd(reinterpret_cast<unsigned long long*>(&score->correct), (unsigned long long)(largest == labels[b]));
}

// A workspace that grows; waits for the stream before memory in use is freed.
class Scratch {
 public:
  ~Scratch() { cudaFree(data_); }
  void* at_least(int64_t bytes, cudaStream_t stream) {
    if (bytes <= bytes_) return data_;
    check(cudaStreamSynchronize(stream), "workspace");
    cudaFree(data_);
    data_ = nullptr, bytes_ = 0;
    check(cudaMalloc(&data_, size_t(bytes)), "workspace");
    bytes_ = bytes;
    return data_;
  }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend() : capability_(snack::cuda::capability(snack::cuda::current_device())) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }
  ~CudaBackend() override { cudaStreamDestroy(stream_); }

  void* allocate(int64_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, size_t(std::max<int64_t>(1, bytes))), "device memory");
    check(cudaMemsetAsync(memory, 0, size_t(bytes), stream_), "device memory");
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }  // waits for the work that uses it
  void upload(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyHostToDevice, stream_), "upload");
    check(cudaStreamSynchronize(stream_), "upload");
  }
  void download(void* to, const void* from, int64_t bytes) override {
    check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToHost, stream_), "download");
    check(cudaStreamSynchronize(stream_), "download");
  }

  void spmm(const snack::SpmmArgs& args) override { run(snack::Operation::kSpmm, args, args.x.rows, snack::cuda::spmm); }
  void spmm_t(const snack::SpmmTArgs& args) override { run(snack::Operation::kSpmmT, args, args.dy.rows, snack::cuda::spmm_t); }
  void sddmm(const snack::SddmmArgs& args) override { run(snack::Operation::kSddmm, args, args.x.rows, snack::cuda::sddmm); }

  void rewire(const snack::RewireArgs& edit, void* index, int64_t* tile_ptr, int64_t* source) override {
    const auto list = [&](const int64_t* host, int64_t count) { return Buffer<int64_t>(*this, std::vector<int64_t>(host, host + count)); };
    const Buffer<int64_t> drop = list(edit.drop, edit.drops), rows = list(edit.grow_rows, edit.grows), cols = list(edit.grow_cols, edit.grows);
    const Buffer<snack::cuda::RewireStatus> status(*this, 1);
    const snack::Geometry& g = edit.pattern.geometry;
    const int64_t bytes = snack::cuda::rewire_workspace(g, edit.drops, edit.grows);
    void* workspace = scratch_.at_least(bytes, stream_);
    snack::cuda::rewire({edit.pattern, drop.data(), edit.drops, rows.data(), cols.data(), edit.grows},
                        {g, index, tile_ptr, source, status.data()}, {stream_, workspace, scratch_.bytes()});
    const std::string problem = snack::cuda::describe(status.to_host(*this)[0], g);
    if (!problem.empty()) throw snack::Error(problem);
  }

  void relu(float* y, int64_t count) override {
    launch(count, [=] __device__(int64_t i) { y[i] = fmaxf(y[i], 0.0f); });
  }
  void relu_backward(const float* y, float* dy, int64_t count) override {
    launch(count, [=] __device__(int64_t i) { dy[i] = y[i] > 0 ? dy[i] : 0.0f; });
  }
  void softmax(float* logits, const uint8_t* labels, int64_t batch, int64_t classes, Score* score) override {
    softmax_rows<<<unsigned((batch + kThreads - 1) / kThreads), kThreads, 0, stream_>>>(logits, labels, batch, classes, score);
    check(cudaGetLastError(), "softmax");
  }
  void sum_columns(const float* m, int64_t batch, int64_t features, float* sums) override {
    launch(features, [=] __device__(int64_t f) {
      float sum = 0;
      for (int64_t b = 0; b < batch; ++b) sum += m[b * features + f];
      sums[f] = sum;
    });
  }
  void step(float* weight, const float* gradient, float* momentum, int64_t count, float rate, float decay) override {
    launch(count, [=] __device__(int64_t i) {
      momentum[i] = 0.9f * momentum[i] + gradient[i] + decay * weight[i];
      weight[i] -= rate * momentum[i];
    });
  }
  void move_slots(const int64_t* source, const float* old, float* moved, int64_t count) override {
    launch(count, [=] __device__(int64_t i) { moved[i] = source[i] < 0 ? 0.0f : old[source[i]]; });
  }

 private:
  template <class Args>
  void run(snack::Operation operation, const Args& args, int64_t batch,
           void (*kernel)(const Args&, const snack::Plan&, const snack::cuda::Resources&)) {
    const snack::Problem problem{operation, args.pattern.geometry, batch, args.dtype};
    const snack::Plan plan = snack::make_cuda_plan(problem, snack::Regime::kAuto, capability_);
    void* workspace = scratch_.at_least(plan.workspace_bytes, stream_);
    const snack::cuda::Resources resources{stream_, workspace, scratch_.bytes()};
    kernel(args, plan, resources);
  }

  template <class F>
  void launch(int64_t count, F f) {
    if (count == 0) return;
    each<<<blocks_for(count), kThreads, 0, stream_>>>(count, f);
    check(cudaGetLastError(), "kernel");
  }

  snack::CudaCapability capability_;
  cudaStream_t stream_ = nullptr;
  Scratch scratch_;
};

}  // namespace

std::unique_ptr<Backend> cuda_backend() {
  SNACK_CHECK(snack::cuda::device_count() > 0, "--device cuda: there is no CUDA card here, or no driver for it; use --device cpu.");
  return std::make_unique<CudaBackend>();
}

}  // namespace example
