"""Few queries to sharded keys: every rank computes all queries against its own keys.

Queries travel there and partial results back, which are few where decoding reads a long cache.
"""

from dataclasses import replace

from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Gradients, Output
from te_attention.torch._cp_exchange import Program, exchange_all, ordered_sum
from te_attention.torch._cp_parts import Operands, Part, Problem
from te_attention.torch._cp_ring import Keys, arguments_of_part

BIAS_ROWS = 2  # the axis of rows in a bias


def _empty(p: Problem, like: Tensor, axis: int, rank: int) -> Tensor:
    shape = list(like.shape)
    shape[axis] = p.q.shard(rank).size
    return like.new_empty(shape)


def _gather(p: Problem, mine: Tensor, axis: int) -> Program:
    """The rows of all ranks in natural order."""
    mine = mine.contiguous()
    parts = [mine if r == p.rank else _empty(p, mine, axis, r) for r in range(p.world)]
    yield from exchange_all([mine] * p.world, parts, p.rank)
    return p.q.join(parts, 0, axis)


def _scatter(p: Problem, whole: Tensor, axis: int) -> Program:
    """The shares that all ranks have of the rows of this one, from natural order."""
    shares = [share.contiguous() for share in p.q.split(whole, 0, p.world, axis)]
    parts = [shares[r] if r == p.rank else _empty(p, whole, axis, p.rank) for r in range(p.world)]
    yield from exchange_all(shares, parts, p.rank)
    return parts


class Queries:
    """The parts of a rank: all queries, in natural order, against each piece of its own keys."""

    def __init__(self, p: Problem, operands: Operands, keys: Keys) -> None:
        self.p, self.operands, self.keys = p, operands, keys
        self.rows, self.mine = p.q.shard(0, p.world), p.kv.shard(p.rank)
        self.statistic_axis = 0 if p.q.ragged else 2
        self.parts = [
            Part(0, p.rank, (0,), (i,), p.masks)
            for i, piece in enumerate(self.mine.pieces)
            if p.kv.ragged or piece.end > piece.begin
        ]

    def _all_queries(self) -> Program:
        """The operands with the rows of all ranks; the sink joins at the end."""
        bias = self.operands.bias
        q = yield from _gather(self.p, self.operands.q, self.p.q.axis)
        if bias is not None and not self.p.bias_row:
            bias = yield from _gather(self.p, bias, BIAS_ROWS)
        return replace(self.operands, q=q, bias=bias, sink=None)

    def _arguments(self, operands: Operands, part: Part) -> Arguments:
        return arguments_of_part(self.p, operands, part, self.keys, (self.rows, self.mine), False)

    def forward(self) -> Program:
        """O, LSE and row maxima of the local rows."""
        p, dim_v = self.p, self.keys[1].shape[-1]
        operands = yield from self._all_queries()
        partial = Output(p, operands, self.rows, dim_v, False)
        for part in self.parts:
            partial.add(part.q, self._arguments(operands, part))
        axes = (p.q.axis, self.statistic_axis, self.statistic_axis)
        parts = []
        for tensor, axis in zip(partial.sums(), axes, strict=True):
            parts.append(None if tensor is None else (yield from _scatter(p, tensor, axis)))
        out = Output(p, self.operands, p.q.shard(p.rank), dim_v, False)
        for r in range(p.world):
            out.add_computed(*(None if x is None else x[r] for x in parts))
        return out.finish()

    def backward(self, incoming: tuple) -> Program:
        """Gradients of the operands, and dK and dV of the own keys."""
        p, axis = self.p, self.p.q.axis
        operands = yield from self._all_queries()
        given = []
        for tensor, of in zip(incoming, (axis, self.statistic_axis) * 2, strict=True):
            given.append(None if tensor is None else (yield from _gather(p, tensor, of)))
        partial = Gradients(p, operands, self.rows)
        sums = partial.sums_of(self.keys, p.kv, self.mine)
        for part in self.parts:
            partial.add((part.q, part.kv), sums, tuple(given), self._arguments(operands, part))
        grads = Gradients(p, self.operands, p.q.shard(p.rank))
        grads.set(ordered_sum((yield from _scatter(p, partial.sum(), axis))))
        grads.dbias = partial.dbias
        if partial.dbias is not None and not p.bias_row:
            grads.dbias = ordered_sum((yield from _scatter(p, partial.dbias, BIAS_ROWS)))
        return grads, list(sums.finish().tensors)
