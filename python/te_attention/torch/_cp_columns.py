"""Parts that have all keys of their rows: gathered from all ranks, or those within a window."""

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Gradients, KeySums, Output
from te_attention.torch._cp_exchange import Program, exchange_all, ordered_sum
from te_attention.torch._cp_halo import HaloPlan
from te_attention.torch._cp_layout import Shard
from te_attention.torch._cp_parts import Operands, Part, Problem, flat, unflat
from te_attention.torch._cp_ring import Keys, arguments_of_part


def _buffer(p: Problem, keys: Keys, rows: int, dtype: torch.dtype) -> tuple[Tensor, list[tuple]]:
    """A message with K and V, or their gradients, of so many rows; its shapes."""
    shapes = []
    for t in keys:
        shape = list(t.shape)
        shape[p.kv.axis] = rows
        shapes.append(tuple(shape))
    total = sum(torch.Size(shape).numel() for shape in shapes)
    return torch.empty(total, dtype=dtype, device=keys[0].device), shapes


def gather(p: Problem, keys: Keys) -> Program:
    """K and V of all ranks in natural order."""
    buffers = [_buffer(p, keys, p.kv.shard(r).size, keys[0].dtype) for r in range(p.world)]
    yield from exchange_all([flat(keys)] * p.world, [b[0] for b in buffers], p.rank)
    shards = [list(keys) if r == p.rank else unflat(*b) for r, b in enumerate(buffers)]
    return tuple(p.kv.join([s[i] for s in shards], 0) for i in range(2))


def scatter(p: Problem, keys: Keys, total: list[Tensor]) -> Program:
    """The sums, in the order of ranks, of dK and dV of the own rows."""
    split = [p.kv.split(t, 0, p.world) for t in total]
    shares = [[one[r] for one in split] for r in range(p.world)]
    dtype, rows = total[0].dtype, keys[0].shape[p.kv.axis]
    buffers = [_buffer(p, keys, rows, dtype) for _ in range(p.world)]
    yield from exchange_all([flat(s) for s in shares], [b[0] for b in buffers], p.rank)
    parts = [shares[r] if r == p.rank else unflat(*buffers[r]) for r in range(p.world)]
    return [ordered_sum(of_ranks) for of_ranks in zip(*parts, strict=True)]


class Columns:
    """Parts of which each has all keys of its rows. `parts`: with K and V, and their shard."""

    def __init__(
        self, p: Problem, operands: Operands, rows: Shard, parts: list[tuple[Part, Keys, Shard]]
    ) -> None:
        self.p, self.operands, self.rows = p, operands, rows
        self.dim_v = parts[0][1][1].shape[-1]
        self.parts = [x for x in parts if p.q.ragged or self._has_rows(x[0])]
        self.direct = bool(self.parts) and (not p.q.ragged or len(self.parts) == 1)

    def _has_rows(self, part: Part) -> bool:
        return any(self.rows.pieces[i].end > self.rows.pieces[i].begin for i in part.q)

    def _arguments(self, part: Part, keys: Keys, shard: Shard) -> Arguments:
        return arguments_of_part(self.p, self.operands, part, keys, (self.rows, shard), self.direct)

    def forward(self) -> tuple:
        out = Output(self.p, self.operands, self.rows, self.dim_v, self.direct)
        for part, keys, shard in self.parts:
            out.add(part.q, self._arguments(part, keys, shard))
        return out.finish()

    def backward(self, incoming: tuple, *wanted: Keys) -> tuple[Gradients, list[list[Tensor]]]:
        """Gradients of the operands, and of each of the wanted keys."""
        grads = Gradients(self.p, self.operands, self.rows)
        sums: dict[int, tuple[Keys, KeySums]] = {}
        for part, keys, shard in self.parts:
            if id(shard) not in sums:
                # Keys outside a shard's one piece belong to other parts.
                some = self.p.kv.ragged or len(shard.pieces) == 1
                sums[id(shard)] = (keys, grads.sums_of(keys, self.p.kv, shard, some))
            wants = self.direct and self.operands.sink is not None
            arguments = self._arguments(part, keys, shard)
            grads.add((part.q, part.kv), sums[id(shard)][1], incoming, arguments, wants)
        totals: dict[int, list[Tensor]] = {}
        for keys, one in sums.values():
            found = list(one.finish().tensors)
            if id(keys[0]) in totals:
                for a, b in zip(totals[id(keys[0])], found, strict=True):
                    a.add_(b)
            else:
                totals[id(keys[0])] = found
        for keys in wanted:
            if id(keys[0]) not in totals:  # this rank has no row
                totals[id(keys[0])] = [torch.zeros_like(t, dtype=grads.dtype) for t in keys]
        return grads, [totals[id(keys[0])] for keys in wanted]


def of_gathered(p: Problem, operands: Operands, natural: Keys) -> Columns:
    rows, shard = p.q.shard(p.rank), p.kv.shard(0, p.world)
    parts = [(Part(0, -1, (i,), (0,), p.masks), natural, shard) for i in range(len(rows.pieces))]
    return Columns(p, operands, rows, parts)


def of_window(p: Problem, operands: Operands, plan: HaloPlan, held: Keys, own: Keys) -> Columns:
    parts = []
    for i, (shard, _) in enumerate(plan.shards):
        if plan.splits:
            parts.append((Part(0, -1, (2 * i,), (0,), p.masks), held, shard))
            mine = p.kv.shard(p.rank)
            parts.append((Part(0, -1, (2 * i + 1,), (i,), p.masks), own, mine))
        else:
            parts.append((Part(0, -1, (i,), (0,), p.masks), held, shard))
    return Columns(p, operands, plan.rows, parts)
