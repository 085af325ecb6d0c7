// Threads are borrowed from the OpenMP runtime the host program already loaded, through a function
// pointer: a second pool would fight the first for the same cores.
#include "runtime.h"

#include <cstdlib>

#include "octavo_cpu.h"

namespace octavo {
namespace {

octavo_gomp_parallel g_parallel = nullptr;
int g_threads = 1;

struct Region {
  void (*body)(void *, int, int64_t, int64_t);
  void *ctx;
  int64_t n, grain, next;
  int slots;
};

void work(void *data) {
  Region &r = *static_cast<Region *>(data);
  const int slot = __atomic_fetch_add(&r.slots, 1, __ATOMIC_RELAXED);
  for (;;) {
    const int64_t begin = __atomic_fetch_add(&r.next, r.grain, __ATOMIC_RELAXED);
    if (begin >= r.n) return;
    r.body(r.ctx, slot, begin, begin + r.grain < r.n ? begin + r.grain : r.n);
  }
}

struct Buffer {
  void *memory = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(memory); }
};
thread_local Buffer t_buffer;

}  // namespace

int max_threads() {
  return __atomic_load_n(&g_parallel, __ATOMIC_ACQUIRE)
             ? __atomic_load_n(&g_threads, __ATOMIC_RELAXED)
             : 1;
}

void parallel_for(int64_t n, int64_t grain, int threads,
                  void (*body)(void *, int, int64_t, int64_t), void *ctx) {
  if (n <= 0) return;
  const octavo_gomp_parallel parallel = __atomic_load_n(&g_parallel, __ATOMIC_ACQUIRE);
  const int64_t pieces = (n + grain - 1) / grain;
  if (pieces < threads) threads = static_cast<int>(pieces);
  if (threads <= 1 || !parallel) return body(ctx, 0, 0, n);
  Region region = {body, ctx, n, grain, 0, 0};
  parallel(work, &region, static_cast<unsigned>(threads), 0);
}

void *scratch(size_t bytes) {
  Buffer &b = t_buffer;
  if (bytes > b.size) {
    std::free(b.memory);
    b.size = 0;
    const size_t size = (bytes + bytes / 4 + 4095) & ~size_t(4095);
    if (posix_memalign(&b.memory, 64, size)) b.memory = nullptr;
    if (!b.memory) return nullptr;
    b.size = size;
  }
  return b.memory;
}

}  // namespace octavo

extern "C" {
void octavo_set_threads(octavo_gomp_parallel parallel, int threads) {
  __atomic_store_n(&octavo::g_threads, threads > 1 ? threads : 1, __ATOMIC_RELAXED);
  __atomic_store_n(&octavo::g_parallel, threads > 1 ? parallel : nullptr, __ATOMIC_RELEASE);
}
int octavo_threads(void) { return octavo::max_threads(); }
}
