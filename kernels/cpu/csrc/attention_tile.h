// What one thread does to one tile of attention: some rows against the positions they see.
//
// Online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) blocked over the KV positions as in
// FlashAttention (arXiv:2205.14135), with KV chunks merged as in Flash-Decoding.
//
// A row's bits do not depend on its company. Positions are cut at fixed absolute places (kTile,
// kChunk); every accumulator adds in order of position; a position that a row does not see adds an
// exact zero. So tiles, threads and batches only decide who computes a row, never how.
#pragma once
#include "kv_cache.h"

namespace OCTAVO_NS {
namespace {

constexpr int kTile = 128;   // positions per softmax update
constexpr int kChunk = 256;  // positions per partial result; the unit of work of a split tile
constexpr int kGroup = 16;   // positions that are neighbours in memory: divides the block size
constexpr int kGroups = kTile / kGroup;
constexpr int kRows = 48;  // rows (queries x heads of one KV head) a tile aims at
constexpr float kEmpty = -1e30f;  // running maximum before the first position
constexpr float kLog2e = 1.44269504f;

// Rows and vector columns of the register tiles: what 32 (AVX-512, NEON, VSX) or 16 registers hold.
#if defined(__AVX512F__) || defined(__aarch64__) || defined(__powerpc64__)
constexpr int kMR = 8;
#else
constexpr int kMR = 6;
#endif
constexpr int wide(int rows) { return rows <= 3 ? 4 : 2; }

// --- the two matrix products of a tile ---

// With few rows the cache is read once, block by scattered block, and memory is what limits: then
// each loop also asks for the line that it will need so many positions later at the same place.
constexpr bool prefetches(int rows) { return rows < kMR; }
constexpr int kAhead = 96;
template <class T>  // vectors per cache line, for a loop over vectors of one group of positions
constexpr int kLine = 16 / W;

// s[m, column] = sum_k q[m, k] K[k, column] for NR vector columns; columns[j] + k * ldk is row k.
template <int MR, int NR, class T>
void scores(const float *q, int64_t ldq, const T *const *columns, const T *const *next,
            int64_t ldk, int head_size, float *s) {
  vf acc[MR][NR] = {};
  const T *at[NR], *ahead[NR];
  for (int j = 0; j < NR; ++j) at[j] = columns[j], ahead[j] = next[j];
  for (int k = 0; k < head_size; ++k) {
    if constexpr (prefetches(MR))
      for (int j = 0; j < NR; j += kLine<T>) __builtin_prefetch(ahead[j] + k * ldk, 0, 2);
    vf b[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) b[j] = load(at[j] + k * ldk);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const vf a = splat(q[m * ldq + k]);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) acc[m][j] = fma(a, b[j], acc[m][j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) store(s + m * kTile + j * W, acc[m][j]);
}

// o[m, :] = o[m, :] * alpha[m] + sum_t p[m, t] V[t, :] for NR vector columns, begin <= t < end.
template <int MR, int NR, class T>
void weighted(const float *p, const T *const *groups, const T *const *next, int64_t ldv,
              int column, int begin, int end, const float *alpha, float *o, int64_t ldo) {
  vf acc[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j)
      acc[m][j] = load(o + m * ldo + column + j * W) * splat(alpha[m]);
  for (int t = begin; t < end;) {
    const int group = t / kGroup, stop = end < (group + 1) * kGroup ? end : (group + 1) * kGroup;
    const T *v = groups[group] + (t % kGroup) * ldv + column;
    const T *ahead = next[group] + (t % kGroup) * ldv + column;
    for (; t < stop; ++t, v += ldv, ahead += ldv) {
      if constexpr (prefetches(MR))
        for (int j = 0; j < NR; j += 64 / (W * int(sizeof(T)))) __builtin_prefetch(ahead + j * W, 0, 2);
      vf b[NR];
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) b[j] = load(v + j * W);
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m) {
        const vf a = splat(p[m * kTile + t]);
#pragma GCC unroll 4
        for (int j = 0; j < NR; ++j) acc[m][j] = fma(a, b[j], acc[m][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) store(o + m * ldo + column + j * W, acc[m][j]);
}

template <class T>
struct Columns {  // of one tile of positions, as the cache has them or in float32
  const T *k[kTile / W], *next_k[kTile / W];  // next_*: what lies kAhead positions on, to prefetch
  const T *v[kGroups], *next_v[kGroups];
  int64_t ldk, ldv;
};

template <int MR, class T>
void score_rows(const float *q, const Columns<T> &c, int head_size, int begin, int end, float *s) {
  constexpr int NR = wide(MR);
  for (int j = begin / W / NR * NR; j * W < end; j += NR)
    scores<MR, NR>(q, head_size, c.k + j, c.next_k + j, c.ldk, head_size, s + j * W);
}

template <int MR, class T>
void weigh_rows(const float *p, const Columns<T> &c, int width, int begin, int end,
                const float *alpha, float *o) {
  constexpr int NR = wide(MR);
  int j = 0;
  for (; j + NR * W <= width; j += NR * W)
    weighted<MR, NR>(p, c.v, c.next_v, c.ldv, j, begin, end, alpha, o, width);
  for (; j < width; j += W) weighted<MR, 1>(p, c.v, c.next_v, c.ldv, j, begin, end, alpha, o, width);
}

template <int MR, class F>
OCTAVO_INLINE void last_rows(int rows, F &&f) {
  if constexpr (MR > 0) {
    if (rows == MR) return f.template operator()<MR>();
    last_rows<MR - 1>(rows, f);
  }
}

template <class T>
struct Score {
  const float *q;
  const Columns<T> &c;
  int head_size, begin, end;
  float *s;
  template <int MR>
  void operator()() const {
    score_rows<MR>(q, c, head_size, begin, end, s);
  }
};
template <class T>
struct Weigh {
  const float *p;
  const Columns<T> &c;
  int width, begin, end;
  const float *alpha;
  float *o;
  template <int MR>
  void operator()() const {
    weigh_rows<MR>(p, c, width, begin, end, alpha, o);
  }
};

// --- the problem, its tiles, and the memory of one thread ---

struct Problem {
  const octavo_attention_step &s;
  const octavo_attention_layer &l;
  void *out;
  const void *q, *k_cache, *v_cache;
  int heads;  // query heads per KV head
  int width;  // head_size_v rounded up to whole vectors
  float q_factor, cap;
  int64_t k_record, v_record;  // elements of a block of one head, scales included
  int64_t k_block, v_block;    // elements from block to block
};

struct Tile {  // some queries of one sequence, all heads of one KV head
  int32_t sequence, kv_head, first, queries;  // first: index of the first query in its sequence
  int32_t begin, end;                         // positions that at least one of its rows sees
  int32_t split;                              // where its partial results wait, or -1
};
struct After {  // what is read behind a tile's last position
  const Tile *tile;
  int32_t begin;
};
struct Rows {  // per row: running maximum, denominator, weighted sum [rows, width]
  float *m, *l, *o;
};

struct Worker {
  float *q, *s, *alpha, *k, *v;
  float *k_scales, *v_scales;  // int8: [kTile]
  Rows now, total;
};

int32_t min(int32_t a, int32_t b) { return a < b ? a : b; }
int32_t max(int32_t a, int32_t b) { return a > b ? a : b; }

Rows rows_at(float *memory, int rows) {
  return {memory, memory + rows, memory + 2 * rows + (-2 * rows & 15)};
}
int64_t rows_floats(int rows, int width) {
  return 2 * rows + (-2 * rows & 15) + int64_t(rows) * width;
}

int64_t worker_floats(const Problem &p, int rows) {
  return int64_t(rows) * p.s.head_size + int64_t(rows) * kTile + rows + (-rows & 15) +
         2 * ((rows_floats(rows, p.width) + 15) & ~15) +
         int64_t(kTile) * (p.s.head_size + p.width + 2);
}
Worker worker_at(const Problem &p, float *memory, int rows) {
  Worker w;
  auto take = [&](int64_t n) {
    float *at = memory;
    memory += (n + 15) & ~15;
    return at;
  };
  w.q = take(int64_t(rows) * p.s.head_size);
  w.s = take(int64_t(rows) * kTile);
  w.alpha = take(rows);
  w.now = rows_at(take(rows_floats(rows, p.width)), rows);
  w.total = rows_at(take(rows_floats(rows, p.width)), rows);
  w.k = take(int64_t(kTile) * p.s.head_size);
  w.v = take(int64_t(kTile) * p.width);
  w.k_scales = take(kTile);
  w.v_scales = take(kTile);
  return w;
}

// --- one tile ---

void clear(const Rows &r, int rows, int width) {
  for (int i = 0; i < rows; ++i) r.m[i] = kEmpty, r.l[i] = 0;
  for (int64_t i = 0; i < int64_t(rows) * width; i += W) store(r.o + i, vf{});
}

float exp2_one(float x) { return exp2_nonpositive(splat(x))[0]; }

// into += from, the partial result of the next chunk.
void merge(const Rows &into, const Rows &from, int rows, int width) {
  for (int r = 0; r < rows; ++r) {
    const float m = from.m[r] > into.m[r] ? from.m[r] : into.m[r];
    const vf a = exp2_nonpositive(splat(into.m[r] - m)), b = exp2_nonpositive(splat(from.m[r] - m));
    float *o = into.o + int64_t(r) * width;
    const float *f = from.o + int64_t(r) * width;
    for (int i = 0; i < width; i += W) store(o + i, fma(load(f + i), b, load(o + i) * a));
    into.l[r] = fma(splat(from.l[r]), b, splat(into.l[r]) * a)[0];
    into.m[r] = m;
  }
}

template <class X>
void load_queries(const Problem &p, const Tile &t, float *q) {
  const int d = p.s.head_size;
  const int64_t row0 = p.s.query_start[t.sequence] + t.first;
  const vf factor = splat(p.q_factor);
  for (int i = 0; i < t.queries; ++i)
    for (int g = 0; g < p.heads; ++g, q += d) {
      const X *from = static_cast<const X *>(p.q) + (row0 + i) * p.s.q_row_stride +
                      int64_t(t.kv_head * p.heads + g) * d;
      int j = 0;
      for (; j + W <= d; j += W) store(q + j, load(from + j) * factor);
      if (j < d) store_part(q + j, load_part(from + j, d - j) * factor, d - j);
    }
}

template <class X>
void store_rows(const Problem &p, const Tile &t, const Rows &r) {
  const int dv = p.s.head_size_v;
  const int64_t row0 = p.s.query_start[t.sequence] + t.first;
  for (int i = 0, row = 0; i < t.queries; ++i)
    for (int g = 0; g < p.heads; ++g, ++row) {
      const int head = t.kv_head * p.heads + g;
      float l = r.l[row], factor = 1;
      if (p.l.sinks) {
        const float sink = p.l.sinks[head] * kLog2e, m = r.m[row];
        const float top = sink > m ? sink : m;
        factor = exp2_one(m - top);
        l = l * factor + exp2_one(sink - top);
      }
      const vf scale = splat(l == 0 ? 0 : factor / l);
      const float *o = r.o + int64_t(row) * p.width;
      X *to = static_cast<X *>(p.out) + (row0 + i) * p.s.out_row_stride + int64_t(head) * dv;
      int j = 0;
      for (; j + W <= dv; j += W) store(to + j, load(o + j) * scale);
      if (j < dv) store_part(to + j, load(o + j) * scale, dv - j);
    }
}

// K and V of a group of positions that begins at `position`, and their scales if there are any.
template <class C>
struct Place {
  const C *k, *v;
  const float *k_scales, *v_scales;
};
template <class C>
OCTAVO_INLINE Place<C> place(const Problem &p, const Tile &t, int position) {
  const octavo_attention_step &s = p.s;
  const int32_t *table = s.block_tables + t.sequence * s.table_stride;
  const int64_t block = table[position / s.block_size];
  const int offset = position % s.block_size;
  const C *k = static_cast<const C *>(p.k_cache) + block * p.k_block + t.kv_head * p.k_record;
  const C *v = static_cast<const C *>(p.v_cache) + block * p.v_block + t.kv_head * p.v_record;
  Place<C> r = {k + offset, v + int64_t(offset) * s.head_size_v, nullptr, nullptr};
  if constexpr (has_scales<C>) {
    r.k_scales = reinterpret_cast<const float *>(k + s.head_size * s.block_size) + offset;
    r.v_scales = reinterpret_cast<const float *>(v + s.head_size_v * s.block_size) + offset;
  }
  return r;
}

// A group's keys to float32 [head_size, kTile] and values to float32 [rows, width].
template <class C>
void convert_keys(const Problem &p, const C *k, const C *next, float *to) {
  const int64_t bs = p.s.block_size;
  for (int i = 0; i < p.s.head_size; ++i) {
    __builtin_prefetch(next + i * bs, 0, 2);
    for (int j = 0; j < kGroup; j += W) store(to + i * kTile + j, load(k + i * bs + j));
  }
}
template <class C>
void convert_values(const Problem &p, const C *v, const C *next, int rows, float *to) {
  const int dv = p.s.head_size_v;
  for (int r = 0; r < rows; ++r, v += dv, next += dv, to += p.width) {
    int j = 0;
    for (; j + W <= dv; j += W) {
      __builtin_prefetch(next + j, 0, 2);
      store(to + j, load(v + j));
    }
    if (j < dv) store(to + j, load_part(v + j, dv - j));
  }
}

// Where the positions [begin, end) of the tile that starts at t0 lie. With T = C the products read the
// cache itself and widen as they go; with T = float a cache of another type, or V rows that are not
// whole vectors, are converted first, which pays when many rows read them. Columns outside point at
// some valid memory.
template <class C, class T>
void find_columns(const Problem &p, const Tile &t, const After &after, int t0, int begin, int end,
                  const Worker &w, Columns<T> &c) {
  constexpr bool direct = sizeof(C) == sizeof(T);
  constexpr int per_group = kGroup / W;
  const bool direct_v = direct && p.s.head_size_v == p.width;
  c.ldk = direct ? p.s.block_size : kTile;
  c.ldv = direct_v ? p.s.head_size_v : p.width;
  const int first = begin / kGroup, last = (end + kGroup - 1) / kGroup;
  for (int g = first; g < last; ++g) {
    const int position = t0 + g * kGroup;
    const Place<C> here = place<C>(p, t, position);
    const int ahead = position + kAhead, behind = ahead - t.end + after.begin;
    const Place<C> next = ahead < t.end              ? place<C>(p, t, ahead)
                          : behind < after.tile->end ? place<C>(p, *after.tile, behind / kGroup * kGroup)
                                                     : here;
    const T *k, *next_k, *v, *next_v;
    if constexpr (direct) {
      k = here.k, next_k = next.k;
    } else {
      k = next_k = w.k + g * kGroup;
      convert_keys(p, here.k, next.k, w.k + g * kGroup);
    }
    if constexpr (direct) v = here.v, next_v = next.v;
    if constexpr (sizeof(T) == sizeof(float))
      if (!direct_v) {
        v = next_v = w.v + int64_t(g) * kGroup * p.width;
        convert_values(p, here.v, next.v, min(kGroup, end - g * kGroup),
                       w.v + int64_t(g) * kGroup * p.width);
      }
    c.v[g] = v;
    c.next_v[g] = next_v;
    if constexpr (has_scales<C>)
      for (int j = 0; j < kGroup; j += W) {
        store(w.k_scales + g * kGroup + j, load(here.k_scales + j));
        store(w.v_scales + g * kGroup + j, load(here.v_scales + j));
      }
    for (int j = 0; j < per_group; ++j) {
      c.k[g * per_group + j] = k + j * W;
      c.next_k[g * per_group + j] = next_k + j * W;
    }
  }
  for (int j = 0; j < kTile / W; ++j)
    if (j < first * per_group || j >= last * per_group)
      c.k[j] = c.next_k[j] = c.k[first * per_group];
}

// Scores to probabilities for one row that sees [lo, hi) of the tile; others in [begin, end) get 0.
// An int8 cache's scales join here: a key's onto its score, a value's onto its weight.
template <bool SCALED>
void softmax_row(const Problem &p, const Worker &w, float *s, int begin, int end, int lo, int hi,
                 float &m, float &l, float &alpha) {
  const int from = begin / W * W;
  if (lo >= hi) {
    for (int c = from; c < end; c += W) store(s + c, vf{});
    alpha = 1;
    return;
  }
  const vf never = splat(-__builtin_inff());
  vf top = never;
  for (int c = from; c < end; c += W) {
    vf v = load(s + c);
    if constexpr (SCALED) v = v * load(w.k_scales + c);
    if (p.cap != 0) v = p.cap * tanh(v);
    if (c < lo || c + W > hi) {
      const vi at = lanes() + c;
      v = ((at >= lo) & (at < hi)) ? v : never;
    }
    if (SCALED || p.cap != 0 || c < lo || c + W > hi) store(s + c, v);
    top = vmax(top, v);
  }
  const float here = hmax(top), now = here > m ? here : m;
  const vf shift = splat(now);
  vf sum = {};
  for (int c = from; c < end; c += W) {
    const vf e = exp2_nonpositive(load(s + c) - shift);
    if constexpr (SCALED)
      store(s + c, e * load(w.v_scales + c));
    else
      store(s + c, e);
    sum = sum + e;
  }
  alpha = exp2_one(m - now);
  l = l * alpha + hsum(sum);
  m = now;
}

// Which positions of the tile at t0 a row sees: those of its tile's own queries, or (shared) all.
struct Own {
  const Problem &p;
  const Tile &t;
  int position;  // of the first query
  Own(const Problem &problem, const Tile &tile) : p(problem), t(tile) {
    const int32_t *start = p.s.query_start + t.sequence;
    position = p.s.context_lens[t.sequence] - (start[1] - start[0]) + t.first;
  }
  void range(int row, int t0, int begin, int end, int &lo, int &hi) const {
    const int after = position + row / p.heads + 1 - t0;
    hi = min(after, end);
    lo = p.l.window ? max(after - p.l.window, begin) : begin;
  }
};
struct All {
  void range(int, int, int begin, int end, int &lo, int &hi) const { lo = begin, hi = end; }
};

// Positions [t0 + begin, t0 + end), read through the block table of t, for rows of queries.
template <class C, class T, class Seen>
void attend(const Problem &p, const Tile &t, const After &after, const Seen &seen, int rows,
            const Worker &w, int t0, int begin, int end) {
  Columns<T> c;
  find_columns<C>(p, t, after, t0, begin, end, w, c);
  const int d = p.s.head_size;
  int r = 0;
  for (; r + kMR <= rows; r += kMR)
    score_rows<kMR>(w.q + r * d, c, d, begin, end, w.s + r * kTile);
  last_rows<kMR - 1>(rows - r, Score<T>{w.q + r * d, c, d, begin, end, w.s + r * kTile});
  for (r = 0; r < rows; ++r) {
    int lo, hi;
    seen.range(r, t0, begin, end, lo, hi);
    softmax_row<has_scales<C>>(p, w, w.s + r * kTile, begin, end, lo, hi, w.now.m[r], w.now.l[r],
                               w.alpha[r]);
  }
  for (r = 0; r + kMR <= rows; r += kMR)
    weigh_rows<kMR>(w.s + r * kTile, c, p.width, begin, end, w.alpha + r,
                    w.now.o + int64_t(r) * p.width);
  last_rows<kMR - 1>(rows - r, Weigh<T>{w.s + r * kTile, c, p.width, begin, end, w.alpha + r,
                                        w.now.o + int64_t(r) * p.width});
}

// Chunk `index` of the positions [from, to) that t sees, into w.now.
template <class C, class Seen>
void chunk(const Problem &p, const Tile &t, const After &after, const Seen &seen, int rows,
           const Worker &w, int index) {
  clear(w.now, rows, p.width);
  const int from = max(t.begin, index * kChunk), to = min(t.end, (index + 1) * kChunk);
  for (int t0 = from / kTile * kTile; t0 < to; t0 += kTile)
    if (rows < kMR && p.s.head_size_v == p.width)
      attend<C, C>(p, t, after, seen, rows, w, t0, max(from - t0, 0), min(to - t0, kTile));
    else
      attend<C, float>(p, t, after, seen, rows, w, t0, max(from - t0, 0), min(to - t0, kTile));
}

int first_chunk(const Tile &t) { return t.begin / kChunk; }
int chunks(const Tile &t) { return (t.end + kChunk - 1) / kChunk - first_chunk(t); }

}  // namespace
}  // namespace OCTAVO_NS
