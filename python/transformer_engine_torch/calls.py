"""The arguments of fused_attn_fwd and fused_attn_bwd, in TransformerEngine's order and names."""

from collections import namedtuple

_OPTIONS = "qkv_layout bias_type attn_mask_type softmax_type window_size bottom_right_diagonal"
_PADDED = "cu_seqlens_q_padded cu_seqlens_kv_padded"
_FORWARD = (
    f"max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero {_OPTIONS} "
    f"cu_seqlens_q cu_seqlens_kv Q K V fake_dtype {_PADDED} page_table_k page_table_v "
    "s_quantizer o_quantizer Bias SoftmaxOffset rng_gen rng_elts_per_thread return_max_logit "
    "cuda_graph"
)
_BACKWARD = (
    f"max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero {_OPTIONS} deterministic "
    f"cu_seqlens_q cu_seqlens_kv Q K V O dO fake_dtype dqkv_type Aux_CTX_Tensors {_PADDED} "
    "s_quantizer dp_quantizer dqkv_quantizer cuda_graph"
)


class ForwardCall(namedtuple("ForwardCall", _FORWARD)):
    """What fused_attn_fwd takes, in its order.

    Three have no effect: set_zero, since every row of O is written, with zeros where there is no
    token; rng_elts_per_thread, since all of dropout follows from one draw; and cuda_graph, since
    every call can be captured.
    """

    __slots__ = ()
    deterministic = False  # what backward alone has


class BackwardCall(namedtuple("BackwardCall", _BACKWARD)):
    """What fused_attn_bwd takes, in its order. set_zero and cuda_graph are as in ForwardCall."""

    __slots__ = ()
    # What forward alone has.
    is_training = True
    page_table_k = page_table_v = None
    return_max_logit = False
