// The table of this variant: everything the sibling files define for it.
#include "table.h"

#include "variant.h"

extern const KernelTable OCTAVO_TABLE;
const KernelTable OCTAVO_TABLE = {
    OCTAVO_ISA_NAME,        OCTAVO_NS::write_kv, OCTAVO_NS::paged_attention, OCTAVO_NS::rms_norm,
    OCTAVO_NS::add_rms_norm, OCTAVO_NS::rotary,  OCTAVO_NS::act_and_mul,     OCTAVO_NS::sample,
    OCTAVO_NS::token_logprobs, OCTAVO_NS::best_allowed, OCTAVO_NS::weight_bytes, OCTAVO_NS::pack_weight,
    OCTAVO_NS::pack_codes, OCTAVO_NS::unpack_rows, OCTAVO_NS::linear, OCTAVO_NS::decoder_layer,
    OCTAVO_NS::decoder_layers, OCTAVO_NS::decoder_logits, OCTAVO_NS::peak, OCTAVO_NS::read,
};
