// Threads are injected: the caller supplies a runner, kernels never start a thread of their own. A program that has none to
// lend takes snack::default_threads() (snack/defaults/threads.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace snack {

/// Runs task(task_context, begin, end) over [0, count), split as the runner likes; returns when all is done, with everything
/// the tasks wrote visible to the caller. Tasks do not throw and do not wait for each other, so that any order will do, and
/// one thread too. `context` is the runner's own and must live as long as the runner is used. A runner may be called from
/// several threads at once if it says so itself.
struct ParallelFor {
  using Task = void (*)(void* task_context, int64_t begin, int64_t end);
  void* context = nullptr;
  void (*run)(void* context, int64_t count, void* task_context, Task task) = nullptr;
  /// How many tasks may run at once: a hint for how finely to split work.
  int threads = 1;
};

/// The runner of a caller that has none: everything on the calling thread.
inline ParallelFor serial() { return {}; }

/// Calls body(i) for i in [0, count).
template <class Body>
void parallel_for(const ParallelFor& runner, int64_t count, Body&& body) {
  auto task = [](void* context, int64_t begin, int64_t end) {
    auto& call = *static_cast<std::remove_reference_t<Body>*>(context);
    for (int64_t i = begin; i < end; ++i) call(i);
  };
  void* context = const_cast<void*>(static_cast<const void*>(std::addressof(body)));
  if (count <= 0) return;
  if (count == 1 || runner.run == nullptr) return task(context, 0, count);
  runner.run(runner.context, count, context, task);
}

}  // namespace snack
