// What this instruction set could do at most, for comparison: multiply-adds that touch no memory, and
// reads that do nothing else.
#include "linear.h"

namespace OCTAVO_NS {
namespace {

// Enough chains to hide the latency of two units, few enough for sixteen registers.
constexpr int kChains = 12;
constexpr int kPiecesPerThread = 16;  // a worker that is put aside keeps only its piece waiting

// Hides from the compiler what a value is and whether it is used, or it would leave out the work.
template <class V>
OCTAVO_INLINE void opaque(V &v) {
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__ volatile("" : "+x"(v));
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(v));
#elif defined(__powerpc64__)
  __asm__ volatile("" : "+wa"(v));
#endif
}

OCTAVO_INLINE vf step(vf acc, vf weight, vf x) { return fma(weight, x, acc); }
OCTAVO_INLINE vi step(vi acc, vi weight, vi x) { return dot(acc, weight, x); }

template <class V>
void chains(V weight, V x, int64_t rounds) {
  V acc[kChains] = {};
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      opaque(weight);
      acc[i] = step(acc[i], weight, x);
    }
  }
  for (int i = 0; i < kChains; ++i) opaque(acc[i]);
}

}  // namespace

double peak(int kind, int64_t rounds) {
  if (kind != OCTAVO_PEAK_F32 && kind != OCTAVO_PEAK_INT8) return -1;
  const int threads = octavo::max_threads();
  const int64_t pieces = int64_t(threads) * kPiecesPerThread;
  parallel(pieces, 1, threads, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kind == OCTAVO_PEAK_F32 ? chains(splat(0.5f), splat(1e-3f), rounds)
                              : chains(splat_i(0x01010101), splat_i(0x01010101), rounds);
  });
  const double per_step = 2.0 * W * (kind == OCTAVO_PEAK_F32 ? 1 : kStep);
  return double(pieces) * double(rounds) * kChains * per_step;
}

uint32_t read(const void *data, int64_t bytes) {
  constexpr int64_t piece = 1 << 20;
  const char *p = static_cast<const char *>(data);
  uint32_t all = 0;
  parallel((bytes + piece - 1) / piece, 1, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
    constexpr int lines = 64 / (W * 4);
    vi sum[4 * lines] = {};
    const char *last = p + (end * piece < bytes ? end * piece : bytes);
    const char *at = p + begin * piece;
    for (; at + 256 <= last; at += 256) {
      __builtin_prefetch(at + 1024, 0, 3);
#pragma GCC unroll 16
      for (int i = 0; i < 4 * lines; ++i) sum[i] ^= *reinterpret_cast<const vi_mem *>(at + i * W * 4);
    }
    for (; at < last; at += W * 4) sum[0] ^= *reinterpret_cast<const vi_mem *>(at);
    for (int i = 1; i < 4 * lines; ++i) sum[0] ^= sum[i];
    uint32_t words = 0;
    for (int i = 0; i < W; ++i) words ^= uint32_t(sum[0][i]);
    __atomic_fetch_xor(&all, words, __ATOMIC_RELAXED);
  });
  return all;
}

}  // namespace OCTAVO_NS
