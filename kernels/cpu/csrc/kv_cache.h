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

// Elements from one block of all heads to the next.
template <class C>
inline int64_t block_stride(C *cache, int64_t given, int heads, int head_size, int block_size) {
  return given ? given : heads * kv_record(cache, head_size, block_size);
}

template <class F>
inline int with_kv_dtype(int dtype, F &&f) {
  if (dtype == OCTAVO_INT8) return f(static_cast<kv8 *>(nullptr));
  return with_dtype(dtype, f);
}

constexpr int kRun = 16;  // tokens handled together when they are neighbours in one block
constexpr int kMostCodes = 256;  // of a head, in an int8 cache
constexpr int kPart = 256;       // elements of a head that are converted or turned at a time

// Head sizes are multiples of 8, so not always whole vectors.
template <class T>
OCTAVO_INLINE vf load_some(const T *p, int n) {
  return n >= W ? load(p) : load_part(p, n);
}
template <class C, class X>
OCTAVO_INLINE void convert_row(C *to, const X *from, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i));
  if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

// to[i * kRun + t] = element i < n of token t < run, and zeros in place of further tokens.
template <class X>
void turn(const X *from, int64_t stride, int run, int n, float *to) {
  for (int t0 = 0; t0 < kRun; t0 += W)
    for (int i = 0; i < n; i += W) {
      vf a[W], b[W];
#pragma GCC unroll 16
      for (int t = 0; t < W; ++t)
        a[t] = t0 + t < run ? load_some(from + (t0 + t) * stride + i, n - i) : vf{};
#pragma GCC unroll 4
      for (int step = 1; step < W; step *= 2) {  // log2(W) perfect shuffles of the rows
#pragma GCC unroll 8
        for (int j = 0; j < W / 2; ++j) zip(a[j], a[j + W / 2], b[2 * j], b[2 * j + 1]);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) a[j] = b[j];
      }
      const int rows = n - i < W ? n - i : W;
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j)
        if (j < rows) store(to + (i + j) * kRun + t0, a[j]);
    }
}

// --- codes of an int8 cache ---

// |x| at its largest is 127 of a scale. A NaN or infinity makes the scale NaN, so that it stays visible.
struct Codes {
  vf inverse, scale;

  // top: the magnitudes' bits, the largest in each lane: infinity and NaN come after all numbers.
  OCTAVO_INLINE explicit Codes(vu top) {
    const vi bad = (vi)(top > splat_u(0x7f7fffffu));
    const vf most = bad ? vf{} : (vf)top;
    const vi any = (vi)(most > splat(1e-30f));
    inverse = any ? 127.0f / most : vf{};
    scale = bad ? splat(__builtin_nanf("")) : any ? most / 127.0f : vf{};
  }
  OCTAVO_INLINE vi operator()(vf x) const {
    const vi code = (vi)(x * inverse + 12582912.0f) - 0x4b400000;  // to the nearest, even of two
    return inverse > vf{} ? code : vi{};
  }
};
OCTAVO_INLINE vu raise(vu top, vf x) {
  const vu v = (vu)x & 0x7fffffffu;
  return v > top ? v : top;
}

OCTAVO_INLINE void store(kv8 *p, vi c) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8((__m512i)c));
#else
  typedef int8_t codes_mem __attribute__((vector_size(W), aligned(1), may_alias));
  *reinterpret_cast<codes_mem *>(p) = __builtin_convertvector(c, codes_mem);
#endif
}

// One token of one head, its codes side by side; returns its scale.
template <class X>
float quantize_head(const X *x, int n, kv8 *to) {
  vu top = {};
  for (int i = 0; i < n; i += W) top = raise(top, load_some(x + i, n - i));
  uint32_t most = 0;
  for (int i = 0; i < W; ++i) most = top[i] > most ? top[i] : most;
  const Codes codes(splat_u(most));
  for (int i = 0; i < n; i += W) {
    const vi c = codes(load_some(x + i, n - i));
    if (n - i >= W) {
      store(to + i, c);
    } else {
      kv8 part[W];
      store(part, c);
      __builtin_memcpy(to + i, part, size_t(n - i));
    }
  }
  return codes.scale[0];
}

template <class C>
float *scales_of(C *block, int n, int block_size) {
  return reinterpret_cast<float *>(block + int64_t(n) * block_size);
}

// --- a run of tokens ---

