"""Sums over parts: O and LSE forward, dQ, dK and dV backward. Rounded once, at the end."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_layout import Shard, Side
from te_attention.torch._cp_parts import (
    Operands,
    Prepared,
    Problem,
    add_backward,
    add_to_bias,
    merge_forward,
    merge_rows,
    round_rows,
    run_backward,
    run_forward,
    type_of_bias,
)
from te_attention.torch._types import statistic_dtype

ROUNDED = ("cuda",)  # devices on which PyTorch's copy takes the host longer than our operator


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts are summed."""
    return torch.float32 if dtype.itemsize == 2 else dtype


class Pair(NamedTuple):
    """K and V, or their gradients. whole: both as one tensor, where they are in one memory."""

    tensors: tuple[Tensor, Tensor]
    whole: Tensor | None = None

    def parts(self) -> tuple[Tensor, ...]:
        """All elements, in as few tensors as there can be."""
        return self.tensors if self.whole is None else (self.whole,)

    def add(self, other: "Pair", out: "Pair") -> None:
        """The sum with another pair of the same shapes."""
        for mine, theirs, to in zip(self.parts(), other.parts(), out.parts(), strict=True):
            torch.add(mine, theirs, out=to)

    def of_heads(self, side: Side, heads: range) -> "Pair":
        """Views of some heads."""
        axis, place = side.heads_axis, (heads.start, len(heads))
        whole = None if self.whole is None else self.whole.narrow(axis + 1, *place)
        return Pair(tuple(t.narrow(axis, *place) for t in self.tensors), whole)


def pair_of(
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    make: Callable[..., Tensor] = torch.empty,
) -> Pair:
    """Tensors of two shapes, in one memory where the shapes are equal."""
    if shapes[0] != shapes[1]:
        return Pair(tuple(make(shape, dtype=dtype, device=device) for shape in shapes))
    whole = make((2, *shapes[0]), dtype=dtype, device=device)
    return Pair(whole.unbind(), whole)


