"""Attention for JAX: attention() in the convention of jax.nn, under every transformation of JAX."""

from te_attention.jax._cp_keys import reorder
from te_attention.jax.context_parallel import context_parallel
from te_attention.jax.flax import attention_fn
from te_attention.jax.functional import attention, dot_product_attention, ragged_attention
from te_attention.jax.random import dropout_mask
from te_attention.jax.report import Cost, cost, explain

__all__ = [
    "Cost",
    "attention",
    "attention_fn",
    "context_parallel",
    "cost",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "ragged_attention",
    "reorder",
]
