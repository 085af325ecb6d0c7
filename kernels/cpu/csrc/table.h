// One row of the dispatch table: the same kernels compiled for one instruction set.
#pragma once
#include "octavo_cpu.h"

struct KernelTable {
  const char *name;
  decltype(&octavo_write_kv) write_kv;
  decltype(&octavo_paged_attention) paged_attention;
  decltype(&octavo_rms_norm) rms_norm;
  decltype(&octavo_add_rms_norm) add_rms_norm;
  decltype(&octavo_rotary) rotary;
  decltype(&octavo_act_and_mul) act_and_mul;
  decltype(&octavo_sample) sample;
  decltype(&octavo_token_logprobs) token_logprobs;
  decltype(&octavo_best_allowed) best_allowed;
  decltype(&octavo_weight_bytes) weight_bytes;
  decltype(&octavo_pack_weight) pack_weight;
  decltype(&octavo_pack_codes) pack_codes;
  decltype(&octavo_unpack_rows) unpack_rows;
  decltype(&octavo_linear) linear;
  decltype(&octavo_decoder_layer) decoder_layer;
  decltype(&octavo_decoder_layers) decoder_layers;
  decltype(&octavo_decoder_logits) decoder_logits;
  decltype(&octavo_peak) peak;
  decltype(&octavo_read) read;
};
