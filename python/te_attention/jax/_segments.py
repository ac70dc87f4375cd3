"""Packed rows: segment ids to the start and length of each sequence, inside the program."""

import jax
import jax.numpy as jnp

from te_attention.jax._arguments import cumulative


def hits_of(ids: jax.Array, segments: int) -> jax.Array:
    """Whether a row has the id 1 .. segments, ``[batch, rows, segments]``."""
    return ids[:, :, None] == jnp.arange(1, segments + 1, dtype=ids.dtype)


def spans_of(ids: jax.Array, segments: int) -> tuple[jax.Array, jax.Array]:
    """Start tokens and cu_seqlens, int32 ``[batch * segments + 1]``, of ids ``[batch, rows]``.

    Sequence ``b * segments + n - 1`` is the run of id n in row b; it starts at that token of the
    flattened rows. Absent ids have length 0. Takes time and memory rows * segments.
    """
    batch, rows = ids.shape
    hits = hits_of(ids, segments)
    lengths = jnp.sum(hits, axis=1, dtype=jnp.int32)
    first = jnp.argmax(hits, axis=1).astype(jnp.int32) if rows else jnp.zeros_like(lengths)
    starts = first + rows * jnp.arange(batch, dtype=jnp.int32)[:, None]
    end = jnp.full(1, batch * rows, jnp.int32)
    return jnp.concatenate([starts.ravel(), end]), cumulative(lengths.ravel())
