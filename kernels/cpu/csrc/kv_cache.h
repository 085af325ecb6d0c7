// Scatter of new keys and values into the paged cache.
// K is transposed inside a block ([head_size, block_size]) so that attention's scores of
// consecutive tokens are one vector; V is [block_size, head_size_v].
#pragma once
#include "vec.h"

namespace OCTAVO_NS {
namespace {

// An int8 cache: a block of one head is its codes, laid out like any other, and then a float32 scale
// for each position; codes lie in [-127, 127].
struct kv8 {
  int8_t code;
};
template <class C>
constexpr bool has_scales = false;
template <>
constexpr bool has_scales<kv8> = true;

OCTAVO_INLINE float to_float(kv8 x) { return float(x.code); }
OCTAVO_INLINE vf load(const kv8 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
  typedef int8_t codes_mem __attribute__((vector_size(W), aligned(1), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const codes_mem *>(p), vf);
#endif
}

// Elements (for int8, bytes) of one block of one head.
template <class C>
inline int64_t kv_record(C *, int head_size, int block_size) {
  return int64_t(head_size) * block_size + (has_scales<C> ? 4 * block_size : 0);
}

template <class F>
inline int with_kv_dtype(int dtype, F &&f) {
  if (dtype == OCTAVO_INT8) return f(static_cast<kv8 *>(nullptr));
  return with_dtype(dtype, f);
}

constexpr int kRun = 16;  // tokens handled together when they are neighbours in one block

// Head sizes are multiples of 8, so not always whole vectors.
template <class C, class X>
OCTAVO_INLINE void convert_row(C *to, const X *from, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

// Codes of one head of one token, and their scale: |x| at its largest is 127 of it. A NaN or infinity
// makes the scale NaN, so that it stays visible.
template <class X>
float quantize_head(const X *x, int n, int8_t *codes) {
  float most = 0, poison = 0;
  for (int i = 0; i < n; ++i) {
    const float magnitude = __builtin_fabsf(to_float(x[i]));
    most = magnitude > most ? magnitude : most;
    poison += to_float(x[i]) * 0.0f;
  }
  const float inverse = poison == 0 && most > 1e-30f ? 127.0f / most : 0;
  for (int i = 0; i < n; ++i)
    codes[i] = static_cast<int8_t>(
        inverse > 0 ? int32_t(as_bits(to_float(x[i]) * inverse + 12582912.0f)) - 0x4b400000 : 0);
  return poison == 0 ? (inverse > 0 ? most / 127.0f : 0) : __builtin_nanf("");
}

constexpr int kMostCodes = 256;  // of a head, in an int8 cache

// One token of one head into an int8 block: step is how far neighbours lie apart.
template <class X>
void write_codes(kv8 *block, const X *x, int n, int block_size, int offset, int64_t step,
                 int64_t start) {
  int8_t codes[kMostCodes];
  reinterpret_cast<float *>(block + int64_t(n) * block_size)[offset] = quantize_head(x, n, codes);
  for (int i = 0; i < n; ++i) block[start + i * step].code = codes[i];
}

template <class C, class X>
void write_run(const octavo_write_step &s, C *k_cache, C *v_cache, X *k, X *v,
               int64_t token, int run) {
  const int64_t block = s.slots[token] / s.block_size, offset = s.slots[token] % s.block_size;
  for (int h = 0; h < s.kv_heads; ++h) {
    const int64_t head = block * s.kv_heads + h;
    C *block_k = k_cache + head * kv_record(k_cache, s.head_size, s.block_size);
    C *block_v = v_cache + head * kv_record(v_cache, s.head_size_v, s.block_size);
    const X *from_k = k + token * s.k_row_stride + int64_t(h) * s.head_size;
    const X *from_v = v + token * s.v_row_stride + int64_t(h) * s.head_size_v;
    if constexpr (has_scales<C>) {
      for (int t = 0; t < run; ++t) {
        const int at = int(offset) + t;
        write_codes(block_k, from_k + t * s.k_row_stride, s.head_size, s.block_size, at,
                    s.block_size, at);
        write_codes(block_v, from_v + t * s.v_row_stride, s.head_size_v, s.block_size, at, 1,
                    int64_t(at) * s.head_size_v);
      }
    } else {
      constexpr int kPart = 256;
      C row[kPart];
      for (int t = 0; t < run; ++t) {
        C *to = block_k + offset + t;
        for (int from = 0; from < s.head_size; from += kPart) {
          const int n = s.head_size - from < kPart ? s.head_size - from : kPart;
          convert_row(row, from_k + t * s.k_row_stride + from, n);
          for (int i = 0; i < n; ++i, to += s.block_size) *to = row[i];
        }
        convert_row(block_v + (offset + t) * s.head_size_v, from_v + t * s.v_row_stride,
                    s.head_size_v);
      }
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
