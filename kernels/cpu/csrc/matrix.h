// Register tiles for CPUs with instructions that multiply small matrices: ARM's smmla (2x8 times 8x2
// bytes) and POWER10's MMA (outer products into 4x4 accumulators).
//
// They read the same panels as the vector tiles of linear.cpp and keep its contract: a float32
// element is one chain of fused multiply-adds in order of k (the outer product is of rank 1), an
// integer one is exact.
#pragma once
#include "linear.h"

namespace OCTAVO_NS {
namespace {
namespace matrix {

// Whether a tile of so many rows is taken from here.
#if defined(__MMA__)
constexpr bool floats(int rows) { return rows > 1; }  // one row would use a quarter of the unit
constexpr bool ints(int rows) { return rows > 1; }
constexpr bool groups(int rows) { return rows > 1; }
#elif defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool floats(int) { return false; }
constexpr bool ints(int) { return true; }  // also one row: panels have no other layout
constexpr bool groups(int rows) { return rows > 1; }
#else
constexpr bool floats(int) { return false; }
constexpr bool ints(int) { return false; }
constexpr bool groups(int) { return false; }
#endif

// acc = the product of MR rows of a and k steps of panel b.
template <int MR, class T>
void float_tile(const float *a, int64_t lda, const T *b, int64_t k, vf (&acc)[MR][kVectors]);
// acc = the same in codes, for steps of kCodes.
template <int MR>
void int_tile(const Activation *a, int64_t lda, const int8_t *b, int64_t steps,
              vi (&acc)[MR][kVectors]);
// acc += the products with groups of 4-bit codes, scaled.
template <int MR>
void group_tile(const Quantized &q, int64_t row, const uint8_t *b, int64_t groups,
                vf (&acc)[MR][kVectors]);

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two rows by two columns to a vector: {r0 c0, r0 c1, r1 c0, r1 c1}.
constexpr int kPairs = kPanel / 2;
template <int MR>
using Sums = int32x4_t[(MR + 1) / 2][kPairs];

// Eight codes of rows 2p and 2p + 1, the latter zeros if there is no such row.
template <int MR>
OCTAVO_INLINE void load_pairs(const int8_t *a, int64_t lda, int8x16_t (&x)[(MR + 1) / 2]) {
#pragma GCC unroll 8
  for (int p = 0; p < (MR + 1) / 2; ++p)
    x[p] = vcombine_s8(vld1_s8(a + 2 * p * lda),
                       2 * p + 1 < MR ? vld1_s8(a + (2 * p + 1) * lda) : vdup_n_s8(0));
}

template <int MR>
OCTAVO_INLINE void rows_of(const Sums<MR> &sum, vi (&acc)[MR][kVectors]) {
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const int64x2_t a = vreinterpretq_s64_s32(sum[m / 2][2 * j]);
      const int64x2_t b = vreinterpretq_s64_s32(sum[m / 2][2 * j + 1]);
      acc[m][j] = (vi)(m % 2 ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
    }
}

template <int MR>
OCTAVO_INLINE void int_tile(const Activation *a, int64_t lda, const int8_t *b, int64_t steps,
                            vi (&acc)[MR][kVectors]) {
  Sums<MR> sum = {};
#pragma GCC unroll 1
  for (int64_t i = 0; i < steps; ++i, a += kCodes, b += kPanel * kCodes) {
    if constexpr (MR <= 2) __builtin_prefetch(b + 1024), __builtin_prefetch(b + 1088);
    int8x16_t x[(MR + 1) / 2];
    load_pairs<MR>(a, lda, x);
#pragma GCC unroll 8
    for (int j = 0; j < kPairs; ++j) {
      const int8x16_t w = vld1q_s8(b + j * 16);
#pragma GCC unroll 8
      for (int p = 0; p < (MR + 1) / 2; ++p) sum[p][j] = vmmlaq_s32(sum[p][j], x[p], w);
    }
  }
  rows_of<MR>(sum, acc);
}

template <int MR>
OCTAVO_INLINE void group_tile(const Quantized &q, int64_t row, const uint8_t *b, int64_t groups,
                              vf (&acc)[MR][kVectors]) {
  const Activation *a = q.codes + row * q.stride;
  for (int64_t g = 0; g < groups; ++g) {
    Sums<MR> sum = {};
    for (int64_t i = 0; i < q.group; i += 8, a += 8, b += kPanel * 4) {
      int8x16_t x[(MR + 1) / 2];
      load_pairs<MR>(a, q.stride, x);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const uint8x16_t codes = vld1q_u8(b + j * 16);  // four columns
        const int32x4_t low = vreinterpretq_s32_u8(vandq_u8(codes, vdupq_n_u8(15)));
        const int32x4_t high = vreinterpretq_s32_u8(vshrq_n_u8(codes, 4));
        const int8x16_t first = vreinterpretq_s8_s32(vzip1q_s32(low, high));
        const int8x16_t second = vreinterpretq_s8_s32(vzip2q_s32(low, high));
#pragma GCC unroll 8
        for (int p = 0; p < (MR + 1) / 2; ++p) {
          sum[p][2 * j] = vmmlaq_s32(sum[p][2 * j], x[p], first);
          sum[p][2 * j + 1] = vmmlaq_s32(sum[p][2 * j + 1], x[p], second);
        }
      }
    }
    vi exact[MR][kVectors];
    rows_of<MR>(sum, exact);
    add_group<MR>(q, row, g, reinterpret_cast<const f16 *>(b), exact, acc);
    b += 4 * kPanel;
  }
}

#elif defined(__MMA__)

typedef __vector unsigned char bytes;

// Accumulators of MR rows by a panel; rows that are not there are multiplied as zeros.
template <int MR>
struct Sums {
  static constexpr int fours = (MR + 3) / 4;
  __vector_quad q[fours][kVectors];

