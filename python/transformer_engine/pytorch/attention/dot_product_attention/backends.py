"""The three backends that DotProductAttention chooses from."""

from transformer_engine.pytorch.attention.dot_product_attention._emulation import FP8EmulationFunc
from transformer_engine.pytorch.attention.dot_product_attention._flash import (
    FlashAttention,
    _PrepareQKVForFA,
)
from transformer_engine.pytorch.attention.dot_product_attention._fused import (
    FusedAttention,
    FusedAttnFunc,
)
from transformer_engine.pytorch.attention.dot_product_attention._unfused import (
    UnfusedDotProductAttention,
)

__all__ = [
    "FP8EmulationFunc",
    "FlashAttention",
    "FusedAttention",
    "FusedAttnFunc",
    "UnfusedDotProductAttention",
    "_PrepareQKVForFA",
]
