"""The dtypes of TransformerEngine."""

from transformer_engine_jax import DType

__all__ = ["DType"]