  OCTAVO_INLINE void clear() {
#pragma GCC unroll 2
    for (int p = 0; p < fours; ++p)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) __builtin_mma_xxsetaccz(&q[p][j]);
  }
  template <class V>
  OCTAVO_INLINE void rows(V (&acc)[MR][kVectors]) {
#pragma GCC unroll 2
    for (int p = 0; p < fours; ++p)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        V four[4];
        __builtin_mma_disassemble_acc(four, &q[p][j]);
#pragma GCC unroll 4
        for (int m = 0; m < 4; ++m)
          if (p * 4 + m < MR) acc[p * 4 + m][j] = four[m];
      }
  }
};

// x[p][s]: word s of rows 4p to 4p + 3, from four words of each row.
template <int MR>
OCTAVO_INLINE void transpose(const void *a, int64_t row_bytes, vi (&x)[(MR + 3) / 4][4]) {
#pragma GCC unroll 2
  for (int p = 0; p < (MR + 3) / 4; ++p) {
    vi r[4];
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m)
      r[m] = p * 4 + m < MR ? *reinterpret_cast<const vi_mem *>(static_cast<const char *>(a) +
                                                                (p * 4 + m) * row_bytes)
                            : vi{};
    const vi a0 = __builtin_shuffle(r[0], r[1], vi{0, 4, 1, 5});
    const vi a1 = __builtin_shuffle(r[0], r[1], vi{2, 6, 3, 7});
    const vi b0 = __builtin_shuffle(r[2], r[3], vi{0, 4, 1, 5});
    const vi b1 = __builtin_shuffle(r[2], r[3], vi{2, 6, 3, 7});
    x[p][0] = __builtin_shuffle(a0, b0, vi{0, 1, 4, 5});
    x[p][1] = __builtin_shuffle(a0, b0, vi{2, 3, 6, 7});
    x[p][2] = __builtin_shuffle(a1, b1, vi{0, 1, 4, 5});
    x[p][3] = __builtin_shuffle(a1, b1, vi{2, 3, 6, 7});
  }
}
// One word of each row: for what is left over of four.
template <int MR>
OCTAVO_INLINE void gather(const void *a, int64_t row_bytes, vi (&x)[(MR + 3) / 4]) {
  for (int p = 0; p < (MR + 3) / 4; ++p)
    for (int m = 0; m < 4; ++m) {
      int32_t word = 0;
      if (p * 4 + m < MR)
        __builtin_memcpy(&word, static_cast<const char *>(a) + (p * 4 + m) * row_bytes, 4);
      x[p][m] = word;
    }
}

