"""The operators: names, schemas and tags. src/torch/library.cpp lists their kernels in C++."""

import torch

from te_attention.torch._options import MINIMAL_SCHEMA as MINIMAL
from te_attention.torch._options import SCHEMA as ARGUMENTS

NAMESPACE = "te_attention"

# The arguments of backward before the options.
INCOMING = "Tensor dout, Tensor? dlse, Tensor o, Tensor lse, bool wants_dbias, bool wants_dsink"
OUTGOING = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv"

# The arguments of the FP8 operators before the options. A scale of None is 1 (for k and v: the
# scale of q; for dk and dv: the scale of dq).
FP8_FORWARD_SCALES = (
    "Tensor? q_scale_inv, Tensor? k_scale_inv, Tensor? v_scale_inv, Tensor? s_scale, "
    "Tensor? s_scale_inv, Tensor? o_scale"
)
FP8_FORWARD = f"{FP8_FORWARD_SCALES}, str o_dtype"
FP8_BACKWARD_SCALES = (
    "Tensor? q_scale_inv, Tensor? k_scale_inv, Tensor? v_scale_inv, Tensor? s_scale, "
    "Tensor? s_scale_inv, Tensor? o_scale_inv, Tensor? dout_scale_inv, Tensor? dp_scale, "
    "Tensor? dp_scale_inv, Tensor? dq_scale, Tensor? dk_scale, Tensor? dv_scale"
)
FP8_BACKWARD = f"{FP8_BACKWARD_SCALES}, str dqkv_dtype"

# input_scale, input_amax: written, of current scaling, whose `input` is -1. scales, amaxes: float32
# [n] of delayed scaling, then the places there of the inputs and of two other tensors. Scales are
# read and amaxes raised. -1: O, or the gradients, have 16 bits.
FP8_ATTENTION_FORWARD = (
    "Tensor(a!)? input_scale, Tensor(b!)? input_amax, Tensor scales, Tensor(c!) amaxes, "
    "int input, int s, int o, str dtype, bool power_of_two, float amax_floor"
)
FP8_ATTENTION_BACKWARD = (
    "Tensor dout, Tensor saved, Tensor? o, "
    "Tensor(a!)? input_scale, Tensor(b!)? input_amax, Tensor scales, Tensor(c!) amaxes, "
    "int input, int dp, int gradient, str forward_dtype, str dtype, bool power_of_two, "
    "float amax_floor"
)

