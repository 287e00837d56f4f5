// How a launcher cuts its workspace.
#pragma once

#include "plan/cuda_layout.hpp"

namespace snack::cuda {

/// Cuts the workspace into arrays aligned to 256 bytes; with a null base it counts the bytes.
class Layout {
 public:
  explicit Layout(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(base_ + used_);
    used_ += aligned_256(count * int64_t(sizeof(T)));
    return at;
  }
  int64_t used() const { return used_; }
  /// Of several copies that were cut further, each for one step: the next array begins where the longest ends.
  void use(int64_t bytes) { used_ = bytes; }

 private:
  char* base_;
  int64_t used_ = 0;
};

/// Blocks of kThreads threads, one a thing.
inline int64_t blocks_for(int64_t count) { return ceil_div(count, kThreads); }

}  // namespace snack::cuda
