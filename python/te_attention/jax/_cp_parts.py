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
from te_attention.jax._call import Options

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
    stripe: int = 1  # adjacent rows of a striped layout
    bottom_right: bool = False
    segments: int = 0  # bound of the sequences in a row; 0: a row is one sequence
    aligned: bool = True  # whether the diagonal of each sequence is that of the whole rows, at 0
    held: tuple[str, int] | None = None  # layout and stripe of the caller's rows, where another

    @property
    def pieces(self) -> int:
        """Runs of query rows of one device that follow each other in the sequence."""
        if self.layout == "striped" and self.stripe > 1:
            return self.rows_q // self.stripe
        return 2 if self.layout == "zigzag" else 1

    @property
    def stride(self) -> int:
        """The distance of adjacent rows of a piece."""
        return self.size if self.layout == "striped" and self.stripe == 1 else 1

    @property
    def is_direct(self) -> bool:
        """Whether each row of O has one part."""
        return self.strategy == "all_gather" and self.stride == 1

    def start(self, member: jax.Array, piece: int, rows: int) -> jax.Array:
        """Position of the first row of a piece; single stripes follow in steps of `size` rows."""
        if self.layout == "striped":
            return (piece * self.size + member) * self.stripe
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
    row: jax.Array  # position of the first row in the whole row of the batch
    column: jax.Array
    source: jax.Array | None  # the device that owns the keys; None: keys of all devices, in order
    options: Options
    more: int = 0  # added to column - row of the diagonal, in local rows

    @property
    def kv_piece(self) -> int:
        """The piece of key, of those that one device owns."""
        return self.kv[0] // max(self.kv[1], 1)


def steps_of(shape: Shape, options: Options) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The pairs of pieces (of query, of key) that some device needs, for each step of a ring."""
    n = shape.size
    if not shape.aligned:  # positions say nothing of which pairs are visible
        options = options._replace(mask="none", window_left=-1, window_right=-1)
    if shape.stride > 1:
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
            causal=int("causal" in options.mask),
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
    more, local = 0, options._replace(mask=TOP_LEFT.get(options.mask, options.mask))
    if shape.stride > 1:
        local, more = _of_stripes(options, step, shape.size)
    out = []
    for i, j in pairs:
        row, column = shape.start(me, i, shape.rows_q), shape.start(source, j, shape.rows_kv)
        q, kv = (i * rows_q, rows_q), (j * rows_kv, rows_kv)
        out.append(Part(i, q, kv, row, column, source, local, more))
    return out


def parts_of_all(shape: Shape, options: Options, me: jax.Array) -> list[Part]:
    """The parts with the keys of all devices in order."""
    rows, kv = shape.rows_q // shape.pieces, (0, shape.rows_kv * shape.size)
    local = options._replace(mask=TOP_LEFT.get(options.mask, options.mask))
    zero = jnp.zeros((), jnp.int32)
    return [
        Part(i, (i * rows, rows), kv, shape.start(me, i, shape.rows_q), zero, None, local)
        for i in range(shape.pieces)
    ]
