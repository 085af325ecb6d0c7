// The scatter of a step's keys and values, spread over threads.
#include "kv_cache.h"

namespace OCTAVO_NS {

int write_kv(const octavo_write_step *step, void *k_cache, void *v_cache, const void *k,
             const void *v) {
  const octavo_write_step &s = *step;
  if (s.kv_dtype == OCTAVO_INT8 && (s.head_size > kMostCodes || s.head_size_v > kMostCodes))
    return OCTAVO_BAD_ARGUMENT;
  const int64_t per_token = int64_t(s.kv_heads) * (s.head_size + s.head_size_v);
  const int64_t grain = (16384 + per_token - 1) / per_token;
  return with_kv_dtype(s.kv_dtype, [&](auto *c) {
    return with_dtype(s.x_dtype, [&](auto *x) {
      using C = decltype(c);
      using X = decltype(x);
      parallel(s.tokens, grain, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
        write_tokens(s, static_cast<C>(k_cache), static_cast<C>(v_cache),
                     static_cast<X>(const_cast<void *>(k)), static_cast<X>(const_cast<void *>(v)),
                     begin, end, [](int64_t, int64_t) {});
      });
      return int(OCTAVO_OK);
    });
  });
}

}  // namespace OCTAVO_NS
