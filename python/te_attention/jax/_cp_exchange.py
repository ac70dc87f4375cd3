"""Rows of devices that hold stripes, exchanged for rows that are adjacent, and back.

The parts of single stripes shift a mask by whole stripes. Dropout and ALiBi need the position of
each row and column, and so do windows of sequences whose diagonals differ, and masks that an origin
of the caller moves; a ring computes no stripes of several rows. Such calls run in another layout,
between two all-to-all messages.
"""

import jax
import jax.numpy as jnp

from te_attention.jax._call import Options
from te_attention.jax._cp_parts import Shape

ROWS_AT = {"q": 1, "k": 1, "v": 1, "o": 1, "lse": 2, "max": 2, "bias": 2}  # the dimension of rows


def _needs_adjacent_rows(shape: Shape, options: Options, arrays: dict) -> bool:
    if shape.layout != "striped" or shape.size == 1:
        return False
    if shape.stripe > 1:
        return shape.strategy == "ring"
    has_window = max(options.window_left, options.window_right) >= 0
    is_moved = "origin" in arrays and (has_window or options.mask != "none")
    needs_positions = options.dropout or options.alibi or "slopes" in arrays
    return bool(needs_positions or (not shape.aligned and (has_window or is_moved)))


def adjacent(shape: Shape, options: Options, arrays: dict) -> Shape:
    """The shape of the parts; its `held` is the order of the caller's rows where that is another.

    "zigzag" keeps causal work even. Windows are short, so that "contiguous" needs fewer steps.
    """
    if not _needs_adjacent_rows(shape, options, arrays):
        return shape
    halves = all(rows // shape.stripe % 2 == 0 for rows in (shape.rows_q, shape.rows_kv))
    is_zigzag = halves and "causal" in options.mask and options.window_left < 0
    layout = "zigzag" if is_zigzag else "contiguous"
    return shape._replace(layout=layout, stripe=1, held=(shape.layout, shape.stripe))


def _first_of(start: jax.Array, source: jax.Array, size: int) -> jax.Array:
    """The index among the rows of a device of its first row that is not before `start`."""
    return -((source - start) // size)


def _indices(shape: Shape, rows: int, back: bool) -> tuple[jax.Array, jax.Array]:
    """Rows that a device sends, ``[devices, rows]``, and where each row is among those received.

    Messages have the same number of rows: the last one may be a row that the receiver does not use.
    """
    n, me = shape.size, jax.lax.axis_index(shape.axis)
    piece_rows = rows // shape.pieces
    slots = jnp.arange(-(-piece_rows // n))
    devices = jnp.arange(n)[:, None]
    row = jnp.arange(rows)
    sent = []
    for piece in range(shape.pieces):
        if back:
            start = shape.start(me, piece, rows)
            position = (_first_of(start, devices, n) + slots) * n + devices
            sent.append(jnp.clip(position - start, 0, piece_rows - 1) + piece * piece_rows)
        else:
            start = shape.start(devices, piece, rows)
            sent.append(jnp.clip(_first_of(start, me, n) + slots, 0, rows - 1))
    if back:
        chunk = (row * n + me) // piece_rows
        piece = (chunk >= n).astype(jnp.int32)
        other = jnp.where(piece > 0, 2 * n - 1 - chunk, chunk)
        slot = row - _first_of(chunk * piece_rows, me, n)
    else:
        piece = row // piece_rows
        start = jnp.stack([shape.start(me, i, rows) for i in range(shape.pieces)])[piece]
        position = start + row % piece_rows
        other = position % n
        slot = position // n - _first_of(start, other, n)
    place = (other * shape.pieces + piece) * len(slots) + slot
    return jnp.concatenate(sent, axis=1), place


def _exchange(shape: Shape, x: jax.Array, axis: int, back: bool) -> jax.Array:
    _, stripe = shape.held
    stripes = x.shape[axis] // stripe
    sent, place = _indices(shape, stripes, back)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    rows = x.reshape(*before, stripes, stripe, *after)
    messages = jnp.take(rows, sent, axis=axis, mode="clip")
    received = jax.lax.all_to_all(messages, shape.axis, axis, axis)
    received = received.reshape(*before, sent.size, stripe, *after)
    return jnp.take(received, place, axis=axis, mode="clip").reshape(x.shape)


def exchanged(shape: Shape, arrays: dict, *, back: bool = False) -> dict:
    """Arrays of the caller's rows in the order of the parts, or back; others stay as they are.

    K and V are one message. Those that are gathered need none: all rows are put in order then.
    """
    out = dict(arrays)
    if not shape.held:
        return out
    if "k" in out and shape.strategy == "ring":
        dim = out["k"].shape[-1]
        both = _exchange(shape, jnp.concatenate([out["k"], out["v"]], axis=-1), 1, back)
        out["k"], out["v"] = both[..., :dim], both[..., dim:]
    for name, axis in ROWS_AT.items():
        if name in out and name not in "kv" and out[name].shape[axis] > 1:
            out[name] = _exchange(shape, out[name], axis, back)
    return out
