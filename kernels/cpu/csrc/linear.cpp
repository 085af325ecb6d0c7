// Products of activations with packed weights. See linear.h for the layouts.
//
// Register tiles of several rows by one panel of columns; the weights of a panel are streamed once
// per block of rows, whose activations stay in the cache (the scheme of Goto & van de Geijn 2008,
// with whole panels in place of blocks along the inner dimension: that keeps sums in one order).
#include "linear.h"

#include "activation.h"
#include "matrix.h"

namespace OCTAVO_NS {
namespace {

constexpr int64_t kRowBlock = 112;         // rows whose activations should stay in the L2 cache
constexpr int64_t kRowBlockOfCodes = 256;  // more: each block unpacks every panel again
constexpr int64_t kPieceBytes = 1 << 16;   // of weights: less is not worth a hand-out

template <int MAX, class F>
OCTAVO_INLINE void with_rows(int rows, F &&f) {
  if constexpr (MAX > 0) {
    if (rows == MAX) return f.template operator()<MAX>();
    with_rows<MAX - 1>(rows, f);
  }
}

// --- register tiles ---

// One row is bound by memory: ask for what comes a few lines later.
constexpr int kNear = 1024;
// So are the first rows that meet a panel, and beside the streams of many the processor loses sight of the weights'
// by itself. Fewer do better unaided, and so do rows that find the panel in a cache.
constexpr int kFar = 4096, kUnaided = 8;
template <int AHEAD = kNear>
OCTAVO_INLINE void prefetch(const void *p) {
  __builtin_prefetch(static_cast<const char *>(p) + AHEAD, 0, 3);
}

template <int MR, bool ASK, class T>  // ASK: for weights that come from memory
OCTAVO_INLINE void float_tile(const float *a, int64_t lda, const T *b, int64_t k,
                              vf (&acc)[MR][kVectors]) {
  if constexpr (matrix::floats(MR)) return matrix::float_tile<MR>(a, lda, b, k, acc);
  constexpr int line = W * int(sizeof(T)) < 64 ? 64 / (W * int(sizeof(T))) : 1;
  vf sum[MR][kVectors] = {};
  for (int64_t i = 0; i < k; ++i, b += kPanel) {
    if constexpr (ASK)
      for (int j = 0; j < kVectors; j += line) prefetch<(MR > 1 ? kFar : kNear)>(b + j * W);
    vf w[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) w[j] = load(b + j * W);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const vf x = splat(a[m * lda + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[m][j] = fma(x, w[j], sum[m][j]);
    }
  }
  give(sum, acc);
}

OCTAVO_INLINE vf float_of_nibble(vu x) {  // of each lane's lowest four bits
#if defined(__AVX512F__)
  const __m512 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (vf)_mm512_permutexvar_ps((__m512i)x, all);
#else
  return __builtin_convertvector((vi)(x & 15u), vf);
#endif
}
// A panel of codes, one inner element after the other as float32: use(k, w[kVectors]). code * scale is exact, so that
// every element is what the checkpoint says, and was rounded once.
template <class F>
OCTAVO_INLINE void each_of_codes4(const uint8_t *b, int64_t k, int64_t group, F &&use) {
  for (int64_t i = 0; i < k; b += 4 * kPanel) {
    const f16 *scales = reinterpret_cast<const f16 *>(b + group / 2 * kPanel);
    vf d[kVectors], low[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) d[j] = load(scales + j * W), low[j] = load(scales + kPanel + j * W);
    for (const int64_t end = i + group; i < end; i += 8, b += kPanel * 4) {
      for (int j = 0; j < kPanel * 4; j += 64) prefetch<kFar>(b + j);
      vu codes[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) codes[j] = (vu)*reinterpret_cast<const vi_mem *>(b + j * W * 4);
#pragma GCC unroll 8
      for (int e = 0; e < 8; ++e) {
        const int place = kStep == 4 ? e % 4 : (e & 1) * 2 + (e % 4 >> 1);
        vf w[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j)
          w[j] = fma(float_of_nibble(codes[j] >> (place * 8 + e / 4 * 4)), d[j], low[j]);
        use(i + e, w);
      }
    }
  }
}
template <class F>
OCTAVO_INLINE void each_of_codes8(const uint8_t *b, int64_t k, int64_t group, F &&use) {
  for (int64_t i = 0; i < k; b += 2 * kPanel) {
    const f16 *scales = reinterpret_cast<const f16 *>(b + group * kPanel);
    vf d[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) d[j] = load(scales + j * W);
    for (const int64_t end = i + group; i < end; ++i, b += kPanel) {
      prefetch<kFar>(b);
      vf w[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        w[j] = __builtin_convertvector(widen(reinterpret_cast<const int8_t *>(b) + j * W), vf) * d[j];
      use(i, w);
    }
  }
}
template <class F>
OCTAVO_INLINE void each_of_codes(const octavo_weight &w, const char *b, F &&use) {
  const uint8_t *bytes = reinterpret_cast<const uint8_t *>(b);
  if (w.format == OCTAVO_CODES4) return each_of_codes4(bytes, w.k, w.group, use);
  each_of_codes8(bytes, w.k, w.group, use);
}

// Several rows of integers are bound by arithmetic, but their first tile would wait for memory if the
// tiles before it had not asked for its panel: a few lines with each stretch of kShared inner elements.
// (For float weights the same was measured to cost time: their panels take memory all the way.)
struct Ahead {
  const char *at;
  int64_t lines;  // a stretch

  OCTAVO_INLINE void fetch() {
    for (int64_t i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

template <int MR>
OCTAVO_INLINE void int_tile(const Activation *a, int64_t lda, const int8_t *b, int64_t steps,
                            const int32_t *sums, vi (&acc)[MR][kVectors]) {
  // What the weights' offset adds is taken off where sums begin: later it would be a pass over them.
  vi sum[MR][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
    const vi start = splat_i(-kOffset * sums[m]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[m][j] = start;
  }
  if constexpr (matrix::ints(MR)) {
    matrix::int_tile<MR>(a, lda, b, steps, acc);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) acc[m][j] = acc[m][j] + sum[m][j];
    return;
  }
  // Unrolled whole for the usual 64 inputs it would take registers from the sums around it.
#pragma GCC unroll 1
  for (int64_t i = 0; i < steps; ++i, a += kStep, b += kPanel * kStep) {
    if constexpr (MR == 1)
      for (int j = 0; j < kPanel * kStep; j += 64) prefetch(b + j);
    vi w[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) w[j] = load_codes(b + j * W * kStep);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const vi x = splat_i(load_step(a + m * lda));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[m][j] = dot(sum[m][j], w[j], x);
    }
  }
  give(sum, acc);
}

// out = rows [row, row + MR) by a panel of int8 codes, without the columns' scales. On its own, and not
// part of what calls it: GCC keeps addresses that are wanted later in vector registers, of which the sums
// leave none.
template <int MR>
__attribute__((noinline)) void int_panel(const Quantized &q, int64_t row, const int8_t *b,
                                         int64_t inner, Ahead ahead, vf (&out)[MR][kVectors]) {
  const int64_t lda = q.stride, next = q.rows;
  const Activation *a = q.codes + row * lda;
  const float *scales = q.scales + row;
  const int32_t *sums = q.sums + row;
  vf acc[MR][kVectors] = {};
  for (; inner > 0; inner -= kShared, a += kShared, b += kShared * kPanel, scales += next, sums += next) {
    ahead.fetch();
    vi sum[MR][kVectors];
    int_tile<MR>(a, lda, b, (inner < kShared ? inner : kShared) / kCodes, sums, sum);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const vf x = splat(scales[m]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        acc[m][j] = fma(__builtin_convertvector(sum[m][j], vf), x, acc[m][j]);
    }
  }
  give(acc, out);
}
template <int MR>
OCTAVO_INLINE void group_tile(const Quantized &q, int64_t row, const uint8_t *b, int64_t groups,
                              Ahead ahead, vf (&acc)[MR][kVectors]) {
  if constexpr (matrix::groups(MR)) return matrix::group_tile<MR>(q, row, b, groups, acc);
  const int64_t lda = q.stride;
  const Activation *a = q.codes + row * lda;
  for (int64_t g = 0; g < groups; ++g) {
    if (g * q.group % kShared == 0) ahead.fetch();
    vi sum[MR][kVectors] = {};
    for (int64_t i = 0; i < q.group; i += 8, a += 8, b += kPanel * 4) {
      if constexpr (MR == 1)
        for (int j = 0; j < kPanel * 4; j += 64) prefetch(b + j);
      vu codes[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) codes[j] = (vu)*reinterpret_cast<const vi_mem *>(b + j * W * 4);
#pragma GCC unroll 4
      for (int part = 0; part < 8 / kStep; ++part) {
        const vu mask = splat_u(kStep == 4 ? 0x0f0f0f0fu : 0x000f000fu);
        const int shift = kStep == 4 ? part * 4 : (part % 2) * 8 + part / 2 * 4;
        vi w[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) w[j] = (vi)((codes[j] >> shift) & mask);
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) {
          const vi x = splat_i(load_step(a + m * lda + part * kStep));
#pragma GCC unroll 4
          for (int j = 0; j < kVectors; ++j) sum[m][j] = dot(sum[m][j], w[j], x);
        }
      }
    }
    add_group<MR>(q, row, g, reinterpret_cast<const f16 *>(b), sum, acc);
    b += 4 * kPanel;
  }
}

// --- from accumulators to the result ---

OCTAVO_INLINE void put(float *to, vf y, int64_t n, bool add) {
  if (n >= W) return store(to, add ? load(to) + y : y);
  if (n > 0) store_part(to, add ? load_part(to, int(n)) + y : y, int(n));
}
OCTAVO_INLINE vf bias_at(const float *bias, int64_t at, int64_t n) {
  return n >= W ? load(bias + at) : n > 0 ? load_part(bias + at, int(n)) : vf{};
}

template <int MR>
OCTAVO_INLINE void finish(const octavo_weight &w, const Epilogue &e, int64_t panel, int64_t row,
                          vf (&acc)[MR][kVectors]) {
  const int64_t half = w.n / 2;
  constexpr int pairs = kVectors / 2;
  const int64_t first = panel * (w.gated ? kPanel / 2 : kPanel);
  if (e.bias) {
    for (int j = 0; j < kVectors; ++j) {
      const int64_t at = w.gated ? first + (j % pairs) * W : first + j * W;
      const int64_t n = (w.gated ? half : w.n) - at;
      const vf b = bias_at(e.bias + (w.gated && j >= pairs ? half : 0), at, n);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) acc[m][j] = acc[m][j] + b;
    }
  }
  for (int m = 0; m < MR; ++m) {
    float *out = e.out + (row + m) * e.stride;
    if (!w.gated) {
      for (int j = 0; j < kVectors; ++j)
        put(out + first + j * W, acc[m][j], w.n - first - j * W, e.add);
      continue;
    }
    for (int j = 0; j < pairs; ++j) {
      const int64_t at = first + j * W;
      if (e.act < 0) {
        put(out + at, acc[m][j], half - at, e.add);
        put(out + half + at, acc[m][j + pairs], half - at, e.add);
      } else {
        put(out + at, activate(e.act, acc[m][j]) * acc[m][j + pairs], half - at, e.add);
      }
    }
  }
}

struct Product {
  const octavo_weight &w;
  const float *x;
  int64_t x_stride;
  const Quantized *q;
  const Epilogue &e;
};

struct PanelTile {
  const Product &p;
  int64_t panel, row;
  const char *b;
  Ahead ahead;

  template <int MR, bool ASK>
  OCTAVO_INLINE void floats() const {
    const float *a = p.x + row * p.x_stride;
    vf acc[MR][kVectors];
    switch (p.w.format) {
      case OCTAVO_F32:
        float_tile<MR, ASK>(a, p.x_stride, reinterpret_cast<const float *>(b), p.w.k, acc);
        break;
      case OCTAVO_BF16:
        float_tile<MR, ASK>(a, p.x_stride, reinterpret_cast<const bf16 *>(b), p.w.k, acc);
        break;
      default:
        float_tile<MR, ASK>(a, p.x_stride, reinterpret_cast<const f16 *>(b), p.w.k, acc);
    }
    finish<MR>(p.w, p.e, panel, row, acc);
  }
  template <int MR, bool KEEP>
  OCTAVO_INLINE void codes(float *unpacked) const {
    const float *a = p.x + row * p.x_stride;
    const int64_t lda = p.x_stride;
    vf sum[MR][kVectors] = {}, acc[MR][kVectors];
    each_of_codes(p.w, b, [&](int64_t i, const vf(&w)[kVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        const vf x = splat(a[m * lda + i]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[m][j] = fma(x, w[j], sum[m][j]);
      }
      if constexpr (KEEP)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) store(unpacked + i * kPanel + j * W, w[j]);
    });
    give(sum, acc);
    finish<MR>(p.w, p.e, panel, row, acc);
  }
  template <int MR>
  OCTAVO_INLINE void ints() const {
    const int64_t inner = int8_inner(p.w.k);
    const float *scales = reinterpret_cast<const float *>(b + inner * kPanel);
    vf acc[MR][kVectors];
    int_panel<MR>(*p.q, row, reinterpret_cast<const int8_t *>(b), inner, ahead, acc);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const vf scale = load(scales + j * W);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) acc[m][j] = acc[m][j] * scale;
    }
    finish<MR>(p.w, p.e, panel, row, acc);
  }
  template <int MR>
  OCTAVO_INLINE void groups() const {
    vf acc[MR][kVectors] = {};
    group_tile<MR>(*p.q, row, reinterpret_cast<const uint8_t *>(b), p.q->groups, ahead, acc);
    finish<MR>(p.w, p.e, panel, row, acc);
  }
};
struct FirstFloatTile : PanelTile {
  template <int MR>
  __attribute__((noinline)) void operator()() const {
    floats<MR, MR == 1 || (MR > kUnaided)>();
  }
};
struct FloatTile : PanelTile {
  static constexpr int rows = kFloatRows;
  typedef FirstFloatTile First;
  template <int MR>
  __attribute__((noinline)) void operator()() const {
    floats<MR, false>();
  }
};
// Of codes: each is used as it comes, and kept unpacked for the rows that follow if there are some.
template <bool KEEP>
struct CodesTile : PanelTile {
  float *unpacked;
  template <int MR>
  __attribute__((noinline)) void operator()() const {
    codes<MR, KEEP>(unpacked);
  }
};
struct UnpackedTile : PanelTile {
  template <int MR>
  __attribute__((noinline)) void operator()() const {
    vf acc[MR][kVectors];
    float_tile<MR, false>(p.x + row * p.x_stride, p.x_stride, reinterpret_cast<const float *>(b), p.w.k, acc);
    finish<MR>(p.w, p.e, panel, row, acc);
  }
};
struct IntTile : PanelTile {
  static constexpr int rows = kIntRows;
  typedef IntTile First;
  template <int MR>
  __attribute__((noinline)) void operator()() const {
    ints<MR>();
  }
};
struct GroupTile : PanelTile {
  static constexpr int rows = kGroupRows;
  typedef GroupTile First;
  template <int MR>
  __attribute__((noinline)) void operator()() const {
    groups<MR>();
  }
};

// f(first row, how many, which tile of how many) for rows [row, end) in tiles of nearly equal height.
template <class F>
void in_tiles(int64_t row, int64_t end, int most, F &&f) {
  const int64_t tiles = (end - row + most - 1) / most;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t n = (end - row + (tiles - i) - 1) / (tiles - i);
    f(row, int(n), i, tiles);
    row += n;
  }
}

// Rows [row, end) of one panel.
template <class T>
void panel_rows(const Product &p, int64_t panel, int64_t row, int64_t end, int64_t bytes) {
  const char *b = static_cast<const char *>(p.w.data) + panel * bytes;
  const int64_t stretches = (p.w.k + kShared - 1) / kShared;
  const bool asks = is_integer(p.w) && end - row > 1 && panel + 1 < panels(p.w);
  in_tiles(row, end, T::rows, [&](int64_t at, int n, int64_t i, int64_t tiles) {
    const int64_t lines = asks ? (bytes / 64 + tiles * stretches - 1) / (tiles * stretches) : 0;
    const Ahead ahead = {b + bytes + i * stretches * lines * 64, lines};
    if (i == 0)
      with_rows<T::rows>(n, typename T::First{{p, panel, at, b, ahead}});
    else
      with_rows<T::rows>(n, T{{p, panel, at, b, ahead}});
  });
}
// The same of a panel of codes. unpacked: room for it in float32, or null where there is none.
void panel_rows_of_codes(const Product &p, int64_t panel, int64_t row, int64_t end, int64_t bytes, float *unpacked) {
  const char *b = static_cast<const char *>(p.w.data) + panel * bytes;
  if (!unpacked || end - row <= kCodesRows)
    return in_tiles(row, end, kCodesRows, [&](int64_t at, int n, int64_t, int64_t) {
      with_rows<kCodesRows>(n, CodesTile<false>{{p, panel, at, b, {}}, nullptr});
    });
  const int64_t tiles = (end - row + kFloatRows - 1) / kFloatRows, even = (end - row + tiles - 1) / tiles;
  const int64_t wanted = even > kCodesRows && tiles == 1 ? (even + 1) / 2 : even;
  const int first = wanted < kCodesRows ? int(wanted) : kCodesRows;
  with_rows<kCodesRows>(first, CodesTile<true>{{p, panel, row, b, {}}, unpacked});
  in_tiles(row + first, end, kFloatRows, [&](int64_t at, int n, int64_t, int64_t) {
    with_rows<kFloatRows>(n, UnpackedTile{{p, panel, at, reinterpret_cast<const char *>(unpacked), {}}});
  });
}

// f(slot, panel, row, end, a panel's bytes) for all panels, and all rows in blocks of at most `most`.
template <class F>
void over_panels(const octavo_weight &w, int64_t rows, int64_t most, F &&f) {
  const int64_t n = panels(w), bytes = panel_bytes(w);
  const int threads = octavo::max_threads();
  const int64_t blocks = (rows + most - 1) / most;
  int64_t grain = kPieceBytes / (bytes * (rows < 16 ? rows : 16)) + 1;
  if (is_integer(w) && grain < 8) grain = 8;
  const int64_t fair = n * blocks / (threads * 8);
  if (grain > fair) grain = fair > 0 ? fair : 1;
  parallel(n * blocks, grain, threads, [&](int slot, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(slot, i % n, rows * (i / n) / blocks, rows * (i / n + 1) / blocks, bytes);
  });
}
template <class T>
void run(const Product &p, int64_t rows) {
  over_panels(p.w, rows, kRowBlock, [&](int, int64_t panel, int64_t row, int64_t end, int64_t bytes) {
    panel_rows<T>(p, panel, row, end, bytes);
  });
}
void run_codes(const Product &p, int64_t rows) {
  const int64_t panel_size = p.w.k * kPanel;
  float *unpacked = nullptr;
  if (rows > kCodesRows)
    unpacked = static_cast<float *>(
        octavo::scratch(size_t(octavo::max_threads()) * size_t(panel_size) * sizeof(float)));
  over_panels(p.w, rows, kRowBlockOfCodes, [&](int slot, int64_t panel, int64_t row, int64_t end, int64_t bytes) {
    panel_rows_of_codes(p, panel, row, end, bytes, unpacked ? unpacked + slot * panel_size : nullptr);
  });
}

}  // namespace

