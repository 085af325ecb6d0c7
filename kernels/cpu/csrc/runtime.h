// Threads and scratch, compiled once and shared by all variants.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace octavo {

// How many threads a region may have. Read once per call and pass on: it may change between calls.
int max_threads();

// body(ctx, slot, begin, end) covers [0, n) in pieces of `grain`, handed out dynamically.
// 0 <= slot < threads tells concurrent callers apart (for per-thread scratch). With one thread,
// or a single piece, everything runs on the caller.
void parallel_for(int64_t n, int64_t grain, int threads,
                  void (*body)(void *ctx, int slot, int64_t begin, int64_t end), void *ctx);

// The same for pieces of work that have parallel_for loops of their own, handed out one by one and in order:
// each thread does its pieces alone, and who has none left helps with the loops of the others.
void parallel_groups(int64_t n, int threads,
                     void (*body)(void *ctx, int slot, int64_t begin, int64_t end), void *ctx);
// Whether the caller is in such a piece: other threads then come to help only near the end.
bool in_group();

// A count that one thread raises and others wait for: at first spinning, for a bounded time, then asleep.
struct alignas(64) Progress {
  int done = 0, sleepers = 0;
};
void reach(Progress &p, int done);
void wait_for(Progress &p, int done);

// Memory of the calling thread, 64-byte aligned, valid until its next call for the same level; null if
// there is none. Kernels call it before they go parallel: it belongs to the call, never to a worker.
// Level 0 is for an op, 1 for what calls ops, 2 for what an op needs beside its level 0, 3 for who calls
// what calls ops, 4 for who calls that.
void *scratch(size_t bytes, int level = 0);

// Where a call's time goes, when it is asked for: between two laps of the calling thread, waiting for
// its workers included.
extern bool g_profile;
double seconds();                    // a monotonic clock
void add_seconds(int phase, double); // one caller at a time: the step loop has one thread; not a worker's

struct Laps {
  double at = __builtin_expect(g_profile, false) ? seconds() : 0;
  void operator()(int phase) {
    if (__builtin_expect(!g_profile, true)) return;
    const double now = seconds();
    add_seconds(phase, now - at);
    at = now;
  }
};

}  // namespace octavo
