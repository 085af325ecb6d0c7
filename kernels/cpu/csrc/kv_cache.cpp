// Scatter the new keys and values of a step into the paged cache.
// K is transposed inside a block ([head_size, block_size]) so that attention's scores of
// consecutive tokens are one vector; V is [block_size, head_size_v].
#include "vec.h"

namespace OCTAVO_NS {
namespace {

constexpr int kRun = 16;  // tokens handled together when they are neighbours in one block

template <class C, class X>
OCTAVO_INLINE void put(C *to, X x) {
  from_float(to, to_float(x));
}
OCTAVO_INLINE void put(bf16 *to, bf16 x) { *to = x; }
OCTAVO_INLINE void put(f16 *to, f16 x) { *to = x; }

template <class C, class X>
void write_run(const octavo_write_step &s, C *k_cache, C *v_cache, X *k, X *v,
               int64_t token, int run) {
  const int64_t block = s.slots[token] / s.block_size, offset = s.slots[token] % s.block_size;
  for (int h = 0; h < s.kv_heads; ++h) {
    const int64_t head = block * s.kv_heads + h;
    C *to_k = k_cache + head * s.head_size * s.block_size + offset;
    const X *from_k = k + token * s.k_row_stride + int64_t(h) * s.head_size;
    for (int i = 0; i < s.head_size; ++i)
      for (int t = 0; t < run; ++t)
        put(to_k + int64_t(i) * s.block_size + t, from_k[t * s.k_row_stride + i]);
    for (int t = 0; t < run; ++t) {
      C *to_v = v_cache + (head * s.block_size + offset + t) * s.head_size_v;
      const X *from_v = v + (token + t) * s.v_row_stride + int64_t(h) * s.head_size_v;
      for (int i = 0; i < s.head_size_v; ++i) put(to_v + i, from_v[i]);
    }
  }
}

template <class C, class X>
void write_tokens(const octavo_write_step &s, C *k_cache, C *v_cache, X *k, X *v,
                  int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end;) {
    const int64_t slot = s.slots[t];
    int run = 1;
    while (slot >= 0 && run < kRun && t + run < end && s.slots[t + run] == slot + run &&
           (slot + run) % s.block_size)
      ++run;
    if (slot >= 0) write_run(s, k_cache, v_cache, k, v, t, run);
    t += run;
  }
}

}  // namespace

int write_kv(const octavo_write_step *step, void *k_cache, void *v_cache, const void *k,
             const void *v) {
  const octavo_write_step &s = *step;
  const int64_t per_token = int64_t(s.kv_heads) * (s.head_size + s.head_size_v);
  int64_t grain = (16384 + per_token - 1) / per_token;
  grain = (grain + kRun - 1) / kRun * kRun;
  return with_dtype(s.kv_dtype, [&](auto *c) {
    return with_dtype(s.x_dtype, [&](auto *x) {
      using C = decltype(c);
      using X = decltype(x);
      parallel(s.tokens, grain, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
        write_tokens(s, static_cast<C>(k_cache), static_cast<C>(v_cache),
                     static_cast<X>(const_cast<void *>(k)), static_cast<X>(const_cast<void *>(v)),
                     begin, end);
      });
      return int(OCTAVO_OK);
    });
  });
}

}  // namespace OCTAVO_NS
