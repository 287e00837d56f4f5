// Where the network lives: memory and the operations of training, on the CPU or on a CUDA card. The sparse products and the
// topology edit are snack's; the rest are the few dense loops that a network needs besides.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "snack/snack.hpp"

namespace example {

/// Sums over a pass through the data, kept where the network lives.
struct Score {
  double loss = 0;
  int64_t correct = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void* allocate(int64_t bytes) = 0;  // filled with zeros
  virtual void release(void* memory) = 0;
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;
  virtual void download(void* to, const void* from, int64_t bytes) = 0;

  virtual void spmm(const snack::SpmmArgs& args) = 0;
  virtual void spmm_t(const snack::SpmmTArgs& args) = 0;
  virtual void sddmm(const snack::SddmmArgs& args) = 0;
  /// `edit` lists slots and positions in host memory; the pattern and the outputs are the backend's. nnz stays.
  virtual void rewire(const snack::RewireArgs& edit, void* index, int64_t* tile_ptr, int64_t* source) = 0;

  /// y = max(y, 0), and dy = 0 where y is 0.
  virtual void relu(float* y, int64_t count) = 0;
  virtual void relu_backward(const float* y, float* dy, int64_t count) = 0;
  /// Cross-entropy of softmax: adds loss and hits to `score` and writes the gradient of the mean loss over the logits.
  virtual void softmax(float* logits, const uint8_t* labels, int64_t batch, int64_t classes, Score* score) = 0;
  /// sums[f] = sum over the batch of m[b, f].
  virtual void sum_columns(const float* m, int64_t batch, int64_t features, float* sums) = 0;
  /// momentum = 0.9 momentum + gradient + decay * weight; weight -= rate * momentum.
  virtual void step(float* weight, const float* gradient, float* momentum, int64_t count, float rate, float decay) = 0;
  /// moved[i] = old[source[i]], or 0 for a connection that was grown (source < 0).
  virtual void move_slots(const int64_t* source, const float* old, float* moved, int64_t count) = 0;
};

std::unique_ptr<Backend> cpu_backend(int threads);
std::unique_ptr<Backend> cuda_backend();  // throws snack::Error where there is no CUDA

/// `count` elements of a backend's memory.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend& backend, int64_t count)
      : data_(static_cast<T*>(backend.allocate(count * int64_t(sizeof(T)))), Release{&backend}), count_(count) {}
  Buffer(Backend& backend, const std::vector<T>& host) : Buffer(backend, int64_t(host.size())) {
    backend.upload(data_.get(), host.data(), count_ * int64_t(sizeof(T)));
  }
  T* data() const { return data_.get(); }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * int64_t(sizeof(T)); }
  std::vector<T> to_host(Backend& backend) const {
    std::vector<T> host(static_cast<size_t>(count_));
    backend.download(host.data(), data_.get(), bytes());
    return host;
  }

 private:
  struct Release {
    Backend* backend = nullptr;
    void operator()(T* memory) const { backend->release(memory); }
  };
  std::unique_ptr<T, Release> data_;
  int64_t count_ = 0;
};

}  // namespace example
