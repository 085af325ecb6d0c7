// Matrix products with packed weights: what packing, products and the fused layer share.
//
// A weight lies in panels of kPanel output columns. In a panel all that one step along the inner
// dimension needs is contiguous, so a product reads each panel once, front to back:
//   float32, bfloat16, float16   [k][kPanel]
//   int8    [k / kCodes][kPanel][kCodes] codes, then float32 scales [kPanel]
//   int4    per group of inner elements: [group / 8][kPanel][4] bytes (element i in the low half of
//           byte i, element i + 4 in the high half), then float16 scales and minima [kPanel] each
//   codes4  as int4
//   codes8  per group of inner elements: [group][kPanel] codes, then float16 scales [kPanel]
// A gated weight holds gate rows in the first half of every panel's vectors and the up rows that
// belong to them in the second, so that act(gate) * up needs no other panel.
//
// A row's bits do not depend on its company: every output element is one chain of multiply-adds in
// order of k (integer weights: exact within a group of activations, then groups in order).
#pragma once
#include "vec.h"

namespace OCTAVO_NS {
namespace {

#if defined(__AVX2__)
constexpr int kVectors = 2;
#else
constexpr int kVectors = 4;
#endif
constexpr int kPanel = kVectors * W;

// Row tiles: accumulators, one step's weights and one activation have to fit the registers.
#if defined(__AVX512VNNI__)
constexpr int kFloatRows = 14, kIntRows = 7, kGroupRows = 6;
#elif defined(__AVX512F__)
constexpr int kFloatRows = 14, kIntRows = 6, kGroupRows = 4;
#elif defined(__AVXVNNI__)
constexpr int kFloatRows = 6, kIntRows = 3, kGroupRows = 3;
#elif defined(__AVX2__)
constexpr int kFloatRows = 6, kIntRows = 3, kGroupRows = 2;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kFloatRows = 6, kIntRows = 4, kGroupRows = 4;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kFloatRows = 6, kIntRows = 3, kGroupRows = 3;
#elif defined(__aarch64__)
constexpr int kFloatRows = 6, kIntRows = 3, kGroupRows = 2;
#elif defined(__MMA__)
constexpr int kFloatRows = 8, kIntRows = 8, kGroupRows = 8;
#elif defined(__VSX__)
constexpr int kFloatRows = 8, kIntRows = 4, kGroupRows = 2;
#else
constexpr int kFloatRows = 2, kIntRows = 1, kGroupRows = 1;
#endif

// Of a tile that takes codes as they come: it unpacks what further rows then find unpacked.
#if defined(__AVX512F__)
constexpr int kCodesRows = 12;
#elif defined(__MMA__)
constexpr int kCodesRows = 1;  // more rows are multiplied faster by its own unit
#else
constexpr int kCodesRows = kFloatRows < 4 ? kFloatRows : 4;
#endif

// --- integer dot products: acc[lane] += sum over kStep of weight * activation, exact in int32 ---

typedef int16_t vs16 __attribute__((vector_size(W * 4)));
typedef int8_t vs8_half __attribute__((vector_size(W * 2), aligned(1), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(W * 4), aligned(1), may_alias));

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define OCTAVO_VNNI 1
#endif
#if defined(OCTAVO_VNNI) || defined(__ARM_FEATURE_DOTPROD) || defined(__VSX__)
constexpr int kStep = 4;      // inner elements in a 32-bit lane
typedef int8_t Activation;
#else
constexpr int kStep = 2;      // 16-bit products: vpmaddubsw would saturate
typedef int16_t Activation;
#endif
// What is added to a signed weight before it is stored, where the instruction wants unsigned ones.
#if defined(OCTAVO_VNNI) || defined(__VSX__)
constexpr int kOffset = 128;
#else
constexpr int kOffset = 0;
#endif
// Inner elements of one column that lie together in an int8 panel.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kCodes = 8;  // what smmla takes of a column
#else
constexpr int kCodes = kStep;
#endif
constexpr int64_t kInnerMultiple = 64;  // rows of activations are padded with zeros to this
// Activations that share a scale beside int8 weights. One scale for a whole row would leave few codes
// to all but the outliers that language models have in some columns.
constexpr int64_t kShared = 64;

OCTAVO_INLINE vi dot(vi acc, vi weight, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weight, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)weight, (__m256i)x);
#elif defined(__AVX512BW__)
  return acc + (vi)_mm512_madd_epi16((__m512i)weight, (__m512i)x);
#elif defined(__AVX2__)
  return acc + (vi)_mm256_madd_epi16((__m256i)weight, (__m256i)x);
#elif defined(__x86_64__)
  return acc + (vi)_mm_madd_epi16((__m128i)weight, (__m128i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)weight, (int8x16_t)x);
#elif defined(__aarch64__)
  int32x4_t lo = vmull_s16(vget_low_s16((int16x8_t)weight), vget_low_s16((int16x8_t)x));
  int32x4_t hi = vmull_high_s16((int16x8_t)weight, (int16x8_t)x);
  return acc + (vi)vpaddq_s32(lo, hi);
#elif defined(__VSX__)
  return (vi)vec_msum((__vector signed char)x, (__vector unsigned char)weight,
                      (__vector signed int)acc);
#else
  vi r = acc;
  const vs16 a = (vs16)weight, b = (vs16)x;
  for (int i = 0; i < W; ++i) r[i] += int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
  return r;
#endif
}

