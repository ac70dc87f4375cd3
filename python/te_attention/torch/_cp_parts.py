"""The parts of a problem that ranks share, and one part by the operators."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from te_attention._cp_schedule import schedule
from te_attention.torch._arguments import NUM_INPUTS, Arguments, trimmed
from te_attention.torch._cp_layout import Number, Piece, Shard, Side
from te_attention.torch._library import OPS
from te_attention.torch.fp8.formats import E4M3, E5M2

if TYPE_CHECKING:
    from te_attention.torch._cp_fp8 import Scales

UNBOUNDED = -1
ROWS_OF_BIAS, COLUMNS_OF_BIAS = 2, 3  # its axes
UNIT = 16  # rows of a chunk of the sequence that stands for all others


@dataclass(frozen=True, eq=False)
class Problem:
    """Values that the ranks of a call share. `inner` ranks exchange heads for rows; 1: none do."""

    q: Side
    kv: Side
    rank: int
    strategy: str
    inner: int
    causal: bool
    bottom_right: bool
    window: tuple[int, int]
    heads_q: int
    heads_kv: int
    alibi: bool = False
    dropout: float = 0.0
    off_by_one: bool = False
    training: bool = False
    max_logit: bool = False
    # The bias of every rank is that of all rows: with one row for all, or of ragged queries. None:
    # other ranks know.
    bias_row: bool | None = False
    fp8: bool = False  # scales are found from the largest values of all ranks
    options: dict[str, object] = field(default_factory=dict)  # scale, softcap, engine, ...

    @cached_property
    def memo(self) -> dict:
        """Values that follow from these fields, by their name: kept where a call is repeated."""
        return {}

    @cached_property
    def world(self) -> int:
        """Ranks."""
        return self.q.world

    @cached_property
    def group(self) -> int:
        """Ranks that are one member of the ring."""
        return self.world if self.strategy == "a2a" else self.inner

    @cached_property
    def members(self) -> int:
        """Of the ring."""
        return self.world // self.group

    @cached_property
    def member(self) -> int:
        """That of this rank."""
        return self.rank // self.group

    @cached_property
    def masks(self) -> bool:
        """Whether some pairs are not visible."""
        return self.causal or self.window != (UNBOUNDED, UNBOUNDED)

    @cached_property
    def shift(self) -> Number:
        """Added to column - row of the diagonal."""
        if not self.bottom_right:
            return 0
        return self.kv.valid - self.q.valid

    @cached_property
    def format(self) -> str:
        """Of the operators."""
        return f"{self.q.format}_{self.kv.format}"


class Part(NamedTuple):
    """Pieces of the queries of this rank against pieces of the keys of `source`.

    `local`: the mask is causal in the order of local rows, as both pieces on both sides allow.
    `last`: likewise, with the last of these rows alone: the diagonal ends at the bottom right.
    """

    step: int
    source: int
    q: tuple[int, ...]
    kv: tuple[int, ...]
    masked: bool
    local: bool = False
    last: bool = False


def _covered(begin: int, count: int, sizes: list[int]) -> tuple[int, ...]:
    """The pieces of these sizes of which there are rows in [begin, begin + count)."""
    out, at = [], 0
    for i, size in enumerate(sizes):
        if size and at < begin + count and begin < at + size:
            out.append(i)
        at += size
    return tuple(out)


def ring_parts(p: Problem, positions: bool) -> tuple[list[Part], set[int], set[int]]:
    """The parts of a ring, and the steps in which its member sends and receives.

    Lengths on the device are not read: what is visible then follows from the order of chunks alone.
    """
    known = not (p.q.ragged or p.kv.ragged) and not (
        p.bottom_right and (p.q.cu_seqlens is not None or p.kv.cu_seqlens is not None)
    )
    fields = {
        "world": p.world,
        "rank": p.rank,
        "inner": 0 if p.strategy == "a2a" else p.group,
        "strategy": 3 if p.strategy == "a2a" else 0,
        "sharding": 0 if p.q.zigzag else 1,
        "positions": int(positions),
    }
    chunks = p.world * p.q.pieces
    if known:
        left, right = p.window
        fields |= {
            "causal": int(p.causal),
            "bottom_right": int(p.bottom_right),
            "window_left": left + 1,
            "window_right": right + 1,
            "seqlen_q": p.q.length,
            "seqlen_kv": p.kv.length,
        }
    else:
        ordered = p.masks and p.window == (UNBOUNDED, UNBOUNDED) and not p.bottom_right
        ordered = ordered and _have_same_chunks(p.q, p.kv)
        if p.masks and not ordered:
            return _all_pairs(p)
        fields |= {"causal": int(p.causal), "seqlen_q": UNIT * chunks, "seqlen_kv": UNIT * chunks}
    parts, moves = schedule(**fields)
    first = 1 if p.group > 1 else 0
    own = _sizes(p, p.q, p.member, known)
    out = []
    for part in parts:
        q = _covered(part.q_begin, part.q_count, own)
        kv = _covered(part.kv_begin, part.kv_count, _sizes(p, p.kv, part.source, known))
        both = bool(part.masked) and len(q) > 1
        out.append(Part(part.step - first, part.source, q, kv, bool(part.masked), both))
    ring = [m for m in moves if m.step >= first]
    sends = {m.step - first for m in ring if m.sender == p.rank}
    return out, sends, {m.step - first for m in ring if m.receiver == p.rank}


def _sizes(p: Problem, side: Side, member: int, known: bool) -> list[int]:
    if not known:
        return [UNIT * p.group * (side.pieces if p.members == 1 else 1)] * side.pieces
    return [piece.end - piece.begin for piece in side.shard(member, p.group).pieces]


def _have_same_chunks(q: Side, kv: Side) -> bool:
    """Whether both sides have the same chunks, as far as the host can tell."""
    if q.ragged or kv.ragged:
        return q.starts is kv.starts
    return q.length == kv.length


def _all_pairs(p: Problem) -> tuple[list[Part], set[int], set[int]]:
    n = p.members
    pieces = range(1 if n == 1 else p.q.pieces)
    parts = [
        Part(t, (p.member - t) % n, (i,), (j,), True)
        for t in range(n)
        for i in pieces
        for j in pieces
    ]
    steps = set(range(n - 1))
    return parts, steps, steps


# ------------------------------------------------------------------------------------ one part


Descales = tuple[Tensor | None, Tensor | None]  # of keys and values in FP8 with 16-bit queries


@dataclass(eq=False)
class Operands:
    """Tensors that every part of a call reads, with the heads of this rank."""

    q: Tensor
    bias: Tensor | None = None  # rows as q, ragged all; every column of the whole sequence
    sink: Tensor | None = None
    slopes: Tensor | None = None
    rng_state: Tensor | None = None
    head: int = 0  # the first one of q
    scales: "Scales | None" = None  # of FP8, whose tensors are bytes here
    descales: Descales = (None, None)

    @property
    def dtype(self) -> torch.dtype:
        """Of O and the gradients."""
        return self.q.dtype if self.scales is None else self.scales.dtype


class _Rows(NamedTuple):
    tensor: Tensor
    cu_seqlens: Tensor | None
    offsets: Tensor | None
    longest: int


def _prefix_sums(lengths: Tensor) -> Tensor:
    out = lengths.new_zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=out[1:], dtype=torch.int32)
    return out


def _rows(side: Side, tensor: Tensor, size: int, pieces: list[Piece]) -> _Rows:
    """Rows of pieces that follow each other in a shard of `size` rows."""
    lengths = None
    if side.ragged or side.cu_seqlens is not None:
        for piece in pieces:
            room = piece.end - piece.begin
            valid = side.valid - piece.begin
            more = valid.clamp(min=0)
            more = torch.minimum(more, room) if isinstance(room, Tensor) else more.clamp(max=room)
            lengths = more if lengths is None else lengths + more
    if not side.ragged:
        begin = pieces[0].local
        count = sum(p.end - p.begin for p in pieces)
        view = tensor.narrow(side.axis, begin, count)
        return _Rows(view, None if lengths is None else _prefix_sums(lengths), None, -1)
    offsets = torch.cat([pieces[0].local, pieces[0].local.new_full((1,), size)]).int()
    return _Rows(tensor, _prefix_sums(lengths), offsets, min(size, side.longest))


@lru_cache(maxsize=4096)
def _constant_origin(numbers: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    origin = torch.tensor(numbers, dtype=torch.int64, device=device)
    return origin if batch < 0 else origin.expand(batch, -1).contiguous()


def _origin(p: Problem, row: Number, col: Number, head: int, like: Tensor) -> Tensor:
    numbers = (0, head, row, col, p.shift)
    tensors = [n for n in numbers if isinstance(n, Tensor)]
    if tensors:
        blank = torch.zeros_like(tensors[0])
        return torch.stack([blank + n for n in numbers], 1)
    if p.shift == 0:
        return _constant_origin(numbers[:4], -1, like.device)
    batch = like.shape[1 if p.q.format == "sbhd" else 0]
    return _constant_origin(numbers, batch, like.device)


def type_of_bias(p: Problem, bias: Tensor, size: int) -> torch.dtype:
    """That of its gradient before the last rounding; `size`: of an element of q.

    Wider where several parts, or sequences of one, have the same element, whose shares may cancel.
    """
    if not (p.bias_row or p.kv.ragged or bias.shape[COLUMNS_OF_BIAS] == 1):
        return bias.dtype
    return torch.promote_types(bias.dtype, torch.float64 if size == 8 else torch.float32)


def bias_of(
    p: Problem, bias: Tensor | None, q: list[Piece], kv: list[Piece], size: int,
    most: tuple[int, int],
) -> Tensor | None:  # fmt: skip
    """The rows and columns of a part: a view, if elements have at least `size` bytes.

    most: rows and columns of a sequence of ragged sides, whose elements are copied.
    """
    if bias is None:
        return None
    if p.q.ragged:
        bias = _of_sequences(bias, ROWS_OF_BIAS, q, most[0])
    elif not p.bias_row:
        bias = bias.narrow(ROWS_OF_BIAS, q[0].local, sum(x.end - x.begin for x in q))
    if p.kv.ragged:
        bias = _of_sequences(bias, COLUMNS_OF_BIAS, kv, most[1])
    elif bias.shape[COLUMNS_OF_BIAS] > 1:
        bias = bias.narrow(COLUMNS_OF_BIAS, kv[0].begin, sum(x.end - x.begin for x in kv))
    if p.training:
        bias = bias.to(type_of_bias(p, bias, size))  # and so are the parts of its gradient
    # A slice may start at any element, and engines need the alignment of an element of q.
    return bias if bias.element_size() >= size else bias.to(torch.float64)


def _gathered(bias: Tensor, axis: int, index: Tensor) -> Tensor:
    """Rows or columns, in each sequence others. index: [batch, count]."""
    bias = bias.expand(index.shape[0], -1, -1, -1)
    shape = list(bias.shape)
    shape[axis] = index.shape[1]
    index = index[:, None, :, None] if axis == ROWS_OF_BIAS else index[:, None, None, :]
    return bias.gather(axis, index.expand(shape))


def _of_sequences(bias: Tensor, axis: int, pieces: list[Piece], most: int) -> Tensor:
    """`most` rows or columns from the begin of a piece of each sequence on."""
    count = bias.shape[axis]
    if count == 1:
        return bias
    if count == 0:  # all sequences are padding, which needs a value
        shape = list(bias.shape)
        shape[axis] = most
        return bias.new_zeros(shape)
    (piece,) = pieces
    index = piece.begin[:, None] + torch.arange(most, device=bias.device)
    return _gathered(bias, axis, index.clamp(max=count - 1))


def add_to_bias(p: Problem, dbias: Tensor, part: Tensor, q: list[Piece], kv: list[Piece]) -> None:
    """Adds the gradient from a part, which has its rows and columns."""
    if not (part.numel() and dbias.numel()):  # a rank without rows or keys
        return
    sides, to = ((ROWS_OF_BIAS, p.q, q), (COLUMNS_OF_BIAS, p.kv, kv)), dbias
    for axis, side, pieces in sides:
        is_row = axis == ROWS_OF_BIAS
        if side.ragged and dbias.shape[axis] > 1:
            (piece,) = pieces
            index = torch.arange(dbias.shape[axis], device=part.device) - piece.begin[:, None]
            inside = (index >= 0) & (index < (piece.end - piece.begin)[:, None])
            part = _gathered(part, axis, index.clamp(0, max(part.shape[axis] - 1, 0)))
            inside = inside[:, None, :, None] if is_row else inside[:, None, None, :]
            part = torch.where(inside, part, 0)
        elif not side.ragged and not (p.bias_row if is_row else dbias.shape[axis] == 1):
            begin = pieces[0].local if is_row else pieces[0].begin
            to = to.narrow(axis, begin, sum(x.end - x.begin for x in pieces))
    to.add_(part.sum(0, keepdim=True) if to.shape[0] < part.shape[0] else part)


def arguments_of(
    p: Problem,
    operands: Operands,
    keys: tuple[Tensor, Tensor],
    shards: tuple[Shard, Shard],
    pieces: tuple[list[Piece], list[Piece]],
    part: Part,
    sink: Tensor | None = None,
    off_by_one: bool = False,
) -> Arguments:
    """The arguments of the operators for one part."""
    q = _rows(p.q, operands.q, shards[0].size, pieces[0])
    k = _rows(p.kv, keys[0], shards[1].size, pieces[1])
    v = keys[1]
    if not p.kv.ragged:
        v = v.narrow(p.kv.axis, pieces[1][0].local, k.tensor.shape[p.kv.axis])
    alibi = operands.slopes is not None or p.alibi
    origin = None
    masked = part.masked
    if p.dropout or alibi or (masked and not part.local):
        origin = _origin(p, pieces[0][0].begin, pieces[1][0].begin, operands.head, operands.q)
    return Arguments(
        q.tensor,
        k.tensor,
        v,
        p.format,
        ("causal_bottom_right" if part.last else "causal") if p.causal and masked else "none",
        p.training,
        window_left=p.window[0] if masked else UNBOUNDED,
        window_right=p.window[1] if masked and not p.causal else UNBOUNDED,
        dropout=p.dropout,
        rng_state=operands.rng_state,
        bias=bias_of(p, operands.bias, *pieces, operands.q.element_size(), (q.longest, k.longest)),
        sink=sink,
        off_by_one=off_by_one,
        cu_seqlens_q=q.cu_seqlens,
        cu_seqlens_kv=k.cu_seqlens,
        offsets_q=q.offsets,
        offsets_kv=k.offsets,
        max_seqlen_q=q.longest,
        max_seqlen_kv=k.longest,
        slopes=operands.slopes,
        alibi=p.alibi and operands.slopes is None,
        origin=origin,
        max_logit=p.max_logit,
        k_descale=operands.descales[0],
        v_descale=operands.descales[1],
        **p.options,
    )


class Prepared(NamedTuple):
    """The arguments of operators where nothing but q, k and v differs from call to call."""

    q: Tensor
    k: Tensor
    v: Tensor
    rest: tuple  # without trailing defaults


def has_no_other(operands: Operands) -> bool:
    """Whether q is the only tensor."""
    others = (operands.bias, operands.sink, operands.slopes, operands.rng_state, *operands.descales)
    return not (any(t is not None for t in others) or operands.head or operands.scales)


def can_prepare(p: Problem, operands: Operands) -> bool:
    """Whether the arguments of a part are kept, except its rows of q, k and v."""
    lengths = p.q.has_lengths or p.kv.has_lengths
    return has_no_other(operands) and not (p.max_logit or lengths)


def prepare(arguments: Arguments) -> tuple:
    """The constant arguments of Prepared."""
    return trimmed(arguments)[NUM_INPUTS:]


def _values(arguments: Arguments | Prepared) -> tuple:
    if type(arguments) is Prepared:
        return (*arguments[:NUM_INPUTS], *arguments.rest)
    return trimmed(arguments)


def _in_fp8(arguments: Arguments) -> Arguments:
    q, k, v = (t.view(E4M3.torch) for t in arguments[:NUM_INPUTS])
    return arguments._replace(q=q, k=k, v=v)


def run_forward(
    o: Tensor,
    lse: Tensor,
    max_logit: Tensor | None,
    arguments: Arguments | Prepared,
    scales: "Scales | None" = None,
) -> None:
    """Writes O, LSE and the row maxima of a part."""
    if scales is None:
        OPS.part_forward.default(o, lse, max_logit, False, *_values(arguments))
        return
    given = scales.of_forward()
    OPS.fp8_part_forward.default(o, lse, max_logit, *given, *trimmed(_in_fp8(arguments)))


def merge_forward(o: Tensor, lse: Tensor, arguments: Arguments | Prepared) -> bool:
    """Merges a part into O and LSE. False: the engine cannot, and nothing was done."""
    return OPS.part_forward.default(o, lse, None, True, *_values(arguments))


def add_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    incoming: tuple[Tensor, Tensor | None, Tensor, Tensor],
    sums: tuple[bool, bool],
    arguments: Arguments | Prepared,
) -> bool:
    """Like run_backward(). sums: whether it adds to dQ, and whether to dK and dV.

    False: the engine cannot, and nothing was done.
    """
    if type(arguments) is not Prepared:
        arguments = arguments._replace(max_logit=False)
    accumulate = sums[0] + 2 * sums[1]
    values = (*gradients, *incoming, False, False, accumulate, *_values(arguments))
    return OPS.part_backward.default(*values)[2]


def run_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    incoming: tuple[Tensor, Tensor | None, Tensor, Tensor],
    wants: tuple[bool, bool],
    arguments: Arguments | Prepared,
    scales: "Scales | None" = None,
) -> tuple[Tensor, Tensor]:
    """Writes dQ, dK and dV of a part; dbias and dsink."""
    if type(arguments) is not Prepared:
        arguments = arguments._replace(max_logit=False)
    if scales is None:
        values = (*gradients, *incoming, *wants, 0, *_values(arguments))
        return OPS.part_backward.default(*values)[:2]
    incoming = (incoming[0].view(E5M2.torch), *incoming[1:])
    return OPS.fp8_part_backward.default(
        *(*gradients, *incoming, *wants), *scales.of_backward(), *trimmed(_in_fp8(arguments))
    )


def _in_order(format_q: str, *outputs: Tensor) -> list[Tensor]:
    """Views [batch, rows, heads, dim]."""
    if format_q == "thd":
        return [o.unsqueeze(0) for o in outputs]
    if format_q == "bshd":
        return [*outputs]
    axes = (0, 1) if format_q == "sbhd" else (1, 2)
    return [o.transpose(*axes) for o in outputs]


def _statistic_in_order(format_q: str, lse: Tensor) -> Tensor:
    """A view [batch, heads, rows]."""
    return lse.t().unsqueeze(0) if format_q == "thd" else lse


def merge_rows(format_q: str, o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor) -> None:
    """Merges a part into O and LSE, which may be slices of the same tensors as the part's."""
    lse, part_lse = (_statistic_in_order(format_q, t) for t in (lse, part_lse))
    o, part_o = _in_order(format_q, o, part_o)
    OPS.merge_into.default(o, lse, part_o, part_lse)


def round_rows(format_q: str, o: Tensor, sums: Tensor, lse: Tensor) -> None:
    """Writes O in its type."""
    o, sums = _in_order(format_q, o, sums)
    OPS.round_o.default(o, sums, _statistic_in_order(format_q, lse))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements as one message."""
    parts = [t.reshape(-1) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unflat(message: Tensor, shapes: Iterable[tuple[int, ...]]) -> list[Tensor]:
    """The tensors of these shapes in a message: views."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [x.view(s) for x, s in zip(message.split(sizes), shapes, strict=True)]
