/* So that "fused_attn/fused_attn_f16_arbitrary_seqlen.h" is found from this folder too. */
#include "../transformer_engine/fused_attn/fused_attn_f16_arbitrary_seqlen.h"
