"""The dropout pattern of attention()."""

from typing import Any

import jax
import jax.numpy as jnp

from te_attention.jax import _library
from te_attention.jax._arguments import RANK, number, refuse, rng_state, words


def dropout_mask(
    dropout_key: Any, dropout: float, shape: tuple[int, int, int, int], *, origin: Any = None
) -> jax.Array:
    """Which probabilities attention() keeps for this key: bool ``[batch, heads, rows, columns]``.

    Args:
        dropout_key: as in :func:`attention`.
        dropout: the probability of dropping, from 0 to below 1.
        shape: batch, heads of query, rows and columns.
        origin: as in :func:`attention`.
    """
    rate = number("dropout", dropout, 0.0)
    if not 0 <= rate < 1:
        raise refuse("dropout", dropout, "at least 0 and less than 1")
    if len(shape) != RANK or any(not isinstance(n, int) or n < 0 for n in shape):
        raise refuse("shape", tuple(shape), "batch, heads, rows and columns")
    _library.library()
    where = jnp.zeros(0, jnp.uint32) if origin is None else words("origin", origin)
    result = jax.ShapeDtypeStruct(tuple(shape), jnp.bool_)
    draw = jax.ffi.ffi_call("tea_attention_dropout_mask", result, vmap_method="sequential")
    return draw(rng_state(dropout_key), where, dropout=rate)