// The W lanes of stored int8 codes that `dot` takes: kStep bytes a lane.
OCTAVO_INLINE vi load_codes(const int8_t *p) {
  if constexpr (kStep == 4) return *reinterpret_cast<const vi_mem *>(p);
#if defined(__AVX512BW__)
  return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__aarch64__)
  return (vi)vmovl_s8(vld1_s8(p));
#elif defined(__x86_64__)
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  return (vi)_mm_srai_epi16(_mm_unpacklo_epi8(x, x), 8);
#else
  return (vi)__builtin_convertvector(*reinterpret_cast<const vs8_half *>(p), vs16);
#endif
}
OCTAVO_INLINE int32_t load_step(const Activation *p) {
  int32_t r;
  __builtin_memcpy(&r, p, 4);
  return r;
}

// --- weights ---

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int64_t int8_inner(int64_t k) { return round_up(k, kCodes > 4 ? kCodes : 4); }
inline int64_t panels(const octavo_weight &w) {
  return w.gated ? (w.n / 2 + kPanel / 2 - 1) / (kPanel / 2) : (w.n + kPanel - 1) / kPanel;
}
inline int64_t group_bytes(int64_t group) { return group / 2 * kPanel + 4 * kPanel; }
inline int64_t codes8_bytes(int64_t group) { return group * kPanel + 2 * kPanel; }
inline int64_t panel_bytes(const octavo_weight &w) {
  switch (w.format) {
    case OCTAVO_F32:
      return w.k * kPanel * 4;
    case OCTAVO_BF16:
    case OCTAVO_F16:
      return round_up(w.k * kPanel * 2, 64);
    case OCTAVO_INT8:
      return round_up(int8_inner(w.k) * kPanel + 4 * kPanel, 64);
    case OCTAVO_CODES8:
      return round_up(w.k / w.group * codes8_bytes(w.group), 64);
    default:
      return round_up(w.k / w.group * group_bytes(w.group), 64);
  }
}
inline bool valid(const octavo_weight &w) {
  if (w.n <= 0 || w.k <= 0 || (w.gated && w.n % 2)) return false;
  if (w.format == OCTAVO_INT8) return w.k <= OCTAVO_INT8_MAX_K;
  if (w.format == OCTAVO_INT4 || w.format == OCTAVO_CODES4)
    return w.group >= 8 && w.group % 8 == 0 && w.k % w.group == 0 && w.group <= 4096;
  if (w.format == OCTAVO_CODES8) return w.group >= 1 && w.k % w.group == 0;
  return w.format == OCTAVO_F32 || w.format == OCTAVO_BF16 || w.format == OCTAVO_F16;
}
inline bool is_integer(const octavo_weight &w) {
  return w.format == OCTAVO_INT8 || w.format == OCTAVO_INT4;
}
inline bool is_coded(const octavo_weight &w) { return w.format == OCTAVO_CODES8 || w.format == OCTAVO_CODES4; }
// The output of column c of panel p; at or past n (or, gated, past its half) there is none.
struct Column {
  int64_t at;
  bool exists;
};
inline Column column(const octavo_weight &w, int64_t panel, int c) {
  if (!w.gated) return {panel * kPanel + c, panel * kPanel + c < w.n};
  constexpr int half = kPanel / 2;
  const int64_t at = panel * half + c % half;
  return {at + (c < half ? 0 : w.n / 2), at < w.n / 2};
}

