"""Attention modules."""

from .dot_product_attention import DotProductAttention, _attention_backends
from .inference import InferenceParams

__all__ = ["DotProductAttention", "InferenceParams", "_attention_backends"]
