#include "snack/defaults/threads.hpp"

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "snack/core/error.hpp"

#ifdef __linux__
#include <sched.h>
#endif

namespace snack {
namespace {

thread_local bool is_inside_task = false;

}  // namespace

struct ThreadPool::State {
  std::mutex one_call;
  std::vector<std::thread> workers;
  std::atomic<uint64_t> call{0};     // counts calls; a change wakes the workers
  std::atomic<int> unfinished{0};    // workers that have not done their part of this call
  std::atomic<bool> stops{false};
  ParallelFor::Task task = nullptr;
  void* task_context = nullptr;
  int64_t count = 0;

  int threads() const { return int(workers.size()) + 1; }

  void run_part(int part) {
    const int64_t begin = count * part / threads(), end = count * (part + 1) / threads();
    if (begin == end) return;
    is_inside_task = true;
    task(task_context, begin, end);
    is_inside_task = false;
  }

  // `seen` is the number of calls before the worker was started.
  void work(int part) {
    for (uint64_t seen = 0;;) {
      call.wait(seen);
      ++seen;  // no call begins before all workers have finished the last one, so none is missed
      if (stops) return;
      run_part(part);
      if (unfinished.fetch_sub(1) == 1) unfinished.notify_one();
    }
  }

  void run(int64_t n, void* context, ParallelFor::Task function) {
    if (is_inside_task || workers.empty()) return function(context, 0, n);
    const std::lock_guard lock(one_call);
    task = function, task_context = context, count = n;
    unfinished = int(workers.size());
    wake();
    run_part(int(workers.size()));
    for (int left = unfinished; left != 0; left = unfinished) unfinished.wait(left);
  }

  void wake() {
    ++call;
    call.notify_all();
  }

  void stop() {
    stops = true;
    wake();
    for (std::thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  SNACK_CHECK(threads >= 1, "ThreadPool: ", threads, " threads were asked for; give at least 1.");
  // The workers read how many they are, so the list is complete before the first call lets them look.
  state_->workers.reserve(size_t(threads) - 1);
  try {
    for (int part = 0; part < threads - 1; ++part)
      state_->workers.emplace_back([state = state_.get(), part] { state->work(part); });
  } catch (const std::exception& error) {  // no thread, or no memory for one
    state_->stop();
    fail("ThreadPool: of ", threads, " threads only ", state_->workers.size() + 1, " can be started (", error.what(), "); ask for fewer.");
  }
}

ThreadPool::~ThreadPool() { state_->stop(); }

ParallelFor ThreadPool::runner() const {
  const auto run = [](void* context, int64_t count, void* task_context, ParallelFor::Task task) {
    static_cast<State*>(context)->run(count, task_context, task);
  };
  return {state_.get(), run, state_->threads()};
}

int available_processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : int(count);
}

ParallelFor default_threads() {
  static const ThreadPool pool(available_processors());
  return pool.runner();
}

}  // namespace snack
