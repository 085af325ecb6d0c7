// Rotary position embedding in place (Su et al. 2021, arXiv:2104.09864), half-split (NeoX) or
// interleaved pairs, over the first rotary_dim elements of every head.
#include "vec.h"

namespace OCTAVO_NS {
namespace {

template <class X>
void rotate_halves(X *x, const float *cos, const float *sin, int half) {
  int i = 0;
  for (; i + W <= half; i += W) {
    const vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, fma(a, c, -(b * s)));
    store(x + half + i, fma(b, c, a * s));
  }
  if (i < half) {
    const int n = half - i;
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n);
    const vf c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(x + i, fma(a, c, -(b * s)), n);
    store_part(x + half + i, fma(b, c, a * s), n);
  }
}

template <class X>
void rotate_pairs(X *x, const float *cos, const float *sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);
    from_float(x + 2 * i, a * cos[i] - b * sin[i]);
    from_float(x + 2 * i + 1, b * cos[i] + a * sin[i]);
  }
}

template <class X>
void rotate_heads(X *x, int heads, int head_size, const float *row, int half, int style) {
  for (int h = 0; h < heads; ++h) {
    X *head = x + int64_t(h) * head_size;
    if (style == OCTAVO_NEOX)
      rotate_halves(head, row, row + half, half);
    else
      rotate_pairs(head, row, row + half, half);
  }
}

}  // namespace

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