// Keys of `run` tokens into a block from place `offset` on; several are turned in registers, for one
// store an element is all there is to do.
template <class C, class X>
void write_keys(C *block, int block_size, int offset, const X *from, int64_t stride, int run, int n) {
  if (run == 1) {
    C row[kPart];
    C *to = block + offset;
    if constexpr (has_scales<C>) {
      scales_of(block, n, block_size)[offset] = quantize_head(from, n, row);
      for (int i = 0; i < n; ++i, to += block_size) *to = row[i];
    } else {
      for (int begin = 0; begin < n; begin += kPart) {
        const int part = n - begin < kPart ? n - begin : kPart;
        convert_row(row, from + begin, part);
        for (int i = 0; i < part; ++i, to += block_size) *to = row[i];
      }
    }
    return;
  }
  alignas(64) float turned[kPart * kRun];
  for (int begin = 0; begin < n; begin += kPart) {
    const int part = n - begin < kPart ? n - begin : kPart;
    turn(from + begin, stride, run, part, turned);
    C *to = block + int64_t(begin) * block_size + offset;
    for (int t = 0; t < run; t += W) {
      const int lanes = run - t < W ? run - t : W;
      if constexpr (has_scales<C>) {
        vu top = {};
        for (int i = 0; i < part; ++i) top = raise(top, load(turned + i * kRun + t));
        const Codes codes(top);
        kv8 row[W];
        for (int i = 0; i < part; ++i) {
          const vi c = codes(load(turned + i * kRun + t));
          if (lanes == W) {
            store(to + int64_t(i) * block_size + t, c);
          } else {
            store(row, c);
            __builtin_memcpy(to + int64_t(i) * block_size + t, row, size_t(lanes));
          }
        }
        store_part(scales_of(block, n, block_size) + offset + t, codes.scale, lanes);
      } else if (lanes == W) {
        for (int i = 0; i < part; ++i)
          store(to + int64_t(i) * block_size + t, load(turned + i * kRun + t));
      } else {
        for (int i = 0; i < part; ++i)
          store_part(to + int64_t(i) * block_size + t, load(turned + i * kRun + t), lanes);
      }
    }
  }
}

template <class C, class X>
void write_run(const octavo_write_step &s, C *k_cache, C *v_cache, X *k, X *v,
               int64_t token, int run) {
  const int64_t block = s.slots[token] / s.block_size;
  const int offset = int(s.slots[token] % s.block_size), dv = s.head_size_v;
  k_cache += block * block_stride(k_cache, s.k_block_stride, s.kv_heads, s.head_size, s.block_size);
  v_cache += block * block_stride(v_cache, s.v_block_stride, s.kv_heads, dv, s.block_size);
  for (int h = 0; h < s.kv_heads; ++h) {
    write_keys(k_cache + h * kv_record(k_cache, s.head_size, s.block_size), s.block_size, offset,
               k + token * s.k_row_stride + int64_t(h) * s.head_size, s.k_row_stride, run,
               s.head_size);
    C *block_v = v_cache + h * kv_record(v_cache, dv, s.block_size);
    const X *from_v = v + token * s.v_row_stride + int64_t(h) * dv;
    for (int t = 0; t < run; ++t, from_v += s.v_row_stride) {
      C *to = block_v + int64_t(offset + t) * dv;
      if constexpr (has_scales<C>)
        scales_of(block_v, dv, s.block_size)[offset + t] = quantize_head(from_v, dv, to);
      else
        convert_row(to, from_v, dv);
    }
  }
}

// Tokens are cut into runs in one way, whoever writes which: whether one begins at t.
inline bool begins_run(const octavo_write_step &s, int64_t t) {
  return t == 0 || s.slots[t] < 0 || s.slots[t] != s.slots[t - 1] + 1 || s.slots[t] % kRun == 0;
}
inline int64_t next_run(const octavo_write_step &s, int64_t t) {
  while (t < s.tokens && !begins_run(s, t)) ++t;
  return t;
}

// Writes the runs that begin in [begin, end). before(first, last) is called for the tokens of each.
template <class C, class X, class F>
void write_tokens(const octavo_write_step &s, C *k_cache, C *v_cache, X *k, X *v,
                  int64_t begin, int64_t end, F &&before) {
  for (int64_t t = next_run(s, begin), after; t < end; t = after) {
    after = next_run(s, t + 1);
    before(t, after);
    if (s.slots[t] >= 0) write_run(s, k_cache, v_cache, k, v, t, int(after - t));
  }
}

}  // namespace
}  // namespace OCTAVO_NS
