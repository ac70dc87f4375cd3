"""Names that programs import to describe a call and to query its backend."""
# ruff: noqa: F401

from ._emulation import combine_and_dequantize, combine_and_quantize, get_attention_quantizers
from ._flash_package import FlashAttentionUtils
from ._layouts import get_qkv_format, get_qkv_layout, maybe_contiguous
from ._lengths import (
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
from ._masks import check_set_window_size, get_alibi, get_full_mask
from ._selection import AttentionLogging, AttentionParams, get_attention_backend
