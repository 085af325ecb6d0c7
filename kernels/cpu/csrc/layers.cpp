// All layers of a step, by groups of rows: where there are rows enough, each thread takes some of them
// through every layer by itself. Nobody then waits for the other threads after every product, what one
// product hands to the next stays in the thread's own cache, and one thread's attention, which memory
// bounds, runs beside another's products, which arithmetic bounds. The price is that each group reads the
// weights, from the last-level cache if it is near another.
//
// No row's bits depend on its company, so neither do they on the cut.
#include "layer.h"
#include "norm.h"

namespace OCTAVO_NS {
namespace {

constexpr int64_t kLeastRows = 12;   // of a thread: fewer would be bound by reading the weights again
constexpr int64_t kMostRows = 256;   // of a group
constexpr int kMostSteps = 4;        // of different KV groups

// Rows [row, row + rows) of the step, of sequences from `first` on; `beyond` rows of the last one belong to
// the groups after.
struct Group {
  int64_t row, rows;
  int first, sequences, beyond;
  double cost;
  uint64_t waits;
};

// What a group's rows cost, counted in multiply-adds of float32 weights by one row.
struct Costs {
  double row = 0;              // all products
  double query = 0, read = 0;  // a position that one query sees; reading it
  int window = 0;              // of some layers
  double windowed = 0;         // their share

  Costs(const octavo_layer *const *layers, int64_t count, const octavo_attention_step &a) {
    for (int64_t i = 0; i < count; ++i) {
      const octavo_layer &l = *layers[i];
      const octavo_weight *const weights[] = {&l.qkv, &l.out, &l.gate_up, &l.down};
      for (const octavo_weight *w : weights)
        row += double(w->n) * double(w->k) /
               (w->format == OCTAVO_INT8 ? 3.2 : w->format == OCTAVO_INT4 ? 2.4 : 1);
      if (l.attention.window) window = l.attention.window, windowed += 1 / double(count);
    }
    const double width = double(count) * (a.head_size + a.head_size_v);
    query = width * a.q_heads;
    read = width * a.kv_heads * (a.kv_dtype == OCTAVO_F32 ? 11 : 4);
  }
  // of a query at `position` among `rows` of its sequence
  double operator()(int position, int rows) const {
    const int seen = position + 1;
    const double all = window && seen > window ? seen + (window - seen) * windowed : seen;
    return row + all * (query + read / (rows < 16 ? rows : 16));
  }
};

// Where a group may begin: a row, its sequence and its number in that, and what all rows before it cost.
struct Cut {
  int64_t row;
  int sequence, number;
  double cost;
};

// Fills `groups` with parts of nearly equal cost, cut at sequences or at the blocks of one; how many there are.
// A block is written by one group, whatever is cut.
int cut(const octavo_layer_step &step, const Costs &costs, int wanted, Group *groups) {
  const octavo_attention_step &a = *step.attention;
  auto rows_of = [&](int s) { return a.query_start[s + 1] - a.query_start[s]; };
  double total = 0;
  for (int s = 0; s < a.sequences; ++s)
    for (int i = 0, n = rows_of(s); i < n; ++i) total += costs(a.context_lens[s] - n + i, n);

  int found = 0;
  Cut begin = {}, last = {};  // of the group in hand; the last place where it could have ended
  auto close = [&](const Cut &end) {
    groups[found++] = {begin.row, end.row - begin.row, begin.sequence,
                       end.sequence - begin.sequence + (end.number > 0),
                       end.number > 0 ? rows_of(end.sequence) - end.number : 0, end.cost - begin.cost, 0};
    begin = end;
  };
  double cost = 0;
  for (int s = 0; s < a.sequences; ++s)
    for (int i = 0, n = rows_of(s); i < n; cost += costs(a.context_lens[s] - n + i, n), ++i) {
      const int64_t row = a.query_start[s] + i, slot = step.write->slots[row];
      if (row == begin.row || (i > 0 && (slot < 0 || slot % a.block_size))) continue;
      const Cut here = {row, s, i, cost};
      const double target = total * (found + 1) / wanted;
      if (cost >= target && found + 1 < wanted)
        close(last.row > begin.row && target - last.cost < cost - target ? last : here);
      last = here;
    }
  close({step.rows, a.sequences, 0, cost});
  return found;
}

// Who writes which block in this step: an open-addressing table of twice the rows.
struct Writers {
  struct Entry {
    int32_t block, group;
  };
  Entry *entries;
  int32_t size;