class Region:
    """Rows of pieces of a shard: a slice of dense tensors, all of ragged ones."""

    def __init__(self, side: Side, shard: Shard, pieces: tuple[int, ...]) -> None:
        self.side, self.whole = side, side.ragged
        if self.whole:
            self.pieces = frozenset(range(len(shard.pieces)))
            self.begin, self.count = 0, shard.size
        else:
            self.pieces = frozenset(pieces)
            chosen = [shard.pieces[i] for i in pieces]
            self.begin = chosen[0].local
            self.count = sum(p.end - p.begin for p in chosen)

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor in the format of the side."""
        if self.count == tensor.shape[self.side.axis]:  # a view takes a microsecond
            return tensor
        return tensor.narrow(self.side.axis, self.begin, self.count)

    def of_rows(self, statistic: Tensor | None) -> Tensor | None:
        """The rows of LSE, or of what has its shape."""
        if statistic is None:
            return None
        axis = 0 if self.whole else 2
        if self.count == statistic.shape[axis]:
            return statistic
        return statistic.narrow(axis, self.begin, self.count)


def region_of(side: Side, shard: Shard, pieces: tuple[int, ...]) -> Region:
    """The region of pieces, which is made once. Both sides may have it in their own formats."""
    key = (side.format, pieces)
    found = shard.regions.get(key)
    if found is None:
        found = shard.regions[key] = Region(side, shard, pieces)
    return found


def statistic_like(p: Problem, q: Tensor) -> Tensor:
    """Memory of the shape of LSE."""
    heads, rows = q.shape[p.q.heads_axis], q.shape[p.q.axis]
    batch = () if p.q.ragged else (q.shape[1 if p.q.format == "sbhd" else 0],)
    shape = (rows, heads) if p.q.ragged else (*batch, heads, rows)
    return torch.empty(shape, dtype=statistic_dtype(q), device=q.device)


def empty_o(q: Tensor, dim_v: int, dtype: torch.dtype, form: str) -> Tensor:
    """Memory for O; the heads of a token are adjacent also for bhsd."""
    if form == "bhsd":
        b, h, s, _ = q.shape
        return q.new_empty((b, s, h, dim_v), dtype=dtype).transpose(1, 2)
    return q.new_empty((*q.shape[:-1], dim_v), dtype=dtype)


class Output:
    """O, LSE and row maxima of one rank, from parts. `direct`: no two parts share a row."""

    def __init__(self, p: Problem, operands: Operands, shard: Shard, dim_v: int, direct: bool):
        self.p, self.operands, self.shard, self.direct = p, operands, shard, direct
        q = operands.q
        self.dtype = operands.dtype if direct else wide(operands.dtype)
        self.o = empty_o(q, dim_v, self.dtype, p.q.format)
        self.lse = statistic_like(p, q)
        self.max = statistic_like(p, q) if p.max_logit else None
        self.written: set[int] = set()
        self.scratch: tuple | None = None
        self.views: dict[tuple, tuple] = {}  # of O or of the part, by their pieces

    def add(self, pieces: tuple[int, ...], arguments: Arguments | Prepared) -> None:
        """Computes a part."""
        region = region_of(self.p.q, self.shard, pieces)
        views = self._views(region, pieces, is_part=False)
        if self.written.isdisjoint(region.pieces):
            run_forward(*views, arguments, self.operands.scales)
        else:
            self._clear_statistics(region.pieces - self.written)
            if not self._accumulate(views, pieces, arguments):
                part = self._views(region, pieces, is_part=True)
                run_forward(*part, arguments, self.operands.scales)
                self._merge(views, part)
        self.written |= region.pieces

    def _accumulate(
        self, views: tuple, pieces: tuple[int, ...], arguments: Arguments | Prepared
    ) -> bool:
        """Whether the engine has merged the part into O and LSE."""
        known, key = self.p.memo, ("merges", pieces)
        if self.max is not None or self.operands.scales or not known.get(key, True):
            return False
        known[key] = merge_forward(*views[:2], arguments)
        return known[key]

    def _clear_statistics(self, pieces: Iterable[int]) -> None:
        """Of rows to which no part has written."""
        for i in pieces:
            region = region_of(self.p.q, self.shard, (i,))
            for statistic in (self.lse, self.max):
                if statistic is not None:
                    region.of_rows(statistic).fill_(-torch.inf)

    def replace(self, pieces: tuple[int, ...], arguments: Arguments | Prepared) -> None:
        """Computes a part, whose rows have results that do not count."""
        region = region_of(self.p.q, self.shard, pieces)
        views = self._views(region, pieces, is_part=False)
        run_forward(*views, arguments, self.operands.scales)

    def _views(self, region: Region, pieces: tuple[int, ...], is_part: bool) -> tuple:
        key = (pieces, is_part)
        if key not in self.views:
            target = self._scratch() if is_part else (self.o, self.lse, self.max)
            self.views[key] = (region.of(target[0]), *(region.of_rows(t) for t in target[1:]))
        return self.views[key]

    def _scratch(self) -> tuple:
        if self.scratch is None:
            # As O, whose strides a part must have in order to be merged.
            empty = torch.empty_strided(
                self.o.shape, self.o.stride(), dtype=self.dtype, device=self.o.device
            )
            most = None if self.max is None else torch.empty_like(self.max)
            self.scratch = (empty, torch.empty_like(self.lse), most)
        return self.scratch

    def add_computed(self, o: Tensor, lse: Tensor, most: Tensor | None) -> None:
        """A part of all rows that another rank has computed."""
        everything = set(range(len(self.shard.pieces)))
        target = self._scratch() if self.written else (self.o, self.lse, self.max)
        for to, given in zip(target, (o, lse, most), strict=True):
            if to is not None:
                to.copy_(given)
        if self.written:
            self._merge((self.o, self.lse, self.max), target)
        self.written = everything

    def _merge(self, whole: tuple, part: tuple) -> None:
        merge_rows(self.p.q.format, *whole[:2], *part[:2])
        if self.max is not None:
            torch.maximum(whole[2], part[2], out=whole[2])

    def sums(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """O in the type of sums, LSE and the row maxima of the parts so far."""
        missing = set(range(len(self.shard.pieces))) - self.written
        _clear(self.p.q, self.shard, missing, [self.o])
        self._clear_statistics(missing)
        return self.o, self.lse, self.max

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """O in the type of q, LSE and the row maxima."""
        self.sums()
        if not self.direct:
            self._add_sink()
        # Before O in the type of q, so that both do not exist at a time.
        self.scratch, self.views = None, {}
        if self.dtype != self.operands.dtype:
            o = torch.empty_strided(
                self.o.shape, self.o.stride(), dtype=self.operands.dtype, device=self.o.device
            )
            if o.device.type in ROUNDED:
                round_rows(self.p.q.format, o, self.o, self.lse)
            else:
                o.copy_(self.o)
            self.o = o
        return self.o, self.lse, self.max

    def _add_sink(self) -> None:
        """A part with the sink alone: no value, and its logit as LSE."""
        sink = sink_of(self.p, self.operands)
        if sink is None:
            return
        before = self.lse
        self.lse = torch.logaddexp(before, _per_head(self.p, sink))
        valid = self.p.q.valid_rows(self.shard)
        if valid is not None:
            self.lse = torch.where(_per_row(self.p, valid), self.lse, -torch.inf)
        factor = torch.where(before == -torch.inf, 0.0, torch.exp(before - self.lse))
        self.o *= as_rows(self.p, factor)


def sink_of(p: Problem, operands: Operands) -> Tensor | None:
    """One logit for each head, or None."""
    if p.off_by_one:
        q = operands.q
        return q.new_zeros(q.shape[p.q.heads_axis], dtype=statistic_dtype(q))
    return operands.sink


def _per_head(p: Problem, values: Tensor) -> Tensor:
    return values if p.q.ragged else values[:, None]


def _per_row(p: Problem, values: Tensor) -> Tensor:
    return values[:, None] if p.q.ragged else values[:, None, :]


def as_rows(p: Problem, statistic: Tensor) -> Tensor:
    """A statistic with the dimensions of q, whose last one is 1."""
    order = {"thd": (0, 1), "bhsd": (0, 1, 2), "bshd": (0, 2, 1), "sbhd": (2, 0, 1)}[p.q.format]
    return statistic.permute(order).unsqueeze(-1)


def gradient_of_sink(
    p: Problem, sink: Tensor, incoming: tuple[Tensor, Tensor | None, Tensor, Tensor]
) -> Tensor:
    """-sum over rows of exp(sink - LSE) * (dO . O - dLSE), float32 [heads]."""
    dout, dlse, o, lse = incoming
    delta = (dout.to(wide(o.dtype)) * o.to(wide(o.dtype))).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - as_rows(p, dlse)
    attends = lse != -torch.inf
    probability = torch.where(attends, torch.exp(_per_head(p, sink) - lse), 0.0)
    terms = torch.where(as_rows(p, attends), as_rows(p, probability) * delta, 0.0)
    other = [i for i in range(terms.dim()) if i != p.q.heads_axis]
    return -terms.sum(other).to(sink.dtype)


class Gradients:
    """dQ of one rank, from parts, and dK and dV of each part into sums that the caller owns."""

    def __init__(self, p: Problem, operands: Operands, shard: Shard) -> None:
        self.p, self.operands, self.shard = p, operands, shard
        q = operands.q
        self.dtype = wide(operands.dtype)
        self.dq = torch.empty(q.shape, dtype=self.dtype, device=q.device)
        self.written: set[int] = set()
        bias = operands.bias
        self.dbias = None if bias is None else _sums_of_bias(p, bias, q.element_size())
        self.dsink = None if operands.sink is None else torch.zeros_like(operands.sink)
        self.rows: dict[tuple, tuple] = {}  # of dQ and what arrives, by their pieces

    def of_heads(self, operands: Operands, heads: range) -> "Gradients":
        """Those of some heads, in the same memory. operands: of these heads."""
        out, place = copy.copy(self), (heads.start, len(heads))
        out.operands, out.written, out.rows = operands, set(self.written), {}
        out.dq = self.dq.narrow(self.p.q.heads_axis, *place)
        if self.dbias is not None and self.dbias.shape[1] > 1:
            out.dbias = self.dbias.narrow(1, *place)
        if self.dsink is not None:
            out.dsink = self.dsink.narrow(0, *place)
        return out

    def sums_of(
        self, keys: tuple[Tensor, Tensor], side: Side, shard: Shard, whole: bool = False
    ) -> "KeySums":
        """For the gradients of these keys and values. `whole`: parts may leave out some rows."""
        make = torch.zeros if whole else torch.empty
        pair = pair_of([t.shape for t in keys], self.dtype, keys[0].device, make)
        return KeySums(pair, side, shard)

    def add(
        self,
        pieces: tuple[tuple[int, ...], tuple[int, ...]],
        sums: "KeySums",
        incoming: tuple[Tensor, Tensor | None, Tensor, Tensor],
        arguments: Arguments | Prepared,
        sink: bool = False,
    ) -> None:
        """Computes a part; `incoming`: dO, dLSE, O and LSE of all rows."""
        region = region_of(self.p.q, self.shard, pieces[0])
        keys = region_of(sums.side, sums.shard, pieces[1])
        first_q, first_k = not (region.pieces & self.written), not (keys.pieces & sums.written)
        if not first_q:
            _clear(self.p.q, self.shard, region.pieces - self.written, [self.dq])
        if not first_k:
            _clear(sums.side, sums.shard, keys.pieces - sums.written, sums.tensors)
        of_dq, given = self._rows_of(region, pieces[0], incoming)
        of_keys = [keys.of(t) for t in sums.tensors]
        self.written |= region.pieces
        sums.written |= keys.pieces
        gradients, adds = (of_dq, *of_keys), (not first_q, not first_k)
        if any(adds) and not sink and self._accumulate(pieces, gradients, given, adds, arguments):
            return
        dq = self._target(of_dq, first_q)
        dk, dv = (self._target(t, first_k) for t in of_keys)
        wants = (self.dbias is not None, sink)
        dbias, dsink = run_backward((dq, dk, dv), given, wants, arguments, self.operands.scales)
        if not first_q:
            of_dq.add_(dq)
        for to, part in zip(of_keys, (dk, dv), strict=True):
            if not first_k:
                to.add_(part)
        if self.dbias is not None:
            chosen = zip((self.shard, sums.shard), pieces, strict=True)
            places = [[shard.pieces[i] for i in some] for shard, some in chosen]
            add_to_bias(self.p, self.dbias, dbias, *places)
        if sink:
            self.dsink += dsink

    def _accumulate(
        self,
        pieces: tuple[tuple[int, ...], tuple[int, ...]],
        gradients: tuple[Tensor, Tensor, Tensor],
        given: tuple[Tensor, Tensor | None, Tensor, Tensor],
        adds: tuple[bool, bool],
        arguments: Arguments | Prepared,
    ) -> bool:
        """Whether the engine has added the part to dQ, or to dK and dV."""
        known, key = self.p.memo, ("adds", pieces)
        if self.dbias is not None or self.operands.scales or not known.get(key, True):
            return False
        known[key] = add_backward(gradients, given, adds, arguments)
        return known[key]

    def _rows_of(self, region: Region, pieces: tuple[int, ...], incoming: tuple) -> tuple:
        """The rows of dQ, and those of dO, dLSE, O and LSE, of which statistics are copied."""
        if pieces not in self.rows:
            dout, dlse, o, lse = incoming
            statistics = [region.of_rows(t) for t in (dlse, lse)]
            statistics = [None if t is None else t.contiguous() for t in statistics]
            given = (region.of(dout), statistics[0], region.of(o), statistics[1])
            self.rows[pieces] = (region.of(self.dq), given)
        return self.rows[pieces]

    @staticmethod
    def _target(view: Tensor, first: bool) -> Tensor:
        return view if first else torch.empty_like(view)

    def set(self, dq: Tensor) -> None:
        """dQ of all rows, from parts of other ranks."""
        self.dq, self.written = dq, set(range(len(self.shard.pieces)))

    def sum(self) -> Tensor:
        """dQ in the type of sums; zero for rows that no part has."""
        _clear(self.p.q, self.shard, set(range(len(self.shard.pieces))) - self.written, [self.dq])
        return self.dq

    def finish(self) -> Tensor:
        """dQ in the type of q."""
        return self.sum().to(self.operands.dtype)


def _clear(side: Side, shard: Shard, pieces: Iterable[int], tensors: list[Tensor]) -> None:
    """Zeros rows to which no part has written."""
    for i in pieces:
        for tensor in tensors:
            region_of(side, shard, (i,)).of(tensor).zero_()


def _sums_of_bias(p: Problem, bias: Tensor, size: int) -> Tensor:
    """Wide where several parts add to an element."""
    dtype = type_of_bias(p, bias, size)
    return torch.zeros_like(bias, dtype=dtype, memory_format=torch.contiguous_format)


class KeySums:
    """dK and dV of a shard, over parts. Pieces without a part are zero."""

    def __init__(self, pair: Pair, side: Side, shard: Shard, complete: bool = False) -> None:
        """complete: the pair has sums of all pieces."""
        self.pair, self.side, self.shard = pair, side, shard
        self.written = set(range(len(shard.pieces))) if complete else set()

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """dK and dV of all rows."""
        return self.pair.tensors

    def finish(self) -> Pair:
        """The sums of all rows."""
        missing = set(range(len(self.shard.pieces))) - self.written
        _clear(self.side, self.shard, missing, self.tensors)
        return self.pair