// --- quantised activations: codes in [-127, 127], and for each row and group a scale and the codes' sum ---

// A group's scales and sums of neighbouring rows lie together: a tile then reaches them all from one
// address, and has its registers for sums.
struct Quantized {
  Activation *codes;  // [rows, stride]
  float *scales;      // [groups, rows]
  int32_t *sums;      // [groups, rows]
  int64_t rows;       // that there is room for
  int64_t stride, groups, group;  // group: kShared, or int4's; the last one may be shorter

  int64_t at(int64_t group_, int64_t row) const { return group_ * rows + row; }
};

inline int64_t inner_stride(int64_t k) { return round_up(k, kInnerMultiple); }
inline int64_t shared(const octavo_weight &w) { return w.format == OCTAVO_INT4 ? w.group : kShared; }
// Of many rows an odd number of cache lines: a row's scales of all groups would else fall on few of the
// cache's sets, and throw each other out.
inline int64_t scale_rows(int64_t rows) { return rows < 32 ? rows : (rows + 15) / 16 * 16 | 16; }
inline int64_t quantized_bytes(const octavo_weight &w, int64_t rows) {
  const int64_t groups = (w.k + shared(w) - 1) / shared(w);
  return round_up(rows * inner_stride(w.k) * int64_t(sizeof(Activation)), 64) +
         2 * round_up(scale_rows(rows) * groups * 4, 64);
}
inline Quantized quantized_at(const octavo_weight &w, int64_t rows, void *memory) {
  Quantized q;
  char *at = static_cast<char *>(memory);
  q.rows = scale_rows(rows);
  q.stride = inner_stride(w.k);
  q.group = shared(w);
  q.groups = (w.k + q.group - 1) / q.group;
  q.codes = reinterpret_cast<Activation *>(at);
  at += round_up(rows * q.stride * int64_t(sizeof(Activation)), 64);
  q.scales = reinterpret_cast<float *>(at);
  q.sums = reinterpret_cast<int32_t *>(at + round_up(q.rows * q.groups * 4, 64));
  return q;
}

OCTAVO_INLINE void store_codes(Activation *to, vi c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Activation) == 1)
    return _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)c));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16((__m512i)c));
#else
  typedef Activation narrow_mem __attribute__((vector_size(W * sizeof(Activation)), aligned(1), may_alias));
  *reinterpret_cast<narrow_mem *>(to) = __builtin_convertvector(c, narrow_mem);
#endif
}

// Symmetric by row and group: scale = max |x| / 127. A group with a NaN or infinity gets a NaN scale,
// and so its row a NaN result: it is never quietly wrong.
struct Scaling {
  bool bad;
  vf factor;

  // top: the magnitudes' bits as integers: they order as the numbers do, and infinity and NaN come
  // after all numbers.
  OCTAVO_INLINE Scaling(vu top, float *scale) {
    bad = bits((vi)(top > splat_u(0x7f7fffffu))) != 0;
    const float most = bad ? 0.0f : hmax((vf)top);
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    // 127 / most overflows for subnormal groups: they are zero for all that follows.
    const float safe = inverse < 3.4e38f ? inverse : 0.0f;
    *scale = bad ? __builtin_nanf("") : safe > 0 ? most / 127.0f : 0.0f;
    factor = splat(safe);
  }
  OCTAVO_INLINE vi operator()(vf x) const {  // to the nearest, even of two, for |x| < 2^22
    const vi c = (vi)(x * factor + 12582912.0f) - 0x4b400000;
    return bad ? vi{} : c;
  }
};
OCTAVO_INLINE vu raised(vu top, vf x) {
  const vu v = (vu)x & 0x7fffffffu;
  return v > top ? v : top;
}
// The sum of codes: exact in float32, of which 4096 are below 2^24.
OCTAVO_INLINE int32_t total_of(vi codes) { return int32_t(hsum(__builtin_convertvector(codes, vf))); }