  int32_t find(int32_t block) const {
    int32_t i = int32_t(uint32_t(block) * 2654435761u % uint32_t(size));
    while (entries[i].group >= 0 && entries[i].block != block) i = i + 1 < size ? i + 1 : 0;
    return i;
  }
};

// Notes which groups each one waits for. False if one would have to wait for a later one.
bool order(const octavo_layer_step &step, Writers writers, Group *groups, int count) {
  const octavo_attention_step &a = *step.attention;
  for (int32_t i = 0; i < writers.size; ++i) writers.entries[i].group = -1;
  for (int g = 0; g < count; ++g)
    for (int64_t row = groups[g].row; row < groups[g].row + groups[g].rows; ++row) {
      if (step.write->slots[row] < 0) continue;
      const int32_t block = int32_t(step.write->slots[row] / a.block_size);
      Writers::Entry &e = writers.entries[writers.find(block)];
      if (e.group >= 0 && e.group != g) return false;
      e = {block, g};
    }
  for (int g = 0; g < count; ++g)
    for (int s = groups[g].first; s < groups[g].first + groups[g].sequences; ++s) {
      if (a.query_start[s] == a.query_start[s + 1]) continue;
      const bool last = s + 1 == groups[g].first + groups[g].sequences;
      const int context = a.context_lens[s] - (last ? groups[g].beyond : 0);
      const int32_t *table = a.block_tables + s * a.table_stride;
      for (int i = 0; i * a.block_size < context; ++i) {
        const int writer = writers.entries[writers.find(table[i])].group;
        if (writer > g) return false;
        if (writer >= 0 && writer < g) groups[g].waits |= uint64_t(1) << writer;
      }
    }
  return true;
}

// A step's part that is a group's.
struct Part {
  octavo_attention_step attention;
  octavo_write_step write;
  octavo_layer_step step;
};
int32_t *make_part(const octavo_layer_step &whole, const Group &g, Part *part, int32_t *ints) {
  octavo_attention_step &a = part->attention;
  a = *whole.attention;
  int32_t *start = ints, *context = start + g.sequences + 1, *tails = context + g.sequences;
  for (int i = 0; i <= g.sequences; ++i) {
    const int64_t row = a.query_start[g.first + i] - g.row;
    start[i] = int32_t(row < 0 ? 0 : row < g.rows ? row : g.rows);
  }
  for (int i = 0; i < g.sequences; ++i) context[i] = a.context_lens[g.first + i];
  if (g.beyond) context[g.sequences - 1] -= g.beyond;
  for (int i = 0; whole.tails && i < g.sequences; ++i) {
    const int32_t rows = start[i + 1] - start[i];
    const int32_t tail = whole.tails[g.first + i] - (i + 1 < g.sequences ? 0 : int32_t(g.beyond));
    tails[i] = tail < 0 ? 0 : tail < rows ? tail : rows;
  }
  a.block_tables += g.first * a.table_stride;
  a.query_start = start, a.context_lens = context, a.sequences = g.sequences;
  part->write = *whole.write;
  part->write.slots += g.row, part->write.tokens = g.rows;
  part->step = {&part->attention, &part->write, whole.positions + g.row, g.rows, whole.tails ? tails : nullptr};
  return tails + g.sequences;
}

struct Stack {
  const octavo_layer *const *layers;
  const octavo_layer_step *const *steps;
  int64_t count;
  float *x;
};

int in_order(const Stack &s) {
  for (int64_t i = 0; i < s.count; ++i)
    if (const int status = run_layer(*s.layers[i], *s.steps[i], s.x, nullptr, i + 1 == s.count)) return status;
  return OCTAVO_OK;
}

// How many groups a step should have: one where they bring nothing.
int groups_for(int64_t rows, int threads) {
  if (threads < 2 || rows < threads * kLeastRows) return 1;
  const int64_t rounds = (rows + threads * kMostRows - 1) / (threads * kMostRows);
  const int64_t groups = threads * rounds;
  return int(groups < kMostGroups ? groups : kMostGroups / threads * threads);
}

}  // namespace

int decoder_layers(const octavo_layer *const *layers, const octavo_layer_step *const *steps,
                   int64_t count, float *x) {
  const Stack stack = {layers, steps, count, x};
  if (count < 1) return OCTAVO_OK;
  const octavo_layer_step &whole = *steps[0];
  if (!tails_fit(*steps[count - 1])) return OCTAVO_BAD_ARGUMENT;
  const int threads = octavo::max_threads();
  const int wanted = groups_for(whole.rows, threads);
  if (wanted < 2 || whole.attention->query_start[0] != 0) return in_order(stack);

  Group groups[kMostGroups];
  const Costs costs(layers, count, *whole.attention);
  const int found = cut(whole, costs, wanted, groups);
  double total = 0, most = 0;
  for (int i = 0; i < found; ++i) total += groups[i].cost, most = groups[i].cost > most ? groups[i].cost : most;
  if (found < wanted || most > 1.2 * total / wanted) return in_order(stack);

  const octavo_layer_step *kinds[kMostSteps];
  int kinds_n = 0;
  auto kind_of = [&](const octavo_layer_step *s) {
    int k = 0;
    while (k < kinds_n && kinds[k] != s) ++k;
    return k;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int k = kind_of(steps[i]);
    if (k == kMostSteps) return in_order(stack);
    if (k == kinds_n) kinds[kinds_n++] = steps[i];
  }
  const int64_t ints = 3 * (whole.attention->sequences + 2 * found) + found;
  const int64_t writers = 2 * whole.rows + 1;
  char *memory = static_cast<char *>(octavo::scratch(
      size_t(kinds_n * (found * int64_t(sizeof(Part)) + 4 * ints)) + size_t(writers) * sizeof(Writers::Entry), 3));
  if (!memory) return OCTAVO_NO_MEMORY;
  Part *parts = reinterpret_cast<Part *>(memory);
  Writers::Entry *entries = reinterpret_cast<Writers::Entry *>(parts + kinds_n * found);
  int32_t *numbers = reinterpret_cast<int32_t *>(entries + writers);
  for (int k = 0; k < kinds_n; ++k) {
    if (!order(*kinds[k], {entries, int32_t(writers)}, groups, found)) return in_order(stack);
    for (int g = 0; g < found; ++g) numbers = make_part(*kinds[k], groups[g], parts + k * found + g, numbers);
  }

  octavo::Progress written[kMostGroups];
  int status[kMostGroups] = {};
  const int64_t hidden = layers[0]->qkv.k;
  octavo::Laps laps;  // since this thread ended its last group
  parallel_groups(found, threads, [&](int slot, int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      Turn turn = {written, groups[g].waits, int(g), 0};
      for (int64_t i = 0; i < count && !status[g]; ++i) {
        turn.layer = int(i);
        const Part &part = parts[kind_of(steps[i]) * found + g];
        status[g] = run_layer(*layers[i], part.step, x + groups[g].row * hidden, &turn, i + 1 == count);
      }
      if (status[g]) octavo::reach(written[g], int(count));  // nobody waits for what does not come
    }
    if (slot == 0) laps = {};
  });
  laps(OCTAVO_WAIT);
  for (int g = 0; g < found; ++g)
    if (status[g]) return status[g];
  return OCTAVO_OK;
}

