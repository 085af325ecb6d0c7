// The one pool of threads under all kernels, and scratch memory.
//
// Work is handed out dynamically, so a worker that the system has put aside costs only the piece it
// holds. Waiting spins for a bounded time and then sleeps: a sleeping thread leaves its core to a
// worker that waits for one, where a spinning one would keep it out for a whole time slice.
#include "runtime.h"

#include <climits>
#include <cstdlib>
#include <new>

#include <pthread.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "octavo_cpu.h"

namespace octavo {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#elif defined(__powerpc64__)
  __asm__ volatile("or 27,27,27");
#endif
}

// Sleeping on a word until somebody changes it.
#if defined(__linux__)
void sleep_while(int *word, int value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(int *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t g_changed = PTHREAD_COND_INITIALIZER;
void sleep_while(int *word, int value) {
  pthread_mutex_lock(&g_mutex);
  while (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value) pthread_cond_wait(&g_changed, &g_mutex);
  pthread_mutex_unlock(&g_mutex);
}
void wake_all(int *) {
  pthread_mutex_lock(&g_mutex);
  pthread_cond_broadcast(&g_changed);
  pthread_mutex_unlock(&g_mutex);
}
#endif

int g_spins = 2000;  // pauses before a waiter sleeps: some tens of microseconds
int spins() { return __atomic_load_n(&g_spins, __ATOMIC_RELAXED); }

// How deep in regions a thread is: in none; in a piece that has loops of its own; in one that has none,
// where a kernel that is called runs alone.
enum Depth { kOutside, kGroup, kLeaf };
thread_local Depth t_depth = kOutside;
thread_local int t_slot = 0;           // in a group: which of the pool's inner regions is this thread's
thread_local bool t_worker = false;

struct Inside {
  const Depth before = t_depth;
  explicit Inside(Depth depth) { t_depth = depth; }
  ~Inside() { t_depth = before; }
};

// A loop whose pieces threads take one by one. Its owner opens it, works and closes it; others may join
// while it is open.
struct Region {
  void (*body)(void *, int, int64_t, int64_t) = nullptr;
  void *ctx = nullptr;
  int64_t n = 0, grain = 1;
  int limit = 0;  // threads it may have
  alignas(64) int64_t next = 0;
  alignas(64) int slots = 0;
  // Twice the number of times it was open, plus 1 while it is: workers wait for it to change.
  alignas(64) int ticket = 0;
  // How many have joined, times two, plus 1 if the owner sleeps until they are out.
  alignas(64) int inside = 0;

  void work(int slot, int64_t *left = nullptr) {
    for (;;) {
      const int64_t begin = __atomic_fetch_add(&next, grain, __ATOMIC_RELAXED);
      if (begin >= n) return;
      body(ctx, slot, begin, begin + grain < n ? begin + grain : n);
      if (left) __atomic_sub_fetch(left, 1, __ATOMIC_RELEASE);
    }
  }

  void open(int64_t count, int64_t piece, int most, void (*f)(void *, int, int64_t, int64_t), void *data) {
    body = f, ctx = data, grain = piece, limit = most;
    __atomic_store_n(&n, count, __ATOMIC_RELAXED);
    __atomic_store_n(&next, 0, __ATOMIC_RELAXED);
    slots = 1;  // the owner is slot 0
    __atomic_fetch_add(&ticket, 1, __ATOMIC_SEQ_CST);
  }

  bool has_work() const { return __atomic_load_n(&next, __ATOMIC_RELAXED) < __atomic_load_n(&n, __ATOMIC_RELAXED); }

  // f(slot) if the region with this ticket is still open. Counting oneself in before looking again keeps
  // the owner from reusing the fields under one's hands.
  template <class F>
  void join(int seen, F &&f) {
    __atomic_fetch_add(&inside, 2, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&ticket, __ATOMIC_SEQ_CST) == seen) {
      const int slot = __atomic_fetch_add(&slots, 1, __ATOMIC_RELAXED);
      if (slot < limit) f(slot);
    }
    const int left = __atomic_sub_fetch(&inside, 2, __ATOMIC_SEQ_CST);
    if (left == 1) wake_all(&inside);
  }

  void close() {
    __atomic_fetch_add(&ticket, 1, __ATOMIC_SEQ_CST);
    const int pauses = spins();
    for (int i = 0; i < pauses && __atomic_load_n(&inside, __ATOMIC_SEQ_CST); ++i) relax();
    if (!__atomic_load_n(&inside, __ATOMIC_SEQ_CST)) return;
    int left = __atomic_add_fetch(&inside, 1, __ATOMIC_SEQ_CST);
    while (left > 1) {
      sleep_while(&inside, left);
      left = __atomic_load_n(&inside, __ATOMIC_SEQ_CST);
    }
    __atomic_sub_fetch(&inside, 1, __ATOMIC_SEQ_CST);
  }
};

struct Pool {
  int threads = 1;
  pthread_t *workers = nullptr;
  Region top;
  Region *inner = nullptr;         // [threads] loops of pieces that have some
  bool groups = false;             // whether top's pieces do
  alignas(64) int64_t left = 0;    // of those, how many are not done
  alignas(64) int sleepers = 0;
  bool stop = false;

  void take(int slot) {
    if (!groups) {
      const Inside leaf(kLeaf);
      return top.work(slot);
    }
    {
      const Inside group(kGroup);
      t_slot = slot;
      top.work(slot, &left);
    }
    help();
  }

  // Joins the loops of those whose pieces are not done, for as long as there is something to join now
  // and then.
  void help() {
    const Inside leaf(kLeaf);
    const int pauses = spins();
    for (int idle = 0; idle < pauses && __atomic_load_n(&left, __ATOMIC_ACQUIRE) > 0; ++idle) {
      for (int i = 0; i < threads; ++i) {
        Region &r = inner[i];
        const int now = __atomic_load_n(&r.ticket, __ATOMIC_SEQ_CST);
        if (!(now & 1) || !r.has_work()) continue;
        r.join(now, [&](int slot) { r.work(slot); });
        idle = 0;
      }
      relax();
    }
  }

  void serve() {
    int seen = 0;
    for (;;) {
      int now = __atomic_load_n(&top.ticket, __ATOMIC_SEQ_CST);
      const int pauses = spins();
      for (int i = 0; now == seen && i < pauses; ++i) {
        relax();
        now = __atomic_load_n(&top.ticket, __ATOMIC_SEQ_CST);
      }
      if (now == seen) {
        __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
        sleep_while(&top.ticket, seen);
        __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
        continue;
      }
      seen = now;
      if (__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) return;
      if (now & 1) top.join(now, [&](int slot) { take(slot); });
    }
  }

  void run(int64_t count, int64_t piece, int most, bool has_loops, void (*f)(void *, int, int64_t, int64_t),
           void *data) {
    groups = has_loops, left = count;
    top.open(count, piece, most, f, data);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST)) wake_all(&top.ticket);
    take(0);
    top.close();
  }

  void run_inner(int64_t count, int64_t piece, int most, void (*f)(void *, int, int64_t, int64_t), void *data) {
    Region &r = inner[t_slot];
    const Inside leaf(kLeaf);
    r.open(count, piece, most, f, data);
    r.work(0);
    r.close();
  }
};

