"""What programs import to describe a call and to ask which backend would run it."""

from transformer_engine.pytorch.attention.dot_product_attention._emulation import (
    combine_and_dequantize,
    combine_and_quantize,
    get_attention_quantizers,
)
from transformer_engine.pytorch.attention.dot_product_attention._flash_package import (
    FlashAttentionUtils,
)
from transformer_engine.pytorch.attention.dot_product_attention._layouts import (
    get_qkv_format,
    get_qkv_layout,
    maybe_contiguous,
)
from transformer_engine.pytorch.attention.dot_product_attention._lengths import (
    ConvertBSHDtoTHD,
    ConvertTHDtoBSHD,
    PackTensors,
    UnpackTensor,
    get_cu_seqlens,
    get_cu_seqlens_and_indices,
    get_full_cu_seqlens,
    get_indices,
    get_padding_mask,
)
from transformer_engine.pytorch.attention.dot_product_attention._masks import (
    check_set_window_size,
    get_alibi,
    get_full_mask,
)
from transformer_engine.pytorch.attention.dot_product_attention._selection import (
    AttentionLogging,
    AttentionParams,
    get_attention_backend,
)

__all__ = [
    "AttentionLogging",
    "AttentionParams",
    "ConvertBSHDtoTHD",
    "ConvertTHDtoBSHD",
    "FlashAttentionUtils",
    "PackTensors",
    "UnpackTensor",
    "check_set_window_size",
    "combine_and_dequantize",
    "combine_and_quantize",
    "get_alibi",
    "get_attention_backend",
    "get_attention_quantizers",
    "get_cu_seqlens",
    "get_cu_seqlens_and_indices",
    "get_full_cu_seqlens",
    "get_full_mask",
    "get_indices",
    "get_padding_mask",
    "get_qkv_format",
    "get_qkv_layout",
    "maybe_contiguous",
]