int decoder_logits(const octavo_layer *const *layers, const octavo_layer_step *const *steps, int64_t layer_count,
                   const octavo_ends *ends, const int64_t *ids, const int64_t *logits_rows, int64_t count,
                   float *logits, int64_t logits_stride) {
  const octavo_ends &e = *ends;
  const int64_t hidden = e.embedding.k, rows = layer_count > 0 ? steps[0]->rows : 0;
  if (rows < 1 || e.head.k != hidden || layers[0]->qkv.k != hidden || weight_bytes(&e.head) < 0)
    return OCTAVO_BAD_ARGUMENT;
  const int64_t stride = apart(hidden);
  float *x = static_cast<float *>(octavo::scratch(size_t(rows * hidden + count * stride + 16) * sizeof(float), 4));
  if (!x) return OCTAVO_NO_MEMORY;
  float *normed = x + (rows * hidden + 15) / 16 * 16;
  octavo::Laps laps;
  if (const int status = unpack_rows(&e.embedding, x, ids, rows)) return status;
  laps(OCTAVO_EMBEDDING);
  if (const int status = decoder_layers(layers, steps, layer_count, x)) return status;
  laps = {};
  parallel(count, 1 + 16384 / hidden, octavo::max_threads(), [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      norm_row(normed + i * stride, x + (logits_rows ? logits_rows[i] : i) * hidden, e.norm, hidden, e.eps, e.norm_offset);
  });
  laps(OCTAVO_NORM);
  return linear(&e.head, logits, logits_stride, normed, stride, count, nullptr);
}

}  // namespace OCTAVO_NS
