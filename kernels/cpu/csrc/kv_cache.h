// Scatter of new keys and values into the paged cache.
// K is transposed inside a block ([head_size, block_size]) so that attention's scores of
// consecutive tokens are one vector; V is [block_size, head_size_v].
#pragma once
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
}  // namespace OCTAVO_NS
