// The pool of threads: several callers, resizing under their feet, sleepers and spinners.
#include <atomic>
#include <thread>

#include "check.h"

// Rows of norms whose result is known without a reference: a vector of equal elements.
static bool norms_are_right(int64_t rows) {
  const int64_t n = 512;
  Array x(rows * n), weight(n), out(rows * n);
  for (int64_t i = 0; i < n; ++i) weight.floats()[i] = 1;
  for (int64_t i = 0; i < rows * n; ++i) x.floats()[i] = static_cast<float>(1 + i / n);
  const octavo_norm p = {rows, 1, n, n, n, n, n, OCTAVO_F32, OCTAVO_F32, 0, 0};
  octavo_rms_norm(&p, out.data(), x.data(), weight.data());
  for (int64_t i = 0; i < rows * n; ++i)
    if (std::fabs(out.floats()[i] - 1) > 1e-6f) return false;
  return true;
}

void test_threads(Report &r) {
  const int before = octavo_threads();
  for (int spins : {0, 1, 100000})  // sleeps at once, nearly at once, hardly ever
    for (int threads : {2, 5}) {
      r.that(octavo_set_threads(threads, spins) == threads, "there are %d threads, not %d", octavo_threads(), threads);
      for (int i = 0; i < 20; ++i) r.that(norms_are_right(70 + i), "a region lost or repeated work");
    }
  // Callers that compete for the pool, while its size changes.
  std::atomic<int> wrong{0}, left{3};
  std::vector<std::thread> callers;
  for (int t = 0; t < 3; ++t)
    callers.emplace_back([&, t] {
      for (int i = 0; i < 40; ++i) wrong += !norms_are_right(60 + 10 * t);
      --left;
    });
  for (int i = 0; left; ++i) {
    octavo_set_threads(1 + i % 4, i % 2 ? 50 : 2000);
    std::this_thread::yield();
  }
  for (std::thread &caller : callers) caller.join();
  r.that(wrong == 0, "%d results are wrong when callers compete", wrong.load());
  r.that(octavo_set_threads(before, 2000) == before, "the pool is as it was");
}
