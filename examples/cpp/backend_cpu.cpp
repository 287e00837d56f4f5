#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "backend.hpp"

namespace example {
namespace {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(int threads) : pool_(threads), context_(pool_.runner()) {}

  void* allocate(int64_t bytes) override {
    void* memory = std::calloc(size_t(std::max<int64_t>(1, bytes)), 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void release(void* memory) override { std::free(memory); }
  void upload(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, size_t(bytes)); }
  void download(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, size_t(bytes)); }

  void spmm(const snack::SpmmArgs& args) override { context_.spmm(args); }
  void spmm_t(const snack::SpmmTArgs& args) override { context_.spmm_t(args); }
  void sddmm(const snack::SddmmArgs& args) override { context_.sddmm(args); }

  void rewire(const snack::RewireArgs& edit, void* index, int64_t* tile_ptr, int64_t* source) override {
    const snack::RewireResult result = snack::cpu::rewire(edit, pool_.runner());
    std::memcpy(index, result.pattern.index.data(), result.pattern.index.size());
    std::copy(result.pattern.tile_ptr.begin(), result.pattern.tile_ptr.end(), tile_ptr);
    std::copy(result.source.begin(), result.source.end(), source);
  }

  void relu(float* y, int64_t count) override {
    for (int64_t i = 0; i < count; ++i) y[i] = std::max(y[i], 0.0f);
  }
  void relu_backward(const float* y, float* dy, int64_t count) override {
    for (int64_t i = 0; i < count; ++i) dy[i] = y[i] > 0 ? dy[i] : 0.0f;
  }
  void softmax(float* logits, const uint8_t* labels, int64_t batch, int64_t classes, Score* score) override {
    for (int64_t b = 0; b < batch; ++b, logits += classes) {
      const float* largest = std::max_element(logits, logits + classes);
      const float shift = *largest, own = logits[labels[b]] - shift;
      score->correct += largest - logits == labels[b];
      float sum = 0;
      for (int64_t c = 0; c < classes; ++c) sum += logits[c] = std::exp(logits[c] - shift);
      score->loss += double(std::log(sum) - own);
      for (int64_t c = 0; c < classes; ++c) logits[c] = (logits[c] / sum - float(c == labels[b])) / float(batch);
    }
  }
  void sum_columns(const float* m, int64_t batch, int64_t features, float* sums) override {
    std::fill_n(sums, features, 0.0f);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t f = 0; f < features; ++f) sums[f] += m[b * features + f];
  }
  void step(float* weight, const float* gradient, float* momentum, int64_t count, float rate, float decay) override {
    for (int64_t i = 0; i < count; ++i) {
      momentum[i] = 0.9f * momentum[i] + gradient[i] + decay * weight[i];
      weight[i] -= rate * momentum[i];
    }
  }
  void move_slots(const int64_t* source, const float* old, float* moved, int64_t count) override {
    for (int64_t i = 0; i < count; ++i) moved[i] = source[i] < 0 ? 0.0f : old[source[i]];
  }

 private:
  snack::ThreadPool pool_;
  snack::cpu::Context context_;
};

}  // namespace

std::unique_ptr<Backend> cpu_backend(int threads) { return std::make_unique<CpuBackend>(threads); }

}  // namespace example
