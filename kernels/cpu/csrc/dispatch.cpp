// Pick the best variant this CPU can run, once, at load, and forward the C ABI to it.
#include <cstring>

#include "octavo_cpu.h"
#include "runtime.h"
#include "table.h"
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

extern const KernelTable table_baseline;
#ifdef OCTAVO_HAVE_avx2
extern const KernelTable table_avx2;
#endif
#ifdef OCTAVO_HAVE_avx512
extern const KernelTable table_avx512;
#endif
#ifdef OCTAVO_HAVE_avx512_vnni
extern const KernelTable table_avx512_vnni;
#endif
#ifdef OCTAVO_HAVE_power10
extern const KernelTable table_power10;
#endif

namespace {

bool always() { return true; }
#if defined(__x86_64__)
// Asked of the CPU itself: __builtin_cpu_supports does not know "f16c" before GCC 11, and needs a
// runtime that not every clang brings. XCR0 says which registers the system saves.
struct Cpu {
  unsigned ecx1 = 0, ebx7 = 0, ecx7 = 0, xcr0 = 0;
  Cpu() {
    unsigned a, b, d;
    if (!__get_cpuid(1, &a, &b, &ecx1, &d) || !(ecx1 >> 27 & 1 /* OSXSAVE */)) return;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(d) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &ebx7, &ecx7, &d)) ebx7 = ecx7 = 0;
  }
  static bool all(unsigned word, unsigned mask) { return (word & mask) == mask; }
};
bool has_avx2() {
  const Cpu cpu;
  return Cpu::all(cpu.xcr0, 0x06) && Cpu::all(cpu.ebx7, 1u << 5) &&
         Cpu::all(cpu.ecx1, 1u << 12 /* FMA */ | 1u << 29 /* F16C */);
}
bool has_avx512() {
  const Cpu cpu;
  return has_avx2() && Cpu::all(cpu.xcr0, 0xe6) &&
         Cpu::all(cpu.ebx7, 1u << 16 /* F */ | 1u << 17 /* DQ */ | 1u << 30 /* BW */ |
                                1u << 31 /* VL */);
}
bool has_avx512_vnni() { return has_avx512() && Cpu::all(Cpu().ecx7, 1u << 11); }
#endif
#ifdef OCTAVO_HAVE_power10
bool has_power10() { return getauxval(AT_HWCAP2) & 0x00040000 /* PPC_FEATURE2_ARCH_3_1 */; }
#endif

const struct Variant {
  const KernelTable *table;
  bool (*ok)();
} variants[] = {
// Best first.
#ifdef OCTAVO_HAVE_avx512_vnni
    {&table_avx512_vnni, has_avx512_vnni},
#endif
#ifdef OCTAVO_HAVE_avx512
    {&table_avx512, has_avx512},
#endif
#ifdef OCTAVO_HAVE_avx2
    {&table_avx2, has_avx2},
#endif
#ifdef OCTAVO_HAVE_power10
    {&table_power10, has_power10},
#endif
    {&table_baseline, always},  // what the platform's ABI guarantees: SSE2, NEON, VSX
};

struct Choice {
  const KernelTable *table = nullptr;
  char names[64] = "";
  Choice() {
    for (const Variant &v : variants) {
      if (!v.ok()) continue;
      if (!table) table = v.table;
      if (names[0]) std::strcat(names, " ");
      std::strcat(names, v.table->name);
    }
  }
} choice;

// A kernel that is a phase by itself; products and whole layers count their own.
template <class F, class... A>
auto timed(int phase, F kernel, A... arguments) {
  octavo::Laps laps;
  const auto result = kernel(arguments...);
  laps(phase);
  return result;
}

}  // namespace

