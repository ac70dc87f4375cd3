"""Helpers for masks: runs of segment ids, and sliding windows."""

from typing import Any

import jax
import jax.numpy as jnp


def run_length_fill(segment_ids: Any) -> jax.Array:
    """Of each token the length of the run of equal ids that it is in; 0 in padding.

    Runs are along the last axis; an id may have several.
    """
    ids = jnp.asarray(segment_ids)
    rows = ids.shape[-1]
    index = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), ids.shape)
    changes = ids[..., 1:] != ids[..., :-1]
    edge = jnp.ones((*ids.shape[:-1], 1), bool)
    starts = jnp.concatenate([edge, changes], axis=-1)[..., :rows]
    ends = jnp.concatenate([changes, edge], axis=-1)[..., :rows]
    axis = ids.ndim - 1
    first = jax.lax.cummax(jnp.where(starts, index, 0), axis=axis)
    last = jax.lax.cummin(jnp.where(ends, index, rows), axis=axis, reverse=True)
    return jnp.where(ids == 0, 0, last - first + 1)


def make_swa_mask(
    segment_pos_q: Any,
    segment_pos_kv: Any,
    window_size: tuple[int, int] | None = None,
    dtype: Any = jnp.float32,
    segment_ids_q: Any = None,
    segment_ids_kv: Any = None,
) -> jax.Array:
    """A mask ``[batch, 1, rows, keys]`` of a sliding window, 1 where a row attends to a key.

    Args:
        segment_pos_q, segment_pos_kv: ``[batch, rows]``: the position of each token in its
            sequence.
        window_size: (left, right), both inclusive; negative or None: no limit.
        dtype: of the mask.
        segment_ids_q, segment_ids_kv: if given, positions count from the end of each run: the
            bottom-right diagonal. The right limit is ignored then.
    """
    left, right = (-1, -1) if window_size is None else window_size
    q, kv = jnp.asarray(segment_pos_q)[..., None], jnp.asarray(segment_pos_kv)[..., None, :]
    if segment_ids_q is not None and segment_ids_kv is not None:
        q = q - run_length_fill(segment_ids_q)[..., None]
        kv = kv - run_length_fill(segment_ids_kv)[..., None, :]
        right = -1
    attends = jnp.ones(jnp.broadcast_shapes(q.shape, kv.shape), bool)
    if left is not None and left >= 0:
        attends &= kv >= q - left
    if right is not None and right >= 0:
        attends &= kv <= q + right
    return attends[..., None, :, :].astype(dtype)
