#include "pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

constexpr int SPINS = 4000;  // about 20 us of looking for the next job before a helper sleeps: a step has hundreds of jobs

struct Job {
  void (*task)(void*, int64_t);
  void* context;
  int64_t tasks;
  int helpers;  // how many may join
  std::atomic<int64_t> next{0};
  std::atomic<int> joined{0};

  void work() {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) task(context, i);
  }
};

class Pool {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> only(callers_, std::try_to_lock);
    if (!only.owns_lock() || getpid() != owner_) {  // another caller has the helpers, or a fork left them behind
      job.work();
      return;
    }
    for (; started_ < job.helpers; ++started_) std::thread([this] { help(); }).detach();
    current_.store(&job);
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    job.work();
    current_.store(nullptr);
    // From here on no helper can find the job; those that found it raised `inside_` first and are waited for.
    while (inside_.load() > 0) std::this_thread::yield();
  }

 private:
  void help() {
    uint64_t seen = 0;
    for (;;) {
      int spins = 0;
      while (generation_.load() == seen && ++spins < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      }
      if (generation_.load() == seen) {
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        sleepers_.fetch_sub(1);
      }
      seen = generation_.load();
      inside_.fetch_add(1);
      if (Job* job = current_.load())
        if (job->joined.fetch_add(1) < job->helpers) job->work();
      inside_.fetch_sub(1);
    }
  }

  const pid_t owner_ = getpid();
  std::mutex callers_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<Job*> current_{nullptr};
  std::atomic<int> inside_{0}, sleepers_{0};
  int started_ = 0;
};

}  // namespace

void run_tasks(int threads, int64_t tasks, void (*task)(void*, int64_t), void* context) {
  static Pool* pool = new Pool;  // never destroyed: its threads live as long as the process
  Job job{task, context, tasks, threads - 1};
  pool->run(job);
}
