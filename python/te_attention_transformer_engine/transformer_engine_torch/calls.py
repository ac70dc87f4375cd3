"""The arguments of fused_attn_fwd and fused_attn_bwd, in TransformerEngine's order and names."""

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine_torch.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)


class ForwardCall(NamedTuple):
    """The arguments of fused_attn_fwd, in its order.

    Three arguments have no effect: set_zero, because every row of O is written, with zeros for
    padding; rng_elts_per_thread, because dropout needs one draw of the random state; and
    cuda_graph, because every call can be captured.
    """

    max_seqlen_q: int
    max_seqlen_kv: int
    is_training: bool
    attn_scale: float
    p_dropout: float
    set_zero: bool
    qkv_layout: NVTE_QKV_Layout
    bias_type: NVTE_Bias_Type
    attn_mask_type: NVTE_Mask_Type
    softmax_type: NVTE_Softmax_Type
    window_size: tuple[int, int]
    bottom_right_diagonal: bool
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    Q: Tensor
    K: Tensor
    V: Tensor
    fake_dtype: torch.dtype
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    page_table_k: Tensor | None
    page_table_v: Tensor | None
    s_quantizer: object
    o_quantizer: object
    Bias: Tensor | None
    SoftmaxOffset: Tensor | None
    rng_gen: torch.Generator | None
    rng_elts_per_thread: int
    return_max_logit: bool
    cuda_graph: bool

    deterministic = False  # an argument of backward only


class BackwardCall(NamedTuple):
    """The arguments of fused_attn_bwd, in order. set_zero and cuda_graph have no effect."""

    max_seqlen_q: int
    max_seqlen_kv: int
    attn_scale: float
    p_dropout: float
    set_zero: bool
    qkv_layout: NVTE_QKV_Layout
    bias_type: NVTE_Bias_Type
    attn_mask_type: NVTE_Mask_Type
    softmax_type: NVTE_Softmax_Type
    window_size: tuple[int, int]
    bottom_right_diagonal: bool
    deterministic: bool
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    Q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor  # noqa: E741
    dO: Tensor  # noqa: N815
    fake_dtype: torch.dtype
    dqkv_type: DType
    Aux_CTX_Tensors: list[Tensor]
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    s_quantizer: object
    dp_quantizer: object
    dqkv_quantizer: object
    cuda_graph: bool

    # Arguments of forward only.
    is_training = True
    page_table_k = page_table_v = None
    return_max_logit = False
