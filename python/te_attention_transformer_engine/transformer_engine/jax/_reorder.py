"""The orders of tokens that balance causal attention between ranks, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine.jax._enums import ReorderStrategy, require_enum


def reorder_causal_dual_chunk_swap(
    tensor: Any, cp_size: int, seq_dim: int, to_contiguous: bool
) -> jax.Array:
    """Gives rank r the chunks r and 2n - 1 - r of 2n, or restores the order."""
    x = jnp.asarray(tensor)
    if cp_size == 1:
        return x
    rows, chunks = x.shape[seq_dim], 2 * cp_size
    if cp_size % 2:
        raise ValueError(f"cp_size is {cp_size}; needs an even number")
    if rows % chunks:
        raise ValueError(f"dimension {seq_dim} is {rows}; needs a multiple of {chunks}")
    order = np.stack([np.arange(cp_size), chunks - 1 - np.arange(cp_size)], axis=1).ravel()
    if to_contiguous:
        order = np.argsort(order)
    axis = seq_dim % x.ndim
    parts = x.reshape(*x.shape[:axis], chunks, rows // chunks, *x.shape[axis + 1 :])
    return jnp.take(parts, order, axis=axis).reshape(x.shape)


def reorder_causal_striped(
    tensor: Any, cp_size: int, seq_dim: int, is_inverse: bool, stripe_size: int = 1
) -> jax.Array:
    """Gives rank r every n-th stripe of tokens, or restores the order."""
    x = jnp.asarray(tensor)
    rows = x.shape[seq_dim]
    if stripe_size <= 0:
        raise ValueError(f"stripe_size is {stripe_size}; needs at least 1")
    if rows % (cp_size * stripe_size):
        needed = f"a multiple of {cp_size * stripe_size}"
        raise ValueError(f"dimension {seq_dim} is {rows}; needs {needed}")
    axis = seq_dim % x.ndim
    stripes = rows // (cp_size * stripe_size)
    split = (cp_size, stripes) if is_inverse else (stripes, cp_size)
    parts = x.reshape(*x.shape[:axis], *split, stripe_size, *x.shape[axis + 1 :])
    return jnp.swapaxes(parts, axis, axis + 1).reshape(x.shape)


def _reorder(
    tensor: Any, strategy: object, cp_size: int, seq_dim: int, stripe_size: int | None, back: bool
) -> jax.Array:
    require_enum("strategy", strategy, ReorderStrategy)
    if strategy == ReorderStrategy.Striped:
        size = 1 if stripe_size is None else stripe_size
        return reorder_causal_striped(tensor, cp_size, seq_dim, back, size)
    if stripe_size is not None:
        raise ValueError(f"stripe_size is {stripe_size}; needs None with DualChunkSwap")
    return reorder_causal_dual_chunk_swap(tensor, cp_size, seq_dim, back)


def reorder_causal_load_balancing(
    tensor: Any,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> jax.Array:
    """Tokens in the order of a strategy, which a split of seq_dim then gives to the ranks."""
    return _reorder(tensor, strategy, cp_size, seq_dim, stripe_size, back=False)


def inverse_reorder_causal_load_balancing(
    tensor: Any,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> jax.Array:
    """Tokens in their own order again."""
    return _reorder(tensor, strategy, cp_size, seq_dim, stripe_size, back=True)
