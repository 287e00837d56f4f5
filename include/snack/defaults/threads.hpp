// A runner for programs that have no threads of their own to lend.
#pragma once

#include <memory>

#include "snack/core/parallel.hpp"

namespace snack {

/// Threads that wait for work. Calls of one pool from several threads run one after another; a call from inside a task
/// runs on that thread alone. Tasks must not throw. The threads do not survive fork(): make the pool after it.
class ThreadPool {
 public:
  /// The calling thread works too, so that `threads` - 1 are started. Throws Error when threads < 1 or none can be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Borrows the pool: valid while it lives.
  ParallelFor runner() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Processors this process may use (its affinity mask), at least 1.
int available_processors();

/// A pool of available_processors() threads, made at the first call and kept until the program ends.
ParallelFor default_threads();

}  // namespace snack
