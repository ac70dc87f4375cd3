"""Heads for rows: a group of ranks exchanges shards of all heads for all its rows of some heads."""

import itertools
from collections.abc import Generator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from te_attention._alibi import published_slopes
from te_attention.torch._cp_accumulate import Gradients, empty_o, statistic_like, wide
from te_attention.torch._cp_exchange import exchange_all
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_parts import Operands, Problem, flat, unflat
from te_attention.torch._types import statistic_dtype

Program = Generator[object, object, object]
HEADS_OF_LSE = 1  # the axis of heads in LSE


def _of_axis(tensor: Tensor | None, axis: int, heads: range) -> Tensor | None:
    """A view of some heads; where the tensor has one number for all heads, the tensor."""
    if tensor is None or tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, heads.start, len(heads))


def _slopes_and_sink(
    p: Problem, operands: Operands, heads: range
) -> tuple[Tensor | None, Tensor | None]:
    """Those of some heads of the operands."""
    slopes, sink, q = operands.slopes, operands.sink, operands.q
    if slopes is None and p.alibi:
        known = published_slopes(p.heads_q)
        slopes = torch.tensor(known, dtype=statistic_dtype(q), device=q.device)
    if slopes is not None:
        slopes = slopes[..., heads.start : heads.stop].contiguous()
    return slopes, None if sink is None else sink[heads.start : heads.stop].contiguous()


def operands_of_heads(p: Problem, operands: Operands, heads: range, of_keys: range) -> Operands:
    """Those of some heads of q, and of the heads of K and V that these use."""
    slopes, sink = _slopes_and_sink(p, operands, heads)
    return replace(
        operands,
        q=operands.q.narrow(p.q.heads_axis, heads.start, len(heads)),
        bias=_of_axis(operands.bias, 1, heads),
        sink=sink,
        slopes=slopes,
        head=operands.head + (heads.start if p.dropout else 0),  # nothing else depends on it
        descales=tuple(_of_axis(t, 0, of_keys) for t in operands.descales),
    )


