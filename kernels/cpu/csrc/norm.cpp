// RMS normalisation, with and without the residual add.
#include "norm.h"

namespace OCTAVO_NS {
namespace {

constexpr int64_t kSerial = 16384;  // elements below which opening a region costs more than it gives

template <class X>
void add_row(X *residual, const X *x, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(residual + i, load(residual + i) + load(x + i));
  if (i < n) {
    const int m = int(n - i);
    store_part(residual + i, load_part(residual + i, m) + load_part(x + i, m), m);
  }
}

template <class F>
int each_row(const octavo_norm &p, F &&f) {
  const int64_t grain = p.n > 0 ? 1 + kSerial / p.n : 1;
  return with_dtype(p.dtype, [&](auto *x) {
    return with_dtype(p.weight_dtype, [&](auto *w) {
      parallel(p.rows * p.heads, grain, octavo::max_threads(),
               [&](int, int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) f(x, w, i / p.heads, i % p.heads);
               });
      return int(OCTAVO_OK);
    });
  });
}

}  // namespace

int rms_norm(const octavo_norm *norm, void *out, const void *x, const void *weight) {
  const octavo_norm &p = *norm;
  return each_row(p, [&](auto *type, auto *wtype, int64_t row, int64_t head) {
    using X = decltype(type);
    norm_row(static_cast<X>(out) + row * p.out_row_stride + head * p.out_head_stride,
             static_cast<X>(const_cast<void *>(x)) + row * p.x_row_stride + head * p.x_head_stride,
             static_cast<decltype(wtype)>(const_cast<void *>(weight)), p.n, p.eps,
             p.weight_offset);
  });
}

int add_rms_norm(const octavo_norm *norm, void *out, void *residual, int64_t residual_row_stride,
                 const void *x, const void *weight) {
  const octavo_norm &p = *norm;
  if (p.heads != 1) return OCTAVO_BAD_ARGUMENT;
  return each_row(p, [&](auto *type, auto *wtype, int64_t row, int64_t) {
    using X = decltype(type);
    X r = static_cast<X>(residual) + row * residual_row_stride;
    add_row(r, static_cast<X>(const_cast<void *>(x)) + row * p.x_row_stride, p.n);
    norm_row(static_cast<X>(out) + row * p.out_row_stride, r,
             static_cast<decltype(wtype)>(const_cast<void *>(weight)), p.n, p.eps,
             p.weight_offset);
  });
}

}  // namespace OCTAVO_NS
