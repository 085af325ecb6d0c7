// Moving whole KV blocks: copy-on-write inside a cache, and to and from host buffers for swap.
// Plain memcpy, the same for every instruction set.
#include <cstring>

#include "octavo_cpu.h"
#include "runtime.h"

namespace {

constexpr int64_t kSlice = 1 << 16;  // bytes: one thread's turn

// Blocks by number: ids[0], ids[step], .., or 0, 1, ...
struct Places {
  size_t stride;
  const int64_t *ids;
  int64_t step;

  size_t operator[](int64_t i) const { return static_cast<size_t>(ids ? ids[i * step] : i) * stride; }
};

struct Job {
  char *to;
  const char *from;
  size_t bytes;
  Places to_at, from_at;
  int64_t count;
};

constexpr struct Bits {
  uint32_t at[32] = {};
  constexpr Bits() {
    for (int i = 0; i < 32; ++i) at[i] = 1u << i;
  }
} kBit;

// Every slice walks the blocks in order, so a pair may read what an earlier pair wrote.
void slices(void *ctx, int, int64_t begin, int64_t end) {
  const Job &j = *static_cast<Job *>(ctx);
  for (int64_t s = begin; s < end; ++s) {
    const size_t offset = static_cast<size_t>(s * kSlice);
    const size_t left = j.bytes - offset;
    const size_t n = left < static_cast<size_t>(kSlice) ? left : static_cast<size_t>(kSlice);
    for (int64_t i = 0; i < j.count; ++i)
      std::memmove(j.to + j.to_at[i] + offset, j.from + j.from_at[i] + offset, n);
  }
}

// For distinct destinations: whole blocks in parallel.
void whole(void *ctx, int, int64_t begin, int64_t end) {
  const Job &j = *static_cast<Job *>(ctx);
  for (int64_t i = begin; i < end; ++i)
    std::memcpy(j.to + j.to_at[i], j.from + j.from_at[i], j.bytes);
}

void move(Job job) {
  const int64_t per_turn = job.bytes ? 1 + kSlice / static_cast<int64_t>(job.bytes) : 1;
  octavo::parallel_for(job.count, per_turn, octavo::max_threads(), whole, &job);
}

}  // namespace

extern "C" {
void octavo_copy_blocks(void *cache, size_t block_bytes, size_t stride, const int64_t *pairs,
                        int64_t count) {
  char *at = static_cast<char *>(cache);
  Job job = {at, at, block_bytes, {stride, pairs + 1, 2}, {stride, pairs, 2}, count};
  octavo::parallel_for((static_cast<int64_t>(block_bytes) + kSlice - 1) / kSlice, 1,
                       octavo::max_threads(), slices, &job);
}
void octavo_gather_blocks(void *out, const void *cache, size_t block_bytes, size_t stride,
                          const int64_t *ids, int64_t count) {
  move({static_cast<char *>(out), static_cast<const char *>(cache), block_bytes,
        {block_bytes, nullptr, 1}, {stride, ids, 1}, count});
}
void octavo_scatter_blocks(void *cache, const void *in, size_t block_bytes, size_t stride,
                           const int64_t *ids, int64_t count) {
  move({static_cast<char *>(cache), static_cast<const char *>(in), block_bytes,
        {stride, ids, 1}, {block_bytes, nullptr, 1}, count});
}

void octavo_mask_logits(float *logits, int64_t vocab, int64_t row_stride, const int64_t *rows,
                        const uint32_t *words, int64_t row_words, int64_t count) {
  constexpr int64_t kPart = 8192;  // tokens
  struct Job {
    float *logits;
    int64_t vocab, row_stride;
    const int64_t *rows;
    const uint32_t *words;
    int64_t row_words, parts;
  } job = {logits, vocab, row_stride, rows, words, row_words, (vocab + kPart - 1) / kPart};
  octavo::parallel_for(
      count * job.parts, 2, octavo::max_threads(),
      [](void *ctx, int, int64_t begin, int64_t end) {
        const Job &j = *static_cast<Job *>(ctx);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t at = i / j.parts, from = i % j.parts * kPart;
          const int64_t last = from + kPart < j.vocab ? from + kPart : j.vocab;
          float *row = j.logits + j.rows[at] * j.row_stride;
          const uint32_t *word = j.words + at * j.row_words;
          for (int64_t v = from; v < last; v += 32) {
            const uint32_t bits = word[v / 32];
            if (bits == 0xffffffffu) continue;  // as a rule nearly all words are all ones or all zeros
            if (last - v < 32) {
              for (int k = 0; k < last - v; ++k) row[v + k] = bits >> k & 1 ? row[v + k] : -__builtin_inff();
              continue;
            }
            uint32_t x[32];  // without branches: the compiler makes vectors of it
            std::memcpy(x, row + v, sizeof x);
            for (int k = 0; k < 32; ++k) {
              const uint32_t keep = (bits & kBit.at[k]) ? 0xffffffffu : 0u;
              x[k] = (x[k] & keep) | (0xff800000u & ~keep);
            }
            std::memcpy(row + v, x, sizeof x);
          }
        }
      },
      &job);
}
}