class Heads:
    """The share of each rank of a group: adjacent heads of q, with the heads of k that they use."""

    def __init__(self, p: Problem) -> None:
        self.p, self.n = p, p.group
        self.base, self.me = p.member * p.group, p.rank % p.group
        self.per_key = p.heads_q // p.heads_kv
        bounds = [i * p.heads_q // self.n for i in range(self.n + 1)]
        self.q = list(itertools.pairwise(bounds))
        self.kv = [
            (a // self.per_key, (b - 1) // self.per_key + 1 if b > a else a // self.per_key)
            for a, b in self.q
        ]

    @property
    def idle(self) -> bool:
        """Whether this rank has no heads: there are fewer than ranks."""
        return self.q[self.me][0] == self.q[self.me][1]

    @cached_property
    def map(self) -> list[int] | None:
        """The key head of each own head where groups are cut, so that each needs its own copy."""
        (a, b), (first, last) = self.q[self.me], self.kv[self.me]
        if last - first <= 1 or (a % self.per_key == 0 and b % self.per_key == 0):
            return None
        return [h // self.per_key - first for h in range(a, b)]

    @property
    def shares(self) -> bool:
        """Whether a key head is with several ranks."""
        return any(a[1] > b[0] for a, b in itertools.pairwise(self.kv))

    # ---------------------------------------------------------------- shapes of what travels

    def _sides(self) -> list[tuple[Side, list[tuple[int, int]]]]:
        return [(self.p.q, self.q), (self.p.kv, self.kv), (self.p.kv, self.kv)]

    def _rows(self, side: Side, index: int) -> int:
        return side.shard(self.base + index).size

    @staticmethod
    def _shape(like: Tensor, side: Side, rows: int, heads: tuple[int, int]) -> tuple[int, ...]:
        shape = list(like.shape)
        shape[side.axis], shape[side.heads_axis] = rows, heads[1] - heads[0]
        return tuple(shape)

    def _exchange(
        self, there: list[list[Tensor]], back: list[list[tuple]], like: Tensor
    ) -> Program:
        """Messages to the ranks of the group; what came, as tensors of the shapes in `back`."""
        world = self.p.world
        sends: list[Tensor | None] = [None] * world
        buffers: list[Tensor | None] = [None] * world
        for i in range(self.n):
            if i == self.me:
                continue
            sends[self.base + i] = flat(there[i])
            size = sum(torch.Size(shape).numel() for shape in back[i])
            buffers[self.base + i] = like.new_empty(size)
        yield from exchange_all(sends, buffers, self.p.rank)
        return [
            there[i] if i == self.me else unflat(buffers[self.base + i], back[i])
            for i in range(self.n)
        ]

    # ------------------------------------------------------------------------------ to heads

    def to_heads(self, operands: Operands, keys: tuple[Tensor, Tensor]) -> Program:
        """All rows of the group, with the heads of this rank."""
        tensors, sides = [operands.q, *keys], self._sides()
        there = [
            [
                t.narrow(side.heads_axis, heads[i][0], heads[i][1] - heads[i][0])
                for t, (side, heads) in zip(tensors, sides, strict=True)
            ]
            for i in range(self.n)
        ]
        back = [
            [
                self._shape(t, side, self._rows(side, j), heads[self.me])
                for t, (side, heads) in zip(tensors, sides, strict=True)
            ]
            for j in range(self.n)
        ]
        # A message has one type, which keys and values of a cache do not share with queries.
        is_cache = keys[0].dtype != operands.q.dtype
        came: list[list[Tensor]] = [[] for _ in range(self.n)]
        for some in (slice(1), slice(1, 3)) if is_cache else (slice(3),):
            given, shapes = ([one[some] for one in x] for x in (there, back))
            arrived = yield from self._exchange(given, shapes, tensors[some][0])
            for rows, more in zip(came, arrived, strict=True):
                rows.extend(more)
        q, k, v = (
            side.join([one[t] for one in came], self.p.member).contiguous()
            for t, (side, _) in enumerate(sides)
        )
        if self.map is not None:
            index = torch.tensor(self.map, device=k.device)
            k, v = (t.index_select(self.p.kv.heads_axis, index) for t in (k, v))
        bias = operands.bias
        if bias is not None:
            bias = yield from self._bias_to_heads(bias)
        a, b = self.q[self.me]
        slopes, sink = _slopes_and_sink(self.p, operands, range(a, b))
        descales = tuple(map(self._of_key_heads, operands.descales))
        moved = replace(
            operands, q=q, bias=bias, sink=sink, slopes=slopes, head=a, descales=descales
        )
        return moved, (k, v)

    def _of_key_heads(self, descale: Tensor | None) -> Tensor | None:
        """The numbers of the key heads of this rank; one number is that of all heads."""
        if descale is None or descale.numel() == 1:
            return descale
        first, last = self.kv[self.me]
        mine = descale[first:last]
        if self.map is not None:
            mine = mine[torch.tensor(self.map, device=mine.device)]
        return mine.contiguous()

    def _bias_heads(self, bias: Tensor, i: int) -> Tensor:
        return _of_axis(bias, 1, range(*self.q[i]))

    def _bias_to_heads(self, bias: Tensor) -> Program:
        own = self._bias_heads(bias, self.me)
        if self.p.bias_row:
            return own.contiguous()
        shape = list(own.shape)
        back = []
        for j in range(self.n):
            shape[2] = self._rows(self.p.q, j)
            back.append([tuple(shape)])
        there = [[self._bias_heads(bias, i)] for i in range(self.n)]
        came = yield from self._exchange(there, back, bias)
        return self.p.q.join([one[0] for one in came], self.p.member, 2).contiguous()

    def gradients_to_heads(self, dout: Tensor, dlse: Tensor | None) -> Program:
        """dO, and dLSE, of all rows of the group."""
        side = self.p.q
        there = [[dout.narrow(side.heads_axis, a, b - a)] for a, b in self.q]
        back = [
            [self._shape(dout, side, self._rows(side, j), self.q[self.me])] for j in range(self.n)
        ]
        came = yield from self._exchange(there, back, dout)
        dout = side.join([one[0] for one in came], self.p.member).contiguous()
        if dlse is not None:
            heads, rows = self._statistic_axes()
            there = [[dlse.narrow(heads, a, b - a)] for a, b in self.q]
            back = [[self._statistic_shape(dlse, j, self.me)] for j in range(self.n)]
            came = yield from self._exchange(there, back, dlse)
            dlse = side.join([one[0] for one in came], self.p.member, rows).contiguous()
        return dout, dlse

    def _statistic_axes(self) -> tuple[int, int]:
        """Of heads and rows in LSE."""
        return (1, 0) if self.p.q.ragged else (1, 2)

    def _statistic_shape(self, like: Tensor, rows_of: int, heads_of: int) -> tuple[int, ...]:
        heads, rows = self._statistic_axes()
        shape, (a, b) = list(like.shape), self.q[heads_of]
        shape[heads], shape[rows] = b - a, self._rows(self.p.q, rows_of)
        return tuple(shape)

    # ------------------------------------------------------------------------------- to rows

    def to_rows(self, o: Tensor, lse: Tensor, most: Tensor | None) -> Program:
        """O, LSE and row maxima of the local rows with all heads."""
        side = self.p.q
        shares = side.split(o, self.p.member, self.n)
        back = [[self._shape(o, side, self._rows(side, self.me), self.q[i])] for i in range(self.n)]
        came = yield from self._exchange([[s] for s in shares], back, o)
        joined = torch.cat([one[0] for one in came], side.heads_axis)
        statistics = []
        for t in (lse, most):
            statistics.append(None if t is None else (yield from self._statistic_to_rows(t)))
        out = empty_o(joined, joined.shape[-1], joined.dtype, side.format).copy_(joined)
        return out, *statistics

    def _statistic_to_rows(self, statistic: Tensor) -> Program:
        heads, rows = self._statistic_axes()
        shares = self.p.q.split(statistic, self.p.member, self.n, rows)
        back = [[self._statistic_shape(statistic, self.me, i)] for i in range(self.n)]
        came = yield from self._exchange([[s] for s in shares], back, statistic)
        return torch.cat([one[0] for one in came], heads).contiguous()

    def gradients_to_rows(
        self, dq: Tensor, sums: list[Tensor], dbias: Tensor | None, dsink: Tensor | None, x: object
    ) -> Program:
        """Gradients of the local rows; dsink and shared rows of dbias: the share of these heads."""
        if self.map is not None:
            sums = [self._fold(t) for t in sums]
        narrow = dq.dtype if not self.shares else wide(dq.dtype)
        sums = [t.to(narrow) for t in sums]
        side = self.p.q
        shares = side.split(dq, self.p.member, self.n)
        back = [[self._shape(dq, side, self._rows(side, self.me), heads)] for heads in self.q]
        came = yield from self._exchange([[s] for s in shares], back, dq)
        dq = torch.cat([one[0] for one in came], side.heads_axis).contiguous()
        sums = yield from self._keys_to_rows(sums, (x.k, x.v))
        if dbias is not None:
            dbias = yield from self._bias_to_rows(dbias, x.bias)
        if dsink is not None:
            whole = torch.zeros_like(x.sink)
            whole[slice(*self.q[self.me])] = dsink
            dsink = whole
        return dq, sums, dbias, dsink

    def _fold(self, gradient: Tensor) -> Tensor:
        """Sums over the copies of a key head."""
        first, last = self.kv[self.me]
        shape = list(gradient.shape)
        shape[self.p.kv.heads_axis] = last - first
        out = gradient.new_zeros(shape)
        for i, h in enumerate(self.map):
            to = out.narrow(self.p.kv.heads_axis, h, 1)
            to += gradient.narrow(self.p.kv.heads_axis, i, 1)
        return out

    def _keys_to_rows(self, sums: list[Tensor], like: tuple[Tensor, Tensor]) -> Program:
        side = self.p.kv
        split = [side.split(t, self.p.member, self.n) for t in sums]
        there = [[one[i] for one in split] for i in range(self.n)]
        rows = self._rows(side, self.me)
        back = [[self._shape(t, side, rows, heads) for t in like] for heads in self.kv]
        came = yield from self._exchange(there, back, sums[0])
        out = [torch.zeros(t.shape, dtype=sums[0].dtype, device=t.device) for t in like]
        for (first, last), shares in zip(self.kv, came, strict=True):
            for to, share in zip(out, shares, strict=True):
                part = to.narrow(side.heads_axis, first, last - first)
                part += share
        return out

    def _bias_to_rows(self, dbias: Tensor, bias: Tensor) -> Program:
        per_head = bias.shape[1] > 1
        if self.p.bias_row:  # the sum over ranks follows
            whole = dbias.new_zeros(bias.shape)
            (whole[:, slice(*self.q[self.me])] if per_head else whole).copy_(dbias)
            return whole
        shares = self.p.q.split(dbias, self.p.member, self.n, 2)
        back = []
        for a, b in self.q:
            shape = list(bias.shape)
            shape[1] = b - a if per_head else 1
            back.append([tuple(shape)])
        came = yield from self._exchange([[s] for s in shares], back, dbias)
        if per_head:
            return torch.cat([one[0] for one in came], 1)
        total = came[0][0].to(wide(bias.dtype), copy=True)
        for one in came[1:]:
            total += one[0]
        return total

    # ---------------------------------------------------------------------- without any heads

    def nothing(self, operands: Operands, keys: tuple[Tensor, Tensor]) -> tuple:
        """O, LSE and row maxima of no heads."""
        o = empty_o(operands.q, keys[1].shape[-1], operands.dtype, self.p.q.format)
        lse = statistic_like(self.p, operands.q).fill_(-torch.inf)
        return o, lse, lse.clone() if self.p.max_logit else None

    def no_gradients(self, operands: Operands, keys: tuple[Tensor, Tensor]) -> tuple:
        """Of no heads."""
        grads = Gradients(self.p, operands, self.p.q.shard(self.p.member, self.p.group))
        return grads, [torch.zeros(t.shape, dtype=grads.dtype, device=t.device) for t in keys]