template <int MR, class T>
OCTAVO_INLINE void float_tile(const float *a, int64_t lda, const T *b, int64_t k,
                              vf (&acc)[MR][kVectors]) {
  Sums<MR> sum;
  sum.clear();
  int64_t i = 0;
  for (; i + 4 <= k; i += 4) {
    vi x[Sums<MR>::fours][4];
    transpose<MR>(a + i, lda * 4, x);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s, b += kPanel)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const vf w = load(b + j * W);
#pragma GCC unroll 2
        for (int p = 0; p < Sums<MR>::fours; ++p)
          __builtin_mma_xvf32gerpp(&sum.q[p][j], (bytes)x[p][s], (bytes)w);
      }
  }
  for (; i < k; ++i, b += kPanel) {
    vi x[Sums<MR>::fours];
    gather<MR>(a + i, lda * 4, x);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 2
      for (int p = 0; p < Sums<MR>::fours; ++p)
        __builtin_mma_xvf32gerpp(&sum.q[p][j], (bytes)x[p], (bytes)load(b + j * W));
  }
  sum.rows(acc);
}

// Four inner elements to a word, as in the vector tiles: signed activations by unsigned weights.
template <int MR>
OCTAVO_INLINE void int_tile(const Activation *a, int64_t lda, const int8_t *b, int64_t steps,
                            vi (&acc)[MR][kVectors]) {
  Sums<MR> sum;
  sum.clear();
  int64_t i = 0;
#pragma GCC unroll 1
  for (; i + 4 <= steps; i += 4, a += 16) {
    vi x[Sums<MR>::fours][4];
    transpose<MR>(a, lda, x);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s, b += kPanel * kStep)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const vi w = load_codes(b + j * W * kStep);
#pragma GCC unroll 2
        for (int p = 0; p < Sums<MR>::fours; ++p)
          __builtin_mma_xvi8ger4pp(&sum.q[p][j], (bytes)x[p][s], (bytes)w);
      }
  }
  for (; i < steps; ++i, a += kStep, b += kPanel * kStep) {
    vi x[Sums<MR>::fours];
    gather<MR>(a, lda, x);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 2
      for (int p = 0; p < Sums<MR>::fours; ++p)
        __builtin_mma_xvi8ger4pp(&sum.q[p][j], (bytes)x[p], (bytes)load_codes(b + j * W * kStep));
  }
  sum.rows(acc);
}

template <int MR>
OCTAVO_INLINE void group_tile(const Quantized &q, int64_t row, const uint8_t *b, int64_t groups,
                              vf (&acc)[MR][kVectors]) {
  const Activation *a = q.codes + row * q.stride;
  for (int64_t g = 0; g < groups; ++g) {
    Sums<MR> sum;
    sum.clear();
    for (int64_t i = 0; i < q.group; i += 8, a += 8, b += kPanel * 4) {
      vi x[2][Sums<MR>::fours];
      gather<MR>(a, q.stride, x[0]);
      gather<MR>(a + 4, q.stride, x[1]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const vu codes = (vu)*reinterpret_cast<const vi_mem *>(b + j * W * 4);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const bytes w = (bytes)((codes >> (half * 4)) & splat_u(0x0f0f0f0fu));
#pragma GCC unroll 2
          for (int p = 0; p < Sums<MR>::fours; ++p)
            __builtin_mma_xvi8ger4pp(&sum.q[p][j], (bytes)x[half][p], w);
        }
      }
    }
    vi exact[MR][kVectors];
    sum.rows(exact);
    add_group<MR>(q, row, g, reinterpret_cast<const f16 *>(b), exact, acc);
    b += 4 * kPanel;
  }
}

#endif

}  // namespace matrix
}  // namespace
}  // namespace OCTAVO_NS
