"""The dtypes of TransformerEngine; its quantizers are not here."""

from transformer_engine.jax.quantize.helper import DType

__all__ = ["DType"]