void multiply(const octavo_weight &w, const float *x, int64_t x_stride, const Quantized *q,
              int64_t rows, const Epilogue &e) {
  if (rows <= 0) return;
  const Product p = {w, x, x_stride, q, e};
  if (w.format == OCTAVO_INT8) return run<IntTile>(p, rows);
  if (w.format == OCTAVO_INT4) return run<GroupTile>(p, rows);
  if (is_coded(w)) return run_codes(p, rows);
  run<FloatTile>(p, rows);
}

int linear(const octavo_weight *w, float *out, int64_t out_stride, const float *x,
           int64_t x_stride, int64_t rows, const float *bias) {
  if (!valid(*w)) return OCTAVO_BAD_ARGUMENT;
  if (rows <= 0) return OCTAVO_OK;
  octavo::Laps laps;
  Epilogue e = {out, out_stride};
  e.bias = bias;
  if (!is_integer(*w)) {
    multiply(*w, x, x_stride, nullptr, rows, e);
    laps(OCTAVO_LINEAR);
    return OCTAVO_OK;
  }
  void *memory = octavo::scratch(size_t(quantized_bytes(*w, rows)));
  if (!memory) return OCTAVO_NO_MEMORY;
  const Quantized q = quantized_at(*w, rows, memory);
  parallel(rows, 1 + 16384 / (w->k + 1), octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) quantize_row(x + i * x_stride, w->k, q, i);
  });
  laps(OCTAVO_QUANTIZE);
  multiply(*w, nullptr, 0, &q, rows, e);
  laps(OCTAVO_LINEAR);
  return OCTAVO_OK;
}

}  // namespace OCTAVO_NS
