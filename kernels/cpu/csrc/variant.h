// The files that include this are compiled once per instruction set; OCTAVO_ISA names the variant.
// They include no C++ standard header: an inline function built with AVX-512 could be the copy the
// linker keeps for everyone. What is shared between files lives in the variant's own namespace.
#pragma once
#include "octavo_cpu.h"
#include "runtime.h"

#define OCTAVO_STR2(x) #x
#define OCTAVO_STR(x) OCTAVO_STR2(x)
#define OCTAVO_CAT2(a, b) a##b
#define OCTAVO_CAT(a, b) OCTAVO_CAT2(a, b)
#define OCTAVO_ISA_NAME OCTAVO_STR(OCTAVO_ISA)
#define OCTAVO_NS OCTAVO_CAT(octavo_, OCTAVO_ISA)
#define OCTAVO_TABLE OCTAVO_CAT(table_, OCTAVO_ISA)

namespace OCTAVO_NS {

int write_kv(const octavo_write_step *, void *, void *, const void *, const void *);
int paged_attention(const octavo_attention_step *, const octavo_attention_layer *, void *,
                    const void *, const void *, const void *);
int rms_norm(const octavo_norm *, void *, const void *, const void *);
int add_rms_norm(const octavo_norm *, void *, void *, int64_t, const void *, const void *);
int rotary(void *, void *, const void *, int, const float *, int64_t, int, int, int, int, int64_t,
           int64_t, int, int);
int act_and_mul(void *, const void *, int64_t, int64_t, int64_t, int64_t, int, int);
int sample(int64_t *, const float *, int64_t, int64_t, int64_t, const float *, const int32_t *,
           const float *, const float *, const uint64_t *, const uint64_t *);
int token_logprobs(float *, int64_t *, float *, const float *, const int64_t *, int64_t, int64_t,
                   int64_t);
int best_allowed(int64_t *, const float *, int64_t, int64_t, const int64_t *, const uint32_t *, int64_t,
                 int64_t);
int64_t weight_bytes(const octavo_weight *);
int pack_weight(const octavo_weight *, const void *const *, const int64_t *, int);
int unpack_rows(const octavo_weight *, float *, const int64_t *, int64_t);
int decoder_layer(const octavo_layer *, const octavo_layer_step *, float *);
int decoder_layers(const octavo_layer *const *, const octavo_layer_step *const *, int64_t, float *);
int decoder_logits(const octavo_layer *const *, const octavo_layer_step *const *, int64_t, const octavo_ends *,
                   const int64_t *, const int64_t *, int64_t, float *, int64_t);
int linear(const octavo_weight *, float *, int64_t, const float *, int64_t, int64_t, const float *);
double peak(int, int64_t);
uint32_t read(const void *, int64_t);

// parallel(n, grain, threads, f): f(slot, begin, end) over [0, n); see runtime.h.
template <class F>
inline void parallel(int64_t n, int64_t grain, int threads, F &&f) {
  octavo::parallel_for(
      n, grain, threads,
      [](void *ctx, int slot, int64_t begin, int64_t end) {
        (*static_cast<F *>(ctx))(slot, begin, end);
      },
      &f);
}

// The same by parallel_groups.
template <class F>
inline void parallel_groups(int64_t n, int threads, F &&f) {
  octavo::parallel_groups(
      n, threads,
      [](void *ctx, int slot, int64_t begin, int64_t end) {
        (*static_cast<F *>(ctx))(slot, begin, end);
      },
      &f);
}

}  // namespace OCTAVO_NS