Pool *g_pool = nullptr;
int g_threads = 1;  // of g_pool, which may be gone by the time that who asks would look inside
pthread_mutex_t g_region = PTHREAD_MUTEX_INITIALIZER;  // one region at a time

void *serve(void *pool) {
  t_depth = kLeaf, t_worker = true;
  static_cast<Pool *>(pool)->serve();
  return nullptr;
}

void resize(int threads) {
  pthread_mutex_lock(&g_region);
  Pool *old = g_pool;
  __atomic_store_n(&g_threads, 1, __ATOMIC_RELEASE);
  __atomic_store_n(&g_pool, static_cast<Pool *>(nullptr), __ATOMIC_RELEASE);
  if (old) {
    __atomic_store_n(&old->stop, true, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&old->top.ticket, 2, __ATOMIC_SEQ_CST);
    wake_all(&old->top.ticket);
    for (int i = 0; i < old->threads - 1; ++i) pthread_join(old->workers[i], nullptr);
    delete[] old->workers;
    delete[] old->inner;
    delete old;
  }
  Pool *pool = threads > 1 ? new (std::nothrow) Pool : nullptr;
  if (pool) {
    pool->workers = new (std::nothrow) pthread_t[size_t(threads - 1)];
    pool->inner = new (std::nothrow) Region[size_t(threads)];
    for (int i = 0; pool->workers && pool->inner && i < threads - 1; ++i) {
      if (pthread_create(&pool->workers[i], nullptr, serve, pool)) break;
      pool->threads = i + 2;
    }
  }
  __atomic_store_n(&g_threads, pool ? pool->threads : 1, __ATOMIC_RELEASE);
  __atomic_store_n(&g_pool, pool, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&g_region);
}

