"""The parts of attention whose rows several devices share, and the operands of each part.

All devices trace one program: the positions of a part are data (`origin`), computed from the index
of the device. A part that no device needs, by the schedule that all front ends share, does not
exist; one that a device does not need costs it a launch without arithmetic.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_attention._cp_schedule import schedule
from te_attention.jax._arguments import cumulative
from te_attention.jax._call import Options
from te_attention.jax._sharding import moved

LAYOUTS = ("contiguous", "zigzag", "striped")
RING, ZIGZAG, CONTIGUOUS = 0, 0, 1  # strategy and shardings of te_attention_cp.h
# A part has its own diagonal: the offset of the whole problem's is in its origin.
TOP_LEFT = {"bottom_right": "none", "causal_bottom_right": "causal"}


class Shape(NamedTuple):
    """How the rows of a problem are shared."""

    axis: str
    size: int  # devices
    strategy: str
    layout: str
    rows_q: int  # of one device
    rows_kv: int

    @property
    def pieces(self) -> int:
        """Runs of rows of one device that follow each other in the sequence."""
        return 2 if self.layout == "zigzag" else 1

    @property
    def is_direct(self) -> bool:
        """Whether each row of O has one part."""
        return self.strategy == "all_gather" and self.layout != "striped"

    def start(self, member: jax.Array, piece: int, rows: int) -> jax.Array:
        """Position of the first row of a piece; those of striped rows are `size` apart."""
        if self.layout == "striped":
            return member
        if self.layout == "contiguous":
            return member * rows
        chunk = member if piece == 0 else 2 * self.size - 1 - member
        return chunk * (rows // 2)


class Part(NamedTuple):
    """Rows of the queries of this device, with rows of the keys that it holds at one step.

    A number that depends on the device is an array.
    """

    piece: int  # of query
    q: tuple[int, int]  # first row, and how many
    kv: tuple[int, int]
    row: jax.Array  # position of the first row
    column: jax.Array
    source: jax.Array | None  # the device that owns the keys; None: keys of all devices, in order
    options: Options

    @property
    def kv_piece(self) -> int:
        """The piece of key, of those that one device owns."""
        return self.kv[0] // max(self.kv[1], 1)


def steps_of(shape: Shape, options: Options) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The pairs of pieces (of query, of key) that some device needs, for each step of a ring."""
    causal, n = "causal" in options.mask, shape.size
    if shape.layout == "striped":
        bounds = (_stripe_window(options, t, n) for t in range(n))
        return tuple(((0, 0),) if bound is not None else () for bound in bounds)
    out = [set() for _ in range(n)]
    rows_q, rows_kv = shape.rows_q // shape.pieces, shape.rows_kv // shape.pieces
    for rank in range(n):
        parts, _ = schedule(
            world=n,
            rank=rank,
            strategy=RING,
            sharding=ZIGZAG if shape.layout == "zigzag" else CONTIGUOUS,
            positions=1,
            causal=int(causal),
            bottom_right=int("bottom_right" in options.mask),
            window_left=options.window_left + 1,
            window_right=options.window_right + 1,
            seqlen_q=n * shape.rows_q,
            seqlen_kv=n * shape.rows_kv,
        )
        for part in parts:
            out[part.step].add((part.q_begin // rows_q, part.kv_begin // rows_kv))
    return tuple(tuple(sorted(pairs)) for pairs in out)


def _stripe_window(options: Options, step: int, size: int) -> tuple[int | None, int | None] | None:
    """Bounds of (column - row) in a striped step, in units of stripes; None: no pair is visible.

    Row i of the device r has position i * size + r. With the keys of device (r - step) mod size,
    whose columns count from 1 if that wraps around, the bounds are the same on every device.
    """
    left = None if options.window_left < 0 else (options.window_left - step) // size
    right = None if options.window_right < 0 else (options.window_right + step) // size
    if "causal" in options.mask:
        right = 0
    if left is not None and right is not None and -left > right:
        return None
    return left, right


def _of_stripes(options: Options, step: int, size: int) -> tuple[Options, int]:
    """The options of a striped step, and the shift of its rows for which no bound is negative."""
    left, right = _stripe_window(options, step, size)
    more = max(0, -left) if left is not None else 0
    if left is not None:
        left += more
    if right is not None:
        right -= more
    causal = "causal" in options.mask
    return options._replace(
        mask="causal" if causal else "none",
        window_left=-1 if left is None else left,
        window_right=-1 if right is None or causal else right,
    ), more


def parts_of_step(
    shape: Shape, options: Options, pairs: Iterable[tuple[int, int]], step: int, me: jax.Array
) -> list[Part]:
    """The parts with the keys of one device."""
    source = (me - step) % shape.size
    rows_q, rows_kv = shape.rows_q // shape.pieces, shape.rows_kv // shape.pieces
    shift = _shift(shape, options)
    if shape.layout == "striped":
        local, more = _of_stripes(options, step, shape.size)
        units = shift // shape.size + more
        row, column = max(units, 0), max(-units, 0) + (source > me)
        return [Part(0, (0, rows_q), (0, rows_kv), row, column, source, local)]
    local = options._replace(mask=TOP_LEFT.get(options.mask, options.mask))
    out = []
    for i, j in pairs:
        row = shape.start(me, i, shape.rows_q) + max(shift, 0)
        column = shape.start(source, j, shape.rows_kv) + max(-shift, 0)
        q, kv = (i * rows_q, rows_q), (j * rows_kv, rows_kv)
        out.append(Part(i, q, kv, row, column, source, local))
    return out


def parts_of_all(shape: Shape, options: Options, me: jax.Array) -> list[Part]:
    """The parts with the keys of all devices in order."""
    rows, shift = shape.rows_q // shape.pieces, _shift(shape, options)
    local = options._replace(mask=TOP_LEFT.get(options.mask, options.mask))
    kv, column = (0, shape.rows_kv * shape.size), max(-shift, 0)
    return [
        Part(
            i,
            (i * rows, rows),
            kv,
            shape.start(me, i, shape.rows_q) + max(shift, 0),
            column,
            None,
            local,
        )
        for i in range(shape.pieces)
    ]


def _shift(shape: Shape, options: Options) -> int:
    """Column - row of the diagonal."""
    return shape.size * (shape.rows_kv - shape.rows_q) * ("bottom_right" in options.mask)


def _some_lengths(shape: Shape, cu: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """cu_seqlens of the rows of a piece that sequences of these lengths have."""
    more = jnp.diff(cu) - start
    if shape.layout == "striped":
        more = -(-more // shape.size)
    return cumulative(jnp.clip(more, 0, rows))


def positions(shape: Shape, me: jax.Array) -> jax.Array:
    """The position in the sequence of each row of this device."""
    rows = shape.rows_q // shape.pieces
    step = shape.size if shape.layout == "striped" else 1
    starts = [shape.start(me, i, shape.rows_q) for i in range(shape.pieces)]
    return jnp.concatenate([start + step * jnp.arange(rows) for start in starts])


def _columns(shape: Shape, part: Part) -> jax.Array:
    """The columns of a part in the whole sequence, traced."""
    first = shape.start(part.source, part.kv_piece, shape.rows_kv)
    step = shape.size if shape.layout == "striped" else 1
    return first + step * jnp.arange(part.kv[1])


def bias_of(shape: Shape, bias: jax.Array, part: Part) -> jax.Array:
    """The bias of a part."""
    if bias.shape[2] > 1:
        bias = jax.lax.slice_in_dim(bias, part.q[0], part.q[0] + part.q[1], axis=2)
    if bias.shape[3] > 1 and part.source is not None:
        bias = jnp.take(bias, _columns(shape, part), axis=3)
    return bias


def add_rows(sums: jax.Array, first: int, more: jax.Array, axis: int = 1) -> jax.Array:
    """Adds gradients of some rows to `sums`, in the precision of `sums`.

    Without a scatter, in whose compilation jaxlib 0.11.2 crashes here.
    """
    after = sums.shape[axis] - first - more.shape[axis]
    padding = [(0, 0)] * sums.ndim
    padding[axis] = (first, after)
    return sums + jnp.pad(more.astype(sums.dtype), padding)


def add_dbias(shape: Shape, total: jax.Array, part: Part, dbias: jax.Array) -> jax.Array:
    """The gradient of the bias with that of a part."""
    first = part.q[0] if total.shape[2] > 1 else 0
    if total.shape[3] == 1 or part.source is None:
        return add_rows(total, first, dbias, axis=2)
    whole = jnp.zeros((*dbias.shape[:3], total.shape[3]), dbias.dtype)
    put = jax.lax.dynamic_update_slice_in_dim
    if shape.layout == "striped":
        grid = whole.reshape(*dbias.shape, shape.size)
        some = put(grid, dbias[..., None], part.source, axis=4).reshape(whole.shape)
    else:
        some = put(whole, dbias, shape.start(part.source, part.kv_piece, shape.rows_kv), axis=3)
    return add_rows(total, first, some, axis=2)


def arrays_of(shape: Shape, arrays: dict, part: Part, keys: tuple, me: jax.Array) -> dict:
    """The operands of a part."""
    q, kv = part.q, part.kv
    whole = keys[0].shape[1] == kv[1]
    out = dict(arrays)
    out["q"] = jax.lax.slice_in_dim(arrays["q"], q[0], q[0] + q[1], axis=1)
    for name, x in zip("kv", keys, strict=True):
        out[name] = x if whole else jax.lax.slice_in_dim(x, kv[0], kv[0] + kv[1], axis=1)
    if "bias" in arrays:
        out["bias"] = bias_of(shape, arrays["bias"], part)
    if "cu_seqlens_q" in arrays:
        start = shape.start(me, part.piece, shape.rows_q)
        out["cu_seqlens_q"] = _some_lengths(shape, arrays["cu_seqlens_q"], start, q[1])
    if "cu_seqlens_kv" in arrays and part.source is not None:
        start = shape.start(part.source, part.kv_piece, shape.rows_kv)
        out["cu_seqlens_kv"] = _some_lengths(shape, arrays["cu_seqlens_kv"], start, kv[1])
    o = part.options
    masked = o.mask != "none" or o.window_left >= 0 or o.window_right >= 0
    if masked or o.dropout or o.alibi or "slopes" in arrays:
        out["origin"] = moved(arrays.get("origin"), 0, 0, part.row, part.column)
    return out
