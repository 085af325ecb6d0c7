// Attention over the paged KV cache: one entry for prefill, decode and mixed steps.
//
// The list of work: a tile of rows is one item, or, where there are few and long ones, each of its
// chunks is (split over KV, as in Flash-Decoding). Decoding sequences whose block tables begin with
// the same blocks share the chunks that lie in them (cascade attention, Ye et al. 2024): one item
// reads a shared chunk for many of them, their own items do the rest. Partial results are merged chunk
// by chunk in order, so none of this changes a bit.
#include "attention_tile.h"

namespace OCTAVO_NS {
namespace {

constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds below which the caller works alone
constexpr int64_t kPartialBytes = 64 << 20;

struct Split {  // a tile whose chunks are separate items; partial results wait here
  float *partial;
  int32_t left;  // chunks not done yet; who brings it to 0 merges
};
struct Share {  // some of Plan.members: tiles of one KV head whose leading chunks are the same blocks
  int32_t first, count;
};
struct Item {
  int32_t tile;   // or -1 - the index of a Share
  int32_t chunk;  // -1: the whole tile
  int64_t cost;
};

struct Plan {
  Tile *tiles;
  Split *splits;
  Item *items;
  Share *shares;
  int32_t *members;      // tiles
  int32_t *leader;       // per sequence: the first one with the same first chunk, itself if it is that
  int32_t *depth;        // per sequence: how many leading chunks it shares; 0: none
  float *workers;        // one per thread
  int64_t partial_floats, worker_floats;
  int tiles_n, splits_n, items_n, shares_n, rows, threads;
  int takers;  // threads that take items from the list
};

template <class X>
void merge_split(const Problem &p, const Tile &t, const Split &split, const Worker &w,
                 int64_t partial_floats) {
  const int rows = t.queries * p.heads, n = chunks(t);
  clear(w.total, rows, p.width);
  for (int i = 0; i < n; ++i)
    merge(w.total, rows_at(split.partial + i * partial_floats, rows), rows, p.width);
  store_rows<X>(p, t, w.total);
}

bool last_chunk(Split &split) {
  return __atomic_sub_fetch(&split.left, 1, __ATOMIC_ACQ_REL) == 0;
}

// What the thread with item i reads next, most likely: threads that share the list take items in turn.
After after(const Plan &plan, int64_t i) {
  const Item &next = plan.items[i + plan.takers < plan.items_n ? i + plan.takers : i];
  const int32_t tile = next.tile < 0 ? plan.members[plan.shares[-1 - next.tile].first] : next.tile;
  const Tile &t = plan.tiles[tile];
  return {&t, next.chunk < 0 ? t.begin : max(t.begin, next.chunk * kChunk)};
}

template <class X, class C>
void run_tile(const Problem &p, const Plan &plan, int64_t i, const Worker &w) {
  const Item &item = plan.items[i];
  const Tile &t = plan.tiles[item.tile];
  const int rows = t.queries * p.heads, n = chunks(t), first = first_chunk(t);
  const Own seen(p, t);
  const After next = after(plan, i);
  load_queries<X>(p, t, w.q);
  if (item.chunk < 0) {
    for (int c = 0; c < n; ++c) {
      chunk<C>(p, t, next, seen, rows, w, first + c);
      if (n == 1) return store_rows<X>(p, t, w.now);  // what a merge into nothing would give
      if (c == 0) clear(w.total, rows, p.width);
      merge(w.total, w.now, rows, p.width);
    }
    return store_rows<X>(p, t, w.total);
  }
  Split &split = plan.splits[t.split];
  Worker mine = w;
  mine.now = rows_at(split.partial + (item.chunk - first) * plan.partial_floats, rows);
  chunk<C>(p, t, next, seen, rows, mine, item.chunk);
  if (last_chunk(split)) merge_split<X>(p, t, split, w, plan.partial_floats);
}

// One shared chunk for the rows of all members; each takes its part of the result along.
template <class X, class C>
void run_share(const Problem &p, const Plan &plan, int64_t i, const Worker &w) {
  const Item &item = plan.items[i];
  const Share &share = plan.shares[-1 - item.tile];
  const int32_t *members = plan.members + share.first;
  int rows = 0;
  for (int m = 0; m < share.count; ++m) {
    const Tile &t = plan.tiles[members[m]];
    load_queries<X>(p, t, w.q + int64_t(rows) * p.s.head_size);
    rows += t.queries * p.heads;
  }
  chunk<C>(p, plan.tiles[members[0]], after(plan, i), All{}, rows, w, item.chunk);
  for (int m = 0, row = 0; m < share.count; ++m) {
    const Tile &t = plan.tiles[members[m]];
    const int n = t.queries * p.heads;
    Split &split = plan.splits[t.split];
    const Rows to = rows_at(split.partial + item.chunk * plan.partial_floats, n);
    __builtin_memcpy(to.m, w.now.m + row, size_t(n) * sizeof(float));
    __builtin_memcpy(to.l, w.now.l + row, size_t(n) * sizeof(float));
    __builtin_memcpy(to.o, w.now.o + int64_t(row) * p.width,
                     size_t(n) * size_t(p.width) * sizeof(float));
    row += n;
    if (last_chunk(split)) merge_split<X>(p, t, split, w, plan.partial_floats);
  }
}

// --- the list of work ---

// Multiply-adds of some rows; reading K and V once counts as a few rows' worth.
int64_t cost(const Problem &p, int rows, int positions) {
  return int64_t(rows + 4) * positions * (p.s.head_size + p.s.head_size_v);
}
int64_t cost(const Problem &p, const Tile &t) {
  return cost(p, t.queries * p.heads, t.end - t.begin);
}
int chunk_positions(const Tile &t, int c) {
  return min(t.end, (c + 1) * kChunk) - max(t.begin, c * kChunk);
}

// One KV head after the other: the tiles that read its keys and values find them in the L2 cache.
template <class F>
void each_tile(const Problem &p, int per_tile, F &&f) {
  for (int s = 0; s < p.s.sequences; ++s) {
    const int n = p.s.query_start[s + 1] - p.s.query_start[s], context = p.s.context_lens[s];
    for (int h = 0; h < p.s.kv_heads; ++h)
      for (int first = 0; first < n; first += per_tile) {
        const int queries = min(per_tile, n - first), end = context - n + first + queries;
        const int begin = p.l.window ? max(0, context - n + first + 1 - p.l.window) : 0;
        f(Tile{s, h, first, queries, begin, end, -1});
      }
  }
}

// Chunks that sequence s could share: those that all its queries see whole. It has to be short of
// rows, or reading the cache is not what costs.
int sharable(const Problem &p, int s) {
  const int n = p.s.query_start[s + 1] - p.s.query_start[s];
  if (p.l.window || n == 0 || n * p.heads > kRows / 3 || kChunk % p.s.block_size) return 0;
  return (p.s.context_lens[s] - n + 1) / kChunk;
}

int equal_chunks(const Problem &p, int a, int b, int most) {
  const int32_t *x = p.s.block_tables + a * p.s.table_stride;
  const int32_t *y = p.s.block_tables + b * p.s.table_stride;
  const int blocks = kChunk / p.s.block_size;
  for (int c = 0; c < most; ++c)
    for (int i = c * blocks; i < (c + 1) * blocks; ++i)
      if (x[i] != y[i]) return c;
  return most;
}

// Leaders and depths of all sequences; returns whether anything is shared. A leader is found by the id
// of its first block, in an open-addressing table of twice the sequences.
bool find_shares(const Problem &p, Plan &plan, int32_t *slots, int slots_n) {
  bool any = false;
  for (int i = 0; i < slots_n; ++i) slots[i] = -1;
  for (int s = 0; s < p.s.sequences; ++s) {
    plan.leader[s] = s, plan.depth[s] = 0;
    const int most = sharable(p, s);
    if (most < 1) continue;
    const int32_t block = p.s.block_tables[s * p.s.table_stride];
    int at = int(uint32_t(block) * 2654435761u % uint32_t(slots_n));
    while (slots[at] >= 0 && p.s.block_tables[slots[at] * p.s.table_stride] != block)
      at = (at + 1) % slots_n;
    if (slots[at] < 0) {
      slots[at] = s;
      continue;
    }
    const int leader = slots[at];
    const int depth = equal_chunks(p, s, leader, min(most, sharable(p, leader)));
    if (depth == 0) continue;
    plan.leader[s] = leader, plan.depth[s] = depth;
    if (plan.depth[leader] < depth) plan.depth[leader] = depth;
    any = true;
  }
  return any;
}

// Longest first, by a counting sort over powers of two: the tail of the list is what evens out the threads,
// so its pieces should be small. Those of like cost stay in order, beside what reads the same keys and values.
void sort_items(const Item *in, Item *out, int n) {
  int at[65] = {};
  auto key = [](const Item &i) { return __builtin_clzll(uint64_t(i.cost) | 1); };
  for (int i = 0; i < n; ++i) ++at[key(in[i]) + 1];
  for (int k = 0; k < 64; ++k) at[k + 1] += at[k];
  for (int i = 0; i < n; ++i) out[at[key(in[i])]++] = in[i];
}

struct Sizes {
  int64_t tiles = 0, items = 0, splits = 0, partials = 0;
};

// Items for the chunks that sequences share: per group, chunk and KV head, as many rows as a tile takes.
void add_shares(const Problem &p, Plan &plan, const int32_t *tile_of, Item *items) {
  int members_n = 0;
  for (int leader = 0; leader < p.s.sequences; ++leader) {
    if (plan.leader[leader] != leader) continue;
    for (int c = 0; c < plan.depth[leader]; ++c)
      for (int h = 0; h < p.s.kv_heads; ++h) {
        int rows = 0;
        Share *share = nullptr;
        auto close = [&] {
          if (!share) return;
          items[plan.items_n++] = {-1 - plan.shares_n++, c, cost(p, rows, kChunk)};
          share = nullptr;
        };
        for (int s = leader; s < p.s.sequences; ++s) {
          if (plan.leader[s] != leader || plan.depth[s] <= c) continue;
          const int n = (p.s.query_start[s + 1] - p.s.query_start[s]) * p.heads;
          if (share && rows + n > plan.rows) close();
          if (!share) {
            share = plan.shares + plan.shares_n;
            *share = {members_n, 0};
            rows = 0;
          }
          plan.members[members_n++] = tile_of[s] + h;
          ++share->count;
          rows += n;
        }
        close();
      }
  }
}

bool make_plan(const Problem &p, Plan &plan) {
  const int per_tile = max(1, kRows / p.heads), sequences = p.s.sequences;
  int64_t total = 0;
  Sizes need;
  int longest = 0;
  each_tile(p, per_tile, [&](const Tile &t) {
    total += cost(p, t);
    ++need.tiles;
    longest = max(longest, t.queries);
  });
  plan.threads = total < kSerialWork ? 1 : octavo::max_threads();

  // Who shares, before the rest is laid out: level 2, because level 0 is asked for again below.
  const int slots_n = 2 * sequences + 1;
  int32_t *ints = static_cast<int32_t *>(
      octavo::scratch(size_t(3 * sequences + slots_n) * sizeof(int32_t), 2));
  if (!ints) return false;
  plan.leader = ints, plan.depth = ints + sequences;
  int32_t *tile_of = ints + 2 * sequences;
  const bool shares = find_shares(p, plan, ints + 3 * sequences, slots_n);
  plan.rows = longest * p.heads;
  if (shares && plan.rows < kRows) plan.rows = kRows;
  plan.partial_floats = (rows_floats(max(longest * p.heads, 1), p.width) + 15) & ~15;
  plan.worker_floats = (worker_floats(p, plan.rows) + 127) & ~63;

  plan.takers = octavo::in_group() ? 1 : plan.threads;  // helpers do not come often enough to count
  const int64_t limit = total / (4 * plan.takers);
  auto depth = [&](const Tile &t) { return shares ? plan.depth[t.sequence] : 0; };
  auto wants_split = [&](const Tile &t) {
    return depth(t) > 0 || (plan.takers > 1 && chunks(t) > 1 && cost(p, t) > limit);
  };
  int64_t memberships = 0;
  each_tile(p, per_tile, [&](const Tile &t) {
    const bool split = wants_split(t);
    need.items += split ? chunks(t) : 1;  // shared chunks have fewer items than this, never more
    memberships += depth(t);
    if (split) ++need.splits, need.partials += chunks(t);
  });
  const bool may_split = need.partials * plan.partial_floats * 4 <= kPartialBytes;
  if (!may_split) need.splits = 0, need.partials = 0, need.items = need.tiles, memberships = 0;

  auto padded = [](int64_t bytes) { return (bytes + 63) & ~int64_t(63); };
  const int64_t sizes[] = {padded(need.tiles * int64_t(sizeof(Tile))),
                           padded(need.splits * int64_t(sizeof(Split))),
                           padded(need.items * int64_t(sizeof(Item))),
                           padded(need.items * int64_t(sizeof(Item))),
                           padded(memberships * int64_t(sizeof(Share))),
                           padded(memberships * 4),
                           4 * need.partials * plan.partial_floats,
                           4 * plan.threads * plan.worker_floats};
  char *at[8], *memory = nullptr;
  int64_t bytes = 0;
  for (int64_t size : sizes) bytes += size;
  memory = static_cast<char *>(octavo::scratch(size_t(bytes)));
  if (!memory) return false;
  for (int i = 0; i < 8; memory += sizes[i++]) at[i] = memory;
  plan.tiles = reinterpret_cast<Tile *>(at[0]);
  plan.splits = reinterpret_cast<Split *>(at[1]);
  Item *unsorted = reinterpret_cast<Item *>(at[2]);
  plan.items = reinterpret_cast<Item *>(at[3]);
  plan.shares = reinterpret_cast<Share *>(at[4]);
  plan.members = reinterpret_cast<int32_t *>(at[5]);
  float *partials = reinterpret_cast<float *>(at[6]);
  plan.workers = reinterpret_cast<float *>(at[7]);
  plan.tiles_n = plan.splits_n = plan.items_n = plan.shares_n = 0;

  each_tile(p, per_tile, [&](Tile t) {
    const int index = plan.tiles_n++;
    if (t.kv_head == 0 && t.first == 0) tile_of[t.sequence] = index;
    if (may_split && wants_split(t)) {
      t.split = plan.splits_n++;
      plan.splits[t.split] = {partials, chunks(t)};
      partials += chunks(t) * plan.partial_floats;
      for (int i = depth(t); i < chunks(t); ++i) {
        const int c = first_chunk(t) + i;
        unsorted[plan.items_n++] = {index, c, cost(p, t.queries * p.heads, chunk_positions(t, c))};
      }
    } else {
      unsorted[plan.items_n++] = {index, -1, cost(p, t)};
    }
    plan.tiles[index] = t;
  });
  if (shares && may_split) add_shares(p, plan, tile_of, unsorted);
  sort_items(unsorted, plan.items, plan.items_n);
  return true;
}

template <class X, class C>
int run(const Problem &p, X *, C *) {
  Plan plan;
  if (!make_plan(p, plan)) return OCTAVO_NO_MEMORY;
  parallel(plan.items_n, 1, plan.threads, [&](int slot, int64_t begin, int64_t end) {
    const Worker w = worker_at(p, plan.workers + slot * plan.worker_floats, plan.rows);
    for (int64_t i = begin; i < end; ++i)
      if (plan.items[i].tile < 0)
        run_share<X, C>(p, plan, i, w);
      else
        run_tile<X, C>(p, plan, i, w);
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
  return with_dtype(s.x_dtype, [&](auto *x) {
    return with_kv_dtype(s.kv_dtype, [&](auto *c) {
      const Problem p = {s,
                         *layer,
                         out,
                         q,
                         k_cache,
                         v_cache,
                         s.q_heads / s.kv_heads,
                         (s.head_size_v + W - 1) / W * W,
                         cap != 0 ? layer->scale / cap : layer->scale * kLog2e,
                         cap * kLog2e,
                         kv_record(c, s.head_size, s.block_size),
                         kv_record(c, s.head_size_v, s.block_size),
                         block_stride(c, s.k_block_stride, s.kv_heads, s.head_size, s.block_size),
                         block_stride(c, s.v_block_stride, s.kv_heads, s.head_size_v, s.block_size)};
      return run(p, x, c);
    });
  });
}

}  // namespace OCTAVO_NS
