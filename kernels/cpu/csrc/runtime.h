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

// Memory of the calling thread, 64-byte aligned, valid until its next call for the same level; null if
// there is none. Kernels call it before they go parallel: it belongs to the call, never to a worker.
// Level 0 is for an op, 1 for what calls ops, 2 for what an op needs beside its level 0.
void *scratch(size_t bytes, int level = 0);

}  // namespace octavo
