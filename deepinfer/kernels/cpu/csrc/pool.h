// Threads that help without being waited for: the caller takes tasks from the same counter as its helpers, so a helper that
// the machine has put to sleep costs nothing. A team of OpenMP would wait for it at every region's end, which on a machine
// with one other busy process was seen to make a decode step ten times slower.
#pragma once
#include <cstdint>

// One piece of work: task(context, i) for every i in [0, tasks), on at most `threads` threads, the caller among them.
// Returns when all are done. Tasks must not depend on each other.
void run_tasks(int threads, int64_t tasks, void (*task)(void*, int64_t), void* context);

template <typename F>
static inline void parallel(int threads, int64_t tasks, F body) {
  if (threads <= 1 || tasks <= 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  run_tasks(threads, tasks, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body);
}

// Threads worth asking for this many floating-point operations: one pays from about a million (20 us of work) on.
static inline int team(int threads, double operations) {
  int64_t useful = (int64_t)(operations / 1e6);
  return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}
