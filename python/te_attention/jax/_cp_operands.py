"""The operands of a part, and where its gradients belong."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from te_attention.jax._arguments import cumulative
from te_attention.jax._call import Options
from te_attention.jax._cp_parts import Part, Shape
from te_attention.jax._segments import hits_of
from te_attention.jax._sharding import moved

SIDES = ("q", "kv")
TOKENS = ("q", "k", "v", "o", "dout")  # rows of heads
ROWS = ("lse", "dlse")  # numbers of rows, [batch, heads, rows]


def spans_of(shape: Shape, ids: dict, me: jax.Array) -> dict:
    """First position and length of each sequence in its whole row, int32 ``[batch, segments]``.

    `ids`: those of the rows of this device. One collective: an id is one run, so its first and
    last position over all devices say which.
    """
    far = jnp.iinfo(jnp.int32).max
    ends = []
    for side, rows in zip(SIDES, (shape.rows_q, shape.rows_kv), strict=True):
        of = positions(shape._replace(rows_q=rows), me)[None, :, None]
        hits = hits_of(ids[side], shape.segments)
        ends += [jnp.where(hits, x, far).min(1, initial=far) for x in (of, -of)]
    ends = jax.lax.pmin(jnp.stack(ends), shape.axis)
    out = {}
    for side, first, last in zip(SIDES, ends[::2], -ends[1::2], strict=True):
        is_there = first < far
        out[f"start_{side}"] = jnp.where(is_there, first, 0)
        out[f"length_{side}"] = jnp.where(is_there, last - first + 1, 0)
    return out


class Run(NamedTuple):
    """The rows of a part that belong to each sequence, int32 ``[batch, segments]``."""

    begin: jax.Array
    count: jax.Array
    position: jax.Array  # of the first of them in its sequence


def _run(arrays: dict, side: str, start: jax.Array, rows: int, stride: int) -> Run:
    """Of `rows` rows from position `start` on."""
    first, length = arrays[f"start_{side}"], arrays[f"length_{side}"]
    begin = jnp.clip(-((start - first) // stride), 0, rows)
    count = jnp.clip(-((start - first - length) // stride), 0, rows) - begin
    position = jnp.where(count > 0, begin * stride + start - first, 0)
    return Run(begin, count, position)


def _diagonal(shape: Shape, arrays: dict) -> int | jax.Array:
    """Column - row of the diagonal, for each sequence where that differs."""
    if not shape.bottom_right:
        return 0
    if shape.segments:
        return arrays["length_kv"] - arrays["length_q"]
    whole = {"q": shape.size * shape.rows_q, "kv": shape.size * shape.rows_kv}
    q, kv = (
        jnp.diff(arrays[name]) if (name := f"cu_seqlens_{side}") in arrays else whole[side]
        for side in SIDES
    )
    return kv - q


def _origin(
    shape: Shape, arrays: dict, part: Part, runs: tuple[Run, Run] | None
) -> jax.Array | None:
    """The origin of a part, or of each of its sequences with a shift; None where none is needed."""
    o = part.options
    masked = o.mask != "none" or o.window_left >= 0 or o.window_right >= 0
    if not (masked or o.dropout or o.alibi or "slopes" in arrays):
        return None
    given, shift = arrays.get("origin"), _diagonal(shape, arrays)
    row, column = (part.row, part.column) if runs is None else (run.position for run in runs)
    if shape.stride > 1 and runs is None and isinstance(shift, int):
        units = shift // shape.size + part.more
        return moved(given, 0, 0, max(units, 0), max(-units, 0) + (column > row))
    if shape.stride > 1:
        shift = (shift + row - column) // shape.size + part.more
        row = column = 0
    elif runs is None and isinstance(shift, int) and not shift:
        return moved(given, 0, 0, row, column)
    count = arrays["q"].shape[0] * max(shape.segments, 1)
    row, column, shift = (
        jnp.broadcast_to(jnp.ravel(jnp.asarray(x, jnp.int32)), count) for x in (row, column, shift)
    )
    zero = jnp.zeros_like(row)
    words = jnp.stack([shift, jnp.where(shift < 0, -1, 0)], axis=-1).astype(jnp.uint32)
    return jnp.concatenate([moved(given, zero, zero, row, column), words], axis=-1)


def _some_lengths(shape: Shape, cu: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """cu_seqlens of the rows of a piece that sequences of these lengths have."""
    more = jnp.diff(cu) - start
    if shape.stride > 1:
        more = -(-more // shape.size)
    return cumulative(jnp.clip(more, 0, rows))


def positions(shape: Shape, me: jax.Array) -> jax.Array:
    """The position in the sequence of each row of this device."""
    rows = shape.rows_q // shape.pieces
    starts = [shape.start(me, i, shape.rows_q) for i in range(shape.pieces)]
    return jnp.concatenate([start + shape.stride * jnp.arange(rows) for start in starts])


def _columns(shape: Shape, part: Part) -> jax.Array:
    """The columns of a part in the whole sequence, traced."""
    first = shape.start(part.source, part.kv_piece, shape.rows_kv)
    return first + shape.stride * jnp.arange(part.kv[1])


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
    if shape.stride > 1:
        grid = whole.reshape(*dbias.shape, shape.size)
        some = put(grid, dbias[..., None], part.source, axis=4).reshape(whole.shape)
    else:
        some = put(whole, dbias, shape.start(part.source, part.kv_piece, shape.rows_kv), axis=3)
    return add_rows(total, first, some, axis=2)


def arrays_of(shape: Shape, arrays: dict, part: Part, keys: tuple, me: jax.Array) -> dict:
    """The operands of a part."""
    q, kv = part.q, part.kv
    whole = keys[0].shape[1] == kv[1]
    spans = [f"{name}_{side}" for name in ("start", "length") for side in SIDES]
    out = {name: x for name, x in arrays.items() if name not in spans}
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
    runs = None
    if shape.segments:
        strides = (shape.stride, 1 if part.source is None else shape.stride)
        sides = zip(SIDES, (part.row, part.column), (q[1], kv[1]), strides, strict=True)
        runs = tuple(_run(arrays, *side) for side in sides)
        for side, run, rows in zip(SIDES, runs, (q[1], kv[1]), strict=True):
            batch = run.begin.shape[0]
            starts = run.begin + rows * jnp.arange(batch, dtype=jnp.int32)[:, None]
            end = jnp.full(1, batch * rows, jnp.int32)
            out[f"offsets_{side}"] = jnp.concatenate([starts.ravel(), end])
            out[f"cu_seqlens_{side}"] = cumulative(run.count.ravel())
    origin = _origin(shape, arrays, part, runs)
    return out if origin is None else out | {"origin": origin}


def options_of(shape: Shape, part: Part) -> Options:
    """The options of a part: its rows are tokens where they are of several sequences."""
    if not shape.segments:
        return part.options
    rows = {"max_seqlen_q": part.q[1], "max_seqlen_kv": part.kv[1]}
    return part.options._replace(format="thd", **rows)


def ragged(arrays: dict) -> dict:
    """Operands whose rows are tokens one after the other."""
    out = dict(arrays)
    for name in TOKENS:
        if name in arrays:
            out[name] = arrays[name].reshape(-1, *arrays[name].shape[-2:])
    for name in ROWS:
        if name in arrays:
            x = arrays[name].swapaxes(1, 2)
            out[name] = x.reshape(-1, x.shape[-1])
    return out


def dense(results: dict, batch: int) -> dict:
    """Results in the shapes of a batch, of tokens."""
    out = dict(results)
    for name, x in results.items():
        if name in ("o", "dq", "dk", "dv"):
            out[name] = x.reshape(batch, -1, *x.shape[1:])
        elif name in ("lse", "max"):
            out[name] = x.reshape(batch, -1, x.shape[-1]).swapaxes(1, 2)
    return out
