"""TransformerEngine's attention module for Flax Linen."""

from transformer_engine.jax.flax.transformer import DotProductAttention

__all__ = ["DotProductAttention"]


def __getattr__(name: str) -> object:
    """Says what is here. `from ... import` has Python's own text instead."""
    raise AttributeError(
        f"module transformer_engine.jax.flax has no attribute {name}: of TransformerEngine's "
        "modules TE Attention has DotProductAttention"
    )