SCHEMAS = {
    "attention": f"({ARGUMENTS}) -> (Tensor o, Tensor lse, Tensor max_logit)",  # differentiable
    "forward": f"({ARGUMENTS}) -> (Tensor o, Tensor lse, Tensor max_logit)",
    "forward_minimal": f"({MINIMAL}) -> (Tensor o, Tensor lse)",
    "inference": f"({MINIMAL}) -> Tensor",
    "inference_plain": "(Tensor q, Tensor k, Tensor v, bool causal=False) -> Tensor",  # bhsd
    "backward": f"({INCOMING}, {ARGUMENTS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    "backward_minimal": f"(Tensor dout, Tensor o, Tensor lse, {MINIMAL}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
    "backward_minimal_out": f"({OUTGOING}, Tensor dout, Tensor o, Tensor lse, {MINIMAL}) -> ()",
    "backward_out": f"({OUTGOING}, {INCOMING}, {ARGUMENTS}) -> (Tensor dbias, Tensor dsink)",
    # amax: the largest magnitudes before scaling, of S and O, and of dP, dQ, dK and dV
    "fp8_forward": f"({FP8_FORWARD}, {ARGUMENTS}) -> "
    "(Tensor o, Tensor lse, Tensor max_logit, Tensor amax)",
    "fp8_backward": f"({INCOMING}, {FP8_BACKWARD}, {ARGUMENTS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink, Tensor amax)",
    # The same, with amaxes that are maxima into given memory, and given memory for gradients.
    "fp8_forward_amax": f"(Tensor(a!)? s_amax, Tensor(b!)? o_amax, {FP8_FORWARD}, {ARGUMENTS}) -> "
    "(Tensor o, Tensor lse, Tensor max_logit)",
    "fp8_backward_out": f"({OUTGOING}, Tensor(d!)? dp_amax, Tensor(e!)? dqkv_amax, {INCOMING}, "
    f"{FP8_BACKWARD_SCALES}, {ARGUMENTS}) -> (Tensor dbias, Tensor dsink)",
    # With the casts, of and to tensors of 16 bits. O has merged heads; `saved` is what backward
    # needs, and it needs only the shapes and the type of q, k and v
    "fp8_attention_forward": f"({FP8_ATTENTION_FORWARD}, {ARGUMENTS}) -> (Tensor o, Tensor saved)",
    "fp8_attention_forward_minimal": f"({FP8_ATTENTION_FORWARD}, {MINIMAL}) -> "
    "(Tensor o, Tensor saved)",
    "fp8_attention_backward": f"({FP8_ATTENTION_BACKWARD}, {ARGUMENTS}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
    "fp8_attention_backward_minimal": f"({FP8_ATTENTION_BACKWARD}, {MINIMAL}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
    # Parts of a problem: O and gradients may be float32 where q has 16 bits, and slices of larger
    # tensors. max_logit has the strides of lse, and is written where the option max_logit is given
    # accumulate: forward merges O and LSE with those that are there; backward adds to dQ (1) and to
    # dK and dV (2). False as the last result: no engine of the problem can, and nothing was done
    "part_forward": "(Tensor(a!) o, Tensor(b!) lse, Tensor(c!)? max_logit, bool accumulate, "
    f"{ARGUMENTS}) -> bool",
    # The same call as data, and its memory: for replay. See src/torch/replay.cpp
    "record_part_forward": "(Tensor(a!) o, Tensor(b!) lse, Tensor(c!)? max_logit, "
    f"bool accumulate, {ARGUMENTS}) -> (Tensor launch, Tensor memory)",
    "record_part_backward": f"({OUTGOING}, {INCOMING}, int accumulate, {ARGUMENTS}) -> "
    "(Tensor launch, Tensor memory)",
    "replay": "(Tensor code, Tensor launches, Tensor transport, Tensor[] inputs) -> Tensor[]",
    "part_backward": f"({OUTGOING}, {INCOMING}, int accumulate, {ARGUMENTS}) -> "
    "(Tensor dbias, Tensor dsink, bool ran)",
    "fp8_part_forward": "(Tensor(a!) o, Tensor(b!) lse, Tensor(c!)? max_logit, "
    f"{FP8_FORWARD_SCALES}, {ARGUMENTS}) -> ()",
    "fp8_part_backward": f"({OUTGOING}, {INCOMING}, {FP8_BACKWARD_SCALES}, {ARGUMENTS}) -> "
    "(Tensor dbias, Tensor dsink)",
    "explain": f"({ARGUMENTS}) -> str",
    # KV caches; ragged and padded batches
    "kv_cache_append": "(Tensor new_k, Tensor new_v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor? page_table, Tensor cu_new, Tensor cu_cached, bool reindex=False, "
    "Tensor? k_descale=None, Tensor? v_descale=None) -> ()",
    "thd_to_bshd": "(Tensor thd, Tensor cu_seqlens, Tensor? offsets, SymInt max_seqlen) -> Tensor",
    "bshd_to_thd": "(Tensor bshd, Tensor cu_seqlens, Tensor? offsets, SymInt tokens) -> Tensor",
    "cu_seqlens_from_lengths": "(Tensor lengths) -> Tensor",
    "cu_seqlens_from_mask": "(Tensor mask, bool marks_tokens=True) -> Tensor",
    # Random state
    "rng_fill": "(Tensor(a!) rng_state, int seed, int offset) -> ()",
    "rng_fill_captured": "(Tensor(a!) rng_state, Tensor seed, Tensor? offset, "
    "int offset_in_graph) -> ()",
    "rng_advance": "(Tensor(a!) rng_state, int increment) -> ()",
    "dropout_mask": "(Tensor rng_state, float dropout, SymInt batch, SymInt heads, SymInt rows, "
    "SymInt cols, Tensor? origin=None) -> Tensor",
    # Merging partial results by LSE; context parallelism
    "merge": "(Tensor[] o, Tensor[] lse) -> (Tensor o, Tensor lse)",
    "merge_into": "(Tensor(a!) o, Tensor(b!) lse, Tensor part_o, Tensor part_lse) -> ()",
    "round_o": "(Tensor(a!) o, Tensor sums, Tensor lse) -> ()",
    "cp_read_half": "(Tensor tensor, Tensor cu_seqlens, bool second, bool slabs=False) -> Tensor",
    "cp_lse_correct": "(Tensor(a!) lse, Tensor lse_per_step, Tensor cu_seqlens, bool packed) -> ()",
    "cp_lse_read": "(Tensor lse, Tensor cu_seqlens, bool packed, SymInt half_len) -> Tensor",
    "cp_out_correct": "(Tensor(a!) out, Tensor out_per_step, Tensor lse, Tensor lse_per_step, "
    "Tensor cu_seqlens, bool only_second_half, bool packed) -> ()",
    "cp_grad_correct": "(Tensor(a!) grad, Tensor grad_per_step, Tensor cu_seqlens, str first_half, "
    "str second_half, bool slabs=False) -> ()",
    "cp_partition_indices": "(Tensor cu_seqlens, SymInt tokens, int world_size, "
    "int rank) -> Tensor",
    "cp_to_rank_order": "(Tensor input, Tensor cu_seqlens, int world_size) -> Tensor",
    "cp_to_sequence_order": "(Tensor input, Tensor cu_seqlens, int world_size) -> Tensor",
    "cp_copy_valid": "(Tensor input, Tensor(a!) output, Tensor cu_seqlens_padded, "
    "Tensor cu_seqlens) -> ()",
    # Softmax over scores in memory; interleaved QKV
    "scaled_softmax_forward": "(Tensor input, Tensor? mask, float scale, str kind) -> Tensor",
    "scaled_softmax_backward": "(Tensor dout, Tensor output, float scale, str kind) -> Tensor",
    "flash_prepare_forward": "(Tensor qkv) -> Tensor",
    "flash_prepare_backward": "(Tensor dq, Tensor dk, Tensor dv) -> Tensor",
    # FP8 casts, of several tensors under one scale too; scales from an amax, or from a history of
    # them that moves by one; fills
    "fp8_quantize": "(Tensor input, Tensor? scale, Tensor(a!)? amax, str dtype) -> "
    "(Tensor output, Tensor scale_inv)",
    "fp8_quantize_current": "(Tensor input, str dtype, bool power_of_two=False, "
    "float amax_floor=0.0) -> (Tensor output, Tensor scale, Tensor scale_inv, Tensor amax)",
    "fp8_quantize_joint": "(Tensor[] inputs, Tensor? scale, Tensor(a!)? amax, str dtype) -> "
    "(Tensor[] outputs, Tensor scale_inv)",
    "fp8_quantize_joint_current": "(Tensor[] inputs, str dtype, bool power_of_two=False, "
    "float amax_floor=0.0) -> (Tensor[] outputs, Tensor scale, Tensor scale_inv, Tensor amax)",
    "fp8_scale": "(Tensor amax, str dtype, bool power_of_two=False, float amax_floor=0.0) -> "
    "(Tensor scale, Tensor scale_inv)",
    "fp8_update_scales": "(Tensor(a!) amax_history, Tensor(b!) scale, Tensor? amax, "
    "str algorithm, str dtype, float margin=0.0) -> ()",
    "fp8_dequantize": "(Tensor input, Tensor? scale_inv, str dtype) -> Tensor",
    "amax": "(Tensor input, Tensor(a!) amax) -> ()",
    "fill": "(Tensor(a!) tensor, float value) -> ()",
    "fill_bytes": "(Tensor(a!) tensor, int value) -> ()",
}

EAGER = frozenset(("explain", "record_part_forward", "record_part_backward", "replay"))


def define(library: torch.library.Library) -> None:
    """Defines every operator. All but EAGER work under torch.compile and export."""
    for name, schema in SCHEMAS.items():
        tags = () if name in EAGER else (torch.Tag.pt2_compliant_tag,)
        library.define(name + schema, tags=tags)
