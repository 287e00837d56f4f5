// Hands out aligned pieces of the workspace that a plan asked for.
#pragma once

#include "../plan/cpu_layout.hpp"

namespace snack::cpu {

class Arena {
 public:
  explicit Arena(void* base) : next_(static_cast<char*>(base)) {}
  template <class A>
  A* take(int64_t count) {
    A* piece = reinterpret_cast<A*>(next_);
    next_ += aligned(count * int64_t(sizeof(A)));
    return piece;
  }

 private:
  char* next_;
};

}  // namespace snack::cpu
