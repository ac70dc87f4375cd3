/* Makes "fused_attn/fused_attn_f16_arbitrary_seqlen.h" available from this folder. */
#include "../transformer_engine/fused_attn/fused_attn_f16_arbitrary_seqlen.h"