constexpr size_t kHugePage = 2 << 20;  // where a system has others, all that is lost is the gain

// Asks the system for huge pages where none is in use yet; it may decline, and nothing else depends on it.
void huge_pages(void *memory, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (uintptr_t(memory) + page - 1) & ~(page - 1);
  const uintptr_t end = (uintptr_t(memory) + bytes) & ~(page - 1);
  if (end >= begin + kHugePage) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

struct Buffer {
  void *memory = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(memory); }
};
thread_local Buffer t_buffers[5];

}  // namespace

int max_threads() {
  return t_depth == kLeaf ? 1 : __atomic_load_n(&g_threads, __ATOMIC_ACQUIRE);
}
bool in_group() { return t_depth == kGroup; }

static void shared(int64_t n, int64_t grain, int threads, bool groups,
                   void (*body)(void *, int, int64_t, int64_t), void *ctx) {
  if (n <= 0) return;
  const int64_t pieces = (n + grain - 1) / grain;
  if (pieces < threads) threads = static_cast<int>(pieces);
  if (threads <= 1 || t_depth == kLeaf || !__atomic_load_n(&g_pool, __ATOMIC_ACQUIRE))
    return body(ctx, 0, 0, n);
  if (t_depth == kGroup) {  // who runs the groups keeps the pool from changing
    Pool *pool = g_pool;
    return pool->run_inner(n, grain, threads < pool->threads ? threads : pool->threads, body, ctx);
  }
  // A second caller (another thread of the host program) does not wait for the first: it works alone.
  if (pthread_mutex_trylock(&g_region)) return body(ctx, 0, 0, n);
  if (Pool *pool = g_pool)
    pool->run(n, grain, threads < pool->threads ? threads : pool->threads, groups, body, ctx);
  else
    body(ctx, 0, 0, n);
  pthread_mutex_unlock(&g_region);
}

void parallel_for(int64_t n, int64_t grain, int threads,
                  void (*body)(void *, int, int64_t, int64_t), void *ctx) {
  shared(n, grain, threads, false, body, ctx);
}
void parallel_groups(int64_t n, int threads, void (*body)(void *, int, int64_t, int64_t), void *ctx) {
  shared(n, 1, threads, true, body, ctx);
}

void reach(Progress &p, int done) {
  __atomic_store_n(&p.done, done, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&p.sleepers, __ATOMIC_SEQ_CST)) wake_all(&p.done);
}

void wait_for(Progress &p, int done) {
  int pauses = spins();
  for (;;) {
    const int now = __atomic_load_n(&p.done, __ATOMIC_SEQ_CST);
    if (now >= done) return;
    if (pauses-- > 0) {
      relax();
      continue;
    }
    __atomic_fetch_add(&p.sleepers, 1, __ATOMIC_SEQ_CST);
    sleep_while(&p.done, now);
    __atomic_fetch_sub(&p.sleepers, 1, __ATOMIC_SEQ_CST);
  }
}

void *scratch(size_t bytes, int level) {
  Buffer &b = t_buffers[level];
  if (bytes > b.size) {
    std::free(b.memory);
    b.size = 0;
    const size_t page = bytes < kHugePage ? 4096 : kHugePage;
    const size_t size = (bytes + bytes / 4 + page - 1) & ~(page - 1);
    if (posix_memalign(&b.memory, page, size)) b.memory = nullptr;
    if (!b.memory) return nullptr;
    huge_pages(b.memory, size);
    b.size = size;
  }
  return b.memory;
}

bool g_profile = false;
static double g_seconds[OCTAVO_PHASES];

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}
void add_seconds(int phase, double spent) {
  if (!t_worker) g_seconds[phase] += spent;
}

}  // namespace octavo

extern "C" {
void octavo_profile(int enable) {
  for (double &s : octavo::g_seconds) s = 0;
  octavo::g_profile = enable != 0;
}
void octavo_profile_read(double *seconds) {
  for (int i = 0; i < OCTAVO_PHASES; ++i) seconds[i] = octavo::g_seconds[i];
}
int octavo_set_threads(int threads, int spins) {
  if (spins >= 0) __atomic_store_n(&octavo::g_spins, spins, __ATOMIC_RELAXED);
  octavo::resize(threads);
  return octavo::max_threads();
}
int octavo_threads(void) { return octavo::max_threads(); }
}