inline void quantize_group(const float *x, int64_t n, Activation *codes, float *scale, int32_t *sum) {
  vu top = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) top = raised(top, load(x + i));
  if (i < n) top = raised(top, load_part(x + i, int(n - i)));
  const Scaling to_codes(top, scale);
  vi total = {};
  for (i = 0; i < n; i += W) {
    const int part = n - i < W ? int(n - i) : W;
    const vi c = to_codes(part == W ? load(x + i) : load_part(x + i, part));
    total = total + c;
    if (part == W)
      store_codes(codes + i, c);
    else
      for (int j = 0; j < part; ++j) codes[i + j] = static_cast<Activation>(c[j]);
  }
  *sum = total_of(total);
}
// A group of N whole vectors, read once.
template <int N>
OCTAVO_INLINE void quantize_whole(const float *x, Activation *codes, float *scale, int32_t *sum) {
  vf v[N];
  vu top = {};
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = load(x + i * W), top = raised(top, v[i]);
  const Scaling to_codes(top, scale);
#if defined(__AVX512VNNI__)
  if constexpr (N == 4) {
    const __m512i low = _mm512_packs_epi32((__m512i)to_codes(v[0]), (__m512i)to_codes(v[1]));
    const __m512i high = _mm512_packs_epi32((__m512i)to_codes(v[2]), (__m512i)to_codes(v[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i all = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    _mm512_storeu_si512(codes, all);
    *sum = total_of((vi)_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), all));
    return;
  }
#endif
  vi total = {};
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const vi c = to_codes(v[i]);
    store_codes(codes + i * W, c);
    total = total + c;
  }
  *sum = total_of(total);
}
template <int N>
void quantize_wholes(const float *x, const Quantized &q, Activation *codes, int64_t row) {
  for (int64_t g = 0; g < q.groups; ++g)
    quantize_whole<N>(x + g * (N * W), codes + g * (N * W), q.scales + q.at(g, row), q.sums + q.at(g, row));
}
inline void quantize_row(const float *x, int64_t k, const Quantized &q, int64_t row) {
  Activation *codes = q.codes + row * q.stride;
  for (int64_t i = k; i < q.stride; ++i) codes[i] = 0;
  const bool whole = k == q.groups * q.group;
  if (whole && q.group == 64) return quantize_wholes<64 / W>(x, q, codes, row);
  if (whole && q.group == 32) return quantize_wholes<32 / W>(x, q, codes, row);
  for (int64_t g = 0; g < q.groups; ++g) {
    const int64_t from = g * q.group, n = k - from < q.group ? k - from : q.group;
    quantize_group(x + from, n, codes + from, q.scales + q.at(g, row), q.sums + q.at(g, row));
  }
}

// --- what tiles share ---

// Tiles add in arrays of their own, every index of which the compiler can see: one that is also
// indexed by variables lives in memory, and GCC stores to it in every turn of the loop.
template <int MR, class V>
OCTAVO_INLINE void give(const V (&sum)[MR][kVectors], V (&acc)[MR][kVectors]) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) acc[m][j] = sum[m][j];
}

// acc += a group's exact sums times its scales, and sums of activations times its minima.
template <int MR>
OCTAVO_INLINE void add_group(const Quantized &q, int64_t row, int64_t group, const f16 *scales,
                             const vi (&sum)[MR][kVectors], vf (&acc)[MR][kVectors]) {
  const float *row_scales = q.scales + q.at(group, row);
  const int32_t *row_sums = q.sums + q.at(group, row);
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    const vf d = load(scales + j * W), low = load(scales + kPanel + j * W);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const vf x = splat(row_scales[m]);
      acc[m][j] = fma(__builtin_convertvector(sum[m][j], vf) * x, d, acc[m][j]);
      acc[m][j] = fma(splat(float(row_sums[m])) * x, low, acc[m][j]);
    }
  }
}

// --- what becomes of a product ---

struct Epilogue {
  float *out;
  int64_t stride;
  const float *bias = nullptr;  // [n]
  bool add = false;             // onto what out holds
  int act = -1;                 // gated weights: out[:, n / 2] = act(gate) * up
};

}  // namespace

// x: float32 rows for float weights, Quantized for integer ones. Opens one parallel region.
void multiply(const octavo_weight &w, const float *x, int64_t x_stride, const Quantized *q,
              int64_t rows, const Epilogue &e);

}  // namespace OCTAVO_NS
