// Rotary position embedding of a step's queries and keys.
#include "rotary.h"

namespace OCTAVO_NS {

int rotary(void *q, void *k, const void *positions, int positions_are_64, const float *cos_sin,
           int64_t tokens, int q_heads, int kv_heads, int head_size, int rotary_dim,
           int64_t q_row_stride, int64_t k_row_stride, int style, int dtype) {
  if (style != OCTAVO_NEOX && style != OCTAVO_INTERLEAVED) return OCTAVO_BAD_ARGUMENT;
  const int64_t grain = 1 + 16384 / (int64_t(q_heads + kv_heads) * rotary_dim + 1);
  return with_dtype(dtype, [&](auto *type) {
    using X = decltype(type);
    parallel(tokens, grain, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t position = positions_are_64 ? static_cast<const int64_t *>(positions)[t]
                                                  : static_cast<const int32_t *>(positions)[t];
        if (position < 0) continue;  // padding
        const float *row = cos_sin + position * rotary_dim;
        rotate_heads(static_cast<X>(q) + t * q_row_stride, q_heads, head_size, row, rotary_dim / 2,
                     style);
        rotate_heads(static_cast<X>(k) + t * k_row_stride, kv_heads, head_size, row,
                     rotary_dim / 2, style);
      }
    });
    return int(OCTAVO_OK);
  });
}

}  // namespace OCTAVO_NS