extern "C" {
int octavo_abi_version(void) { return OCTAVO_CPU_ABI; }
const char *octavo_isa(void) { return choice.table->name; }
const char *octavo_isas(void) { return choice.names; }
int octavo_force_isa(const char *name) {
  for (const Variant &v : variants)
    if (!std::strcmp(v.table->name, name) && v.ok()) {
      choice.table = v.table;
      return OCTAVO_OK;
    }
  return OCTAVO_BAD_ARGUMENT;
}
int octavo_write_kv(const octavo_write_step *step, void *k_cache, void *v_cache, const void *k,
                    const void *v) {
  return timed(OCTAVO_ROTARY_AND_KV, choice.table->write_kv, step, k_cache, v_cache, k, v);
}
int octavo_paged_attention(const octavo_attention_step *step, const octavo_attention_layer *layer,
                           void *out, const void *q, const void *k_cache, const void *v_cache) {
  return timed(OCTAVO_ATTENTION, choice.table->paged_attention, step, layer, out, q, k_cache, v_cache);
}
int octavo_rms_norm(const octavo_norm *p, void *out, const void *x, const void *weight) {
  return timed(OCTAVO_NORM, choice.table->rms_norm, p, out, x, weight);
}
int octavo_add_rms_norm(const octavo_norm *p, void *out, void *residual,
                        int64_t residual_row_stride, const void *x, const void *weight) {
  return timed(OCTAVO_NORM, choice.table->add_rms_norm, p, out, residual, residual_row_stride, x, weight);
}
int octavo_rotary(void *q, void *k, const void *positions, int positions_are_64,
                  const float *cos_sin, int64_t tokens, int q_heads, int kv_heads, int head_size,
                  int rotary_dim, int64_t q_row_stride, int64_t k_row_stride, int style,
                  int dtype) {
  return timed(OCTAVO_ROTARY_AND_KV, choice.table->rotary, q, k, positions, positions_are_64, cos_sin, tokens, q_heads,
                              kv_heads, head_size, rotary_dim, q_row_stride, k_row_stride, style,
                              dtype);
}
int octavo_act_and_mul(void *out, const void *gate_up, int64_t rows, int64_t n,
                       int64_t out_row_stride, int64_t x_row_stride, int kind, int dtype) {
  return timed(OCTAVO_ACTIVATION, choice.table->act_and_mul, out, gate_up, rows, n, out_row_stride, x_row_stride, kind,
                                   dtype);
}
int octavo_sample(int64_t *out, const float *logits, int64_t rows, int64_t vocab,
                  int64_t row_stride, const float *temperature, const int32_t *top_k,
                  const float *top_p, const float *min_p, const uint64_t *seed,
                  const uint64_t *counter) {
  return timed(OCTAVO_SAMPLE, choice.table->sample, out, logits, rows, vocab, row_stride, temperature, top_k, top_p,
                              min_p, seed, counter);
}
int octavo_token_logprobs(float *logprob, int64_t *rank, float *logsumexp, const float *logits,
                          const int64_t *ids, int64_t rows, int64_t vocab, int64_t row_stride) {
  return timed(OCTAVO_SAMPLE, choice.table->token_logprobs, logprob, rank, logsumexp, logits, ids, rows, vocab,
                                      row_stride);
}
int64_t octavo_weight_bytes(const octavo_weight *w) { return choice.table->weight_bytes(w); }
int octavo_pack_weight(const octavo_weight *w, const void *const *parts, const int64_t *part_rows,
                       int dtype) {
  return choice.table->pack_weight(w, parts, part_rows, dtype);
}
int octavo_pack_codes(const octavo_weight *w, const void *codes, const void *scales,
                      const void *minima) {
  return choice.table->pack_codes(w, codes, scales, minima);
}
int octavo_unpack_rows(const octavo_weight *w, float *out, const int64_t *rows, int64_t count) {
  return timed(OCTAVO_EMBEDDING, choice.table->unpack_rows, w, out, rows, count);
}
int octavo_linear(const octavo_weight *w, float *out, int64_t out_row_stride, const float *x,
                  int64_t x_row_stride, int64_t rows, const float *bias) {
  return choice.table->linear(w, out, out_row_stride, x, x_row_stride, rows, bias);
}
int octavo_decoder_layer(const octavo_layer *layer, const octavo_layer_step *step, float *x) {
  return choice.table->decoder_layer(layer, step, x);
}
double octavo_peak(int kind, int64_t rounds) { return choice.table->peak(kind, rounds); }
uint32_t octavo_read(const void *data, int64_t bytes) { return choice.table->read(data, bytes); }
}
