// Attention over the paged KV cache: one entry for prefill, decode and mixed steps.
//
// Online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) blocked over the KV positions as in
// FlashAttention (arXiv:2205.14135), with KV chunks merged as in Flash-Decoding.
//
// A row's bits do not depend on its company. Positions are cut at fixed absolute places (kTile,
// kChunk); every accumulator adds in order of position; a position that a row does not see adds an
// exact zero. So tiles, threads and batches only decide who computes a row, never how.
#include "vec.h"

namespace OCTAVO_NS {
namespace {

constexpr int kTile = 64;    // positions per softmax update
constexpr int kChunk = 512;  // positions per partial result; the unit of work of a split tile
constexpr int kGroup = 16;   // positions that are neighbours in memory: divides the block size
constexpr int kGroups = kTile / kGroup;
constexpr int kRows = 48;  // rows (queries x heads of one KV head) a tile aims at
constexpr float kEmpty = -1e30f;  // running maximum before the first position
constexpr float kLog2e = 1.44269504f;
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds below which the caller works alone
constexpr int64_t kPartialBytes = 64 << 20;

// Rows and vector columns of the register tiles: what 32 (AVX-512, NEON, VSX) or 16 registers hold.
#if defined(__AVX512F__) || defined(__aarch64__) || defined(__powerpc64__)
constexpr int kMR = 8;
#else
constexpr int kMR = 6;
#endif
constexpr int wide(int rows) { return rows <= 3 ? 4 : 2; }

// --- the two matrix products of a tile ---

// With few rows the cache is read once, block by scattered block, and memory is what limits: then
// each loop also asks for the line that the next tile of positions will need at the same place.
constexpr bool prefetches(int rows) { return rows < kMR; }
constexpr int kLine = 16 / W;  // vectors per cache line

// s[m, column] = sum_k q[m, k] K[k, column] for NR vector columns; columns[j] + k * ldk is row k.
template <int MR, int NR>
void scores(const float *q, int64_t ldq, const float *const *columns, const float *const *next,
            int64_t ldk, int head_size, float *s) {
  vf acc[MR][NR] = {};
  const float *at[NR], *ahead[NR];
  for (int j = 0; j < NR; ++j) at[j] = columns[j], ahead[j] = next[j];
  for (int k = 0; k < head_size; ++k) {
    if constexpr (prefetches(MR))
      for (int j = 0; j < NR; j += kLine) __builtin_prefetch(ahead[j] + k * ldk, 0, 2);
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
template <int MR, int NR>
void weighted(const float *p, const float *const *groups, const float *const *next, int64_t ldv,
              int column, int begin, int end, const float *alpha, float *o, int64_t ldo) {
  vf acc[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j)
      acc[m][j] = load(o + m * ldo + column + j * W) * splat(alpha[m]);
  for (int t = begin; t < end;) {
    const int group = t / kGroup, stop = end < (group + 1) * kGroup ? end : (group + 1) * kGroup;
    const float *v = groups[group] + (t % kGroup) * ldv + column;
    const float *ahead = next[group] + (t % kGroup) * ldv + column;
    for (; t < stop; ++t, v += ldv, ahead += ldv) {
      if constexpr (prefetches(MR))
        for (int j = 0; j < NR; j += kLine) __builtin_prefetch(ahead + j * W, 0, 2);
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

struct Columns {  // of one tile of positions, in float32
  const float *k[kTile / W], *next_k[kTile / W];  // next_*: of the tile after it, to prefetch
  const float *v[kGroups], *next_v[kGroups];
  int64_t ldk, ldv;
};

template <int MR>
void score_rows(const float *q, const Columns &c, int head_size, int begin, int end, float *s) {
  constexpr int NR = wide(MR);
  for (int j = begin / W / NR * NR; j * W < end; j += NR)
    scores<MR, NR>(q, head_size, c.k + j, c.next_k + j, c.ldk, head_size, s + j * W);
}

template <int MR>
void weigh_rows(const float *p, const Columns &c, int width, int begin, int end,
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

struct Score {
  const float *q;
  const Columns &c;
  int head_size, begin, end;
  float *s;
  template <int MR>
  void operator()() const {
    score_rows<MR>(q, c, head_size, begin, end, s);
  }
};
struct Weigh {
  const float *p;
  const Columns &c;
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
};

struct Tile {  // some queries of one sequence, all heads of one KV head
  int32_t sequence, kv_head, first, queries;  // first: index of the first query in its sequence
  int32_t begin, end;                         // positions that at least one of its rows sees
  int32_t split;                              // index into Splits, or -1
};
struct Split {  // a tile whose chunks are separate items; partial results wait here
  float *partial;
  int32_t left;  // chunks not done yet; who brings it to 0 merges
};
struct Item {
  int32_t tile, chunk;  // chunk -1: the whole tile
  int64_t cost;
};

struct Rows {  // per row: running maximum, denominator, weighted sum [rows, width]
  float *m, *l, *o;
};

struct Worker {
  float *q, *s, *alpha, *k, *v;
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
         2 * ((rows_floats(rows, p.width) + 15) & ~15) + int64_t(kTile) * (p.s.head_size + p.width);
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

// K and V of a group of positions that begins at `position`.
template <class C>
struct Place {
  const C *k, *v;
};
template <class C>
OCTAVO_INLINE Place<C> place(const Problem &p, const Tile &t, int position) {
  const octavo_attention_step &s = p.s;
  const int32_t *table = s.block_tables + t.sequence * s.table_stride;
  const int64_t head = int64_t(table[position / s.block_size]) * s.kv_heads + t.kv_head;
  const int offset = position % s.block_size;
  return {static_cast<const C *>(p.k_cache) + head * s.head_size * s.block_size + offset,
          static_cast<const C *>(p.v_cache) + (head * s.block_size + offset) * s.head_size_v};
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

// Where the positions [begin, end) of the tile that starts at t0 lie; converted when the cache is
// not float32 or a V row is not whole vectors. Columns outside point at some valid memory.
template <class C>
void find_columns(const Problem &p, const Tile &t, int t0, int begin, int end, const Worker &w,
                  Columns &c) {
  constexpr bool is_float = sizeof(C) == sizeof(float);
  constexpr int per_group = kGroup / W;
  const bool direct_v = is_float && p.s.head_size_v == p.width;
  c.ldk = is_float ? p.s.block_size : kTile;
  c.ldv = direct_v ? p.s.head_size_v : p.width;
  const int first = begin / kGroup, last = (end + kGroup - 1) / kGroup;
  for (int g = first; g < last; ++g) {
    const int position = t0 + g * kGroup;
    const Place<C> here = place<C>(p, t, position);
    const Place<C> next =
        position + kTile < t.end ? place<C>(p, t, position + kTile) : here;
    const float *k = w.k + g * kGroup, *next_k = k;
    const float *v = w.v + int64_t(g) * kGroup * p.width, *next_v = v;
    if constexpr (is_float)
      k = here.k, next_k = next.k;
    else
      convert_keys(p, here.k, next.k, w.k + g * kGroup);
    if constexpr (is_float)
      if (direct_v) v = here.v, next_v = next.v;
    if (!direct_v)
      convert_values(p, here.v, next.v, min(kGroup, end - g * kGroup),
                     w.v + int64_t(g) * kGroup * p.width);
    c.v[g] = v;
    c.next_v[g] = next_v;
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
void softmax_row(const Problem &p, float *s, int begin, int end, int lo, int hi, float &m,
                 float &l, float &alpha) {
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
    if (p.cap != 0) v = p.cap * tanh(v);
    if (c < lo || c + W > hi) {
      const vi at = lanes() + c;
      v = ((at >= lo) & (at < hi)) ? v : never;
    }
    if (p.cap != 0 || c < lo || c + W > hi) store(s + c, v);
    top = vmax(top, v);
  }
  const float here = hmax(top), now = here > m ? here : m;
  const vf shift = splat(now);
  vf sum = {};
  for (int c = from; c < end; c += W) {
    const vf e = exp2_nonpositive(load(s + c) - shift);
    store(s + c, e);
    sum = sum + e;
  }
  alpha = exp2_one(m - now);
  l = l * alpha + hsum(sum);
  m = now;
}

// Positions [t0 + begin, t0 + end) for all rows of a tile.
template <class C>
void attend(const Problem &p, const Tile &t, const Worker &w, int t0, int begin, int end) {
  Columns c;
  find_columns<C>(p, t, t0, begin, end, w, c);
  const int d = p.s.head_size, rows = t.queries * p.heads;
  int r = 0;
  for (; r + kMR <= rows; r += kMR)
    score_rows<kMR>(w.q + r * d, c, d, begin, end, w.s + r * kTile);
  last_rows<kMR - 1>(rows - r, Score{w.q + r * d, c, d, begin, end, w.s + r * kTile});

  const int32_t *start = p.s.query_start + t.sequence;
  const int position = p.s.context_lens[t.sequence] - (start[1] - start[0]) + t.first;
  for (int i = 0, row = 0; i < t.queries; ++i) {
    const int hi = min(position + i + 1 - t0, end);
    const int lo = p.l.window ? max(position + i + 1 - p.l.window - t0, begin) : begin;
    for (int g = 0; g < p.heads; ++g, ++row)
      softmax_row(p, w.s + row * kTile, begin, end, lo, hi, w.now.m[row], w.now.l[row],
                  w.alpha[row]);
  }
  for (r = 0; r + kMR <= rows; r += kMR)
    weigh_rows<kMR>(w.s + r * kTile, c, p.width, begin, end, w.alpha + r,
                    w.now.o + int64_t(r) * p.width);
  last_rows<kMR - 1>(rows - r, Weigh{w.s + r * kTile, c, p.width, begin, end, w.alpha + r,
                                     w.now.o + int64_t(r) * p.width});
}

template <class C>
void chunk(const Problem &p, const Tile &t, const Worker &w, int index) {
  clear(w.now, t.queries * p.heads, p.width);
  const int from = max(t.begin, index * kChunk), to = min(t.end, (index + 1) * kChunk);
  for (int t0 = from / kTile * kTile; t0 < to; t0 += kTile)
    attend<C>(p, t, w, t0, max(from - t0, 0), min(to - t0, kTile));
}

int first_chunk(const Tile &t) { return t.begin / kChunk; }
int chunks(const Tile &t) { return (t.end + kChunk - 1) / kChunk - first_chunk(t); }

template <class X, class C>
void run_item(const Problem &p, const Tile &t, Split *splits, const Item &item, const Worker &w,
              int64_t partial_floats) {
  const int rows = t.queries * p.heads, n = chunks(t), first = first_chunk(t);
  load_queries<X>(p, t, w.q);
  if (item.chunk < 0) {
    for (int i = 0; i < n; ++i) {
      chunk<C>(p, t, w, first + i);
      if (n == 1) return store_rows<X>(p, t, w.now);  // what a merge into nothing would give
      if (i == 0) clear(w.total, rows, p.width);
      merge(w.total, w.now, rows, p.width);
    }
    return store_rows<X>(p, t, w.total);
  }
  Split &split = splits[t.split];
  Worker mine = w;
  mine.now = rows_at(split.partial + (item.chunk - first) * partial_floats, rows);
  chunk<C>(p, t, mine, item.chunk);
  if (__atomic_sub_fetch(&split.left, 1, __ATOMIC_ACQ_REL)) return;
  clear(w.total, rows, p.width);
  for (int i = 0; i < n; ++i)
    merge(w.total, rows_at(split.partial + i * partial_floats, rows), rows, p.width);
  store_rows<X>(p, t, w.total);
}

// --- the list of work ---

struct Plan {
  Tile *tiles;
  Split *splits;
  Item *items;
  float *memory;  // partial results, then one worker per thread
  int64_t partial_floats, worker_floats;
  int tiles_n = 0, splits_n = 0, items_n = 0, rows = 0, threads = 1;
};

// Multiply-adds of a tile; reading K and V once counts as a few rows' worth.
int64_t cost(const Problem &p, const Tile &t, int positions) {
  return int64_t(t.queries * p.heads + 4) * positions * (p.s.head_size + p.s.head_size_v);
}

template <class F>
void each_tile(const Problem &p, int per_tile, F &&f) {
  for (int s = 0; s < p.s.sequences; ++s) {
    const int n = p.s.query_start[s + 1] - p.s.query_start[s], context = p.s.context_lens[s];
    for (int first = 0; first < n; first += per_tile) {
      const int queries = min(per_tile, n - first), end = context - n + first + queries;
      const int begin = p.l.window ? max(0, context - n + first + 1 - p.l.window) : 0;
      for (int h = 0; h < p.s.kv_heads; ++h) f(Tile{s, h, first, queries, begin, end, -1});
    }
  }
}

// Longest first, by a counting sort over 64 classes of cost: the tail of the list is what evens out
// the threads, so its pieces should be small.
void sort_items(const Item *in, Item *out, int n) {
  int64_t top = 1;
  for (int i = 0; i < n; ++i) top = in[i].cost > top ? in[i].cost : top;
  int at[65] = {};
  auto key = [&](const Item &i) { return 63 - int(i.cost * 63 / top); };
  for (int i = 0; i < n; ++i) ++at[key(in[i]) + 1];
  for (int k = 0; k < 64; ++k) at[k + 1] += at[k];
  for (int i = 0; i < n; ++i) out[at[key(in[i])]++] = in[i];
}

bool make_plan(const Problem &p, Plan &plan) {
  const int per_tile = max(1, kRows / p.heads);
  int64_t total = 0, tiles = 0, items = 0;
  int longest = 0;
  each_tile(p, per_tile, [&](const Tile &t) {
    total += cost(p, t, t.end - t.begin);
    ++tiles;
    longest = max(longest, t.queries);
  });
  plan.rows = longest * p.heads;
  plan.threads = total < kSerialWork ? 1 : octavo::max_threads();
  plan.partial_floats = (rows_floats(plan.rows, p.width) + 15) & ~15;
  plan.worker_floats = (worker_floats(p, plan.rows) + 127) & ~63;
  int64_t splits = 0, partials = 0;
  const int64_t limit = total / (4 * plan.threads);
  auto wants_split = [&](const Tile &t) {
    return plan.threads > 1 && chunks(t) > 1 && cost(p, t, t.end - t.begin) > limit;
  };
  each_tile(p, per_tile, [&](const Tile &t) {
    const bool split = wants_split(t);
    items += split ? chunks(t) : 1;
    if (split) ++splits, partials += chunks(t);
  });
  const bool may_split = partials * plan.partial_floats * 4 <= kPartialBytes;
  if (!may_split) splits = 0, partials = 0, items = tiles;

  auto padded = [](int64_t bytes) { return (bytes + 63) & ~int64_t(63); };
  const int64_t tile_bytes = padded(tiles * int64_t(sizeof(Tile)));
  const int64_t split_bytes = padded(splits * int64_t(sizeof(Split)));
  const int64_t item_bytes = padded(items * int64_t(sizeof(Item)));
  const int64_t floats =
      partials * plan.partial_floats + plan.threads * plan.worker_floats;
  char *memory = static_cast<char *>(
      octavo::scratch(size_t(tile_bytes + split_bytes + 2 * item_bytes + floats * 4)));
  if (!memory) return false;
  plan.tiles = reinterpret_cast<Tile *>(memory);
  plan.splits = reinterpret_cast<Split *>(memory + tile_bytes);
  Item *unsorted = reinterpret_cast<Item *>(memory + tile_bytes + split_bytes);
  plan.items = reinterpret_cast<Item *>(memory + tile_bytes + split_bytes + item_bytes);
  plan.memory = reinterpret_cast<float *>(memory + tile_bytes + split_bytes + 2 * item_bytes);

  each_tile(p, per_tile, [&](Tile t) {
    const int index = plan.tiles_n++;
    if (may_split && wants_split(t)) {
      t.split = plan.splits_n++;
      plan.splits[t.split] = {plan.memory, chunks(t)};
      plan.memory += chunks(t) * plan.partial_floats;
      for (int i = 0; i < chunks(t); ++i) {
        const int c = first_chunk(t) + i;
        const int positions = min(t.end, (c + 1) * kChunk) - max(t.begin, c * kChunk);
        unsorted[plan.items_n++] = {index, c, cost(p, t, positions)};
      }
    } else {
      unsorted[plan.items_n++] = {index, -1, cost(p, t, t.end - t.begin)};
    }
    plan.tiles[index] = t;
  });
  sort_items(unsorted, plan.items, plan.items_n);
  return true;
}

template <class X, class C>
int run(const Problem &p, X *, C *) {
  Plan plan;
  if (!make_plan(p, plan)) return OCTAVO_NO_MEMORY;
  parallel(plan.items_n, 1, plan.threads, [&](int slot, int64_t begin, int64_t end) {
    const Worker w = worker_at(p, plan.memory + slot * plan.worker_floats, plan.rows);
    for (int64_t i = begin; i < end; ++i)
      run_item<X, C>(p, plan.tiles[plan.items[i].tile], plan.splits, plan.items[i], w,
                     plan.partial_floats);
  });
  return OCTAVO_OK;
}

}  // namespace

int paged_attention(const octavo_attention_step *step, const octavo_attention_layer *layer,
                    void *out, const void *q, const void *k_cache, const void *v_cache) {
  const octavo_attention_step &s = *step;
  if (s.block_size <= 0 || s.block_size % kGroup || s.head_size % 8 || s.head_size_v % 8 ||
      s.kv_heads <= 0 || s.q_heads % s.kv_heads)
    return OCTAVO_BAD_ARGUMENT;
  // Scores live in powers of two: exp(x) = 2^(x log2 e), and the factor is folded into q.
  const float cap = layer->softcap;
  const Problem p = {s,
                     *layer,
                     out,
                     q,
                     k_cache,
                     v_cache,
                     s.q_heads / s.kv_heads,
                     (s.head_size_v + W - 1) / W * W,
                     cap != 0 ? layer->scale / cap : layer->scale * kLog2e,
                     cap * kLog2e};
  return with_dtype(s.x_dtype, [&](auto *x) {
    return with_dtype(s.kv_dtype, [&](auto *c) {
      return run(p, x, c);
    });
  });
}

}  // namespace OCTAVO_NS
