"""The three backends that DotProductAttention chooses from."""
# ruff: noqa: F401

from ._emulation import FP8EmulationFunc
from ._flash import FlashAttention, _PrepareQKVForFA
from ._fused import FusedAttention, FusedAttnFunc
from ._unfused import UnfusedDotProductAttention
