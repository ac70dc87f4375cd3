"""Windows over sequences that ranks share, where nothing but the mask depends on positions.

One launch takes all rows of a rank with its own keys, as if they were one sequence. That is right
for all rows but the first ones of a piece, whose keys are partly those of the piece before; what it
computes for those is replaced. They are few: as many as the window has keys. So K and V of no rows
but those near the start of a piece are copied, and transfers go on during the large launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Output, region_of, wide
from te_attention.torch._cp_exchange import Exchange, Program
from te_attention.torch._cp_halo import HaloPlan
from te_attention.torch._cp_layout import Shard
from te_attention.torch._cp_parts import (
    Operands,
    Part,
    Prepared,
    Problem,
    can_prepare,
    prepare,
    run_backward,
)
from te_attention.torch._cp_ring import Keys, arguments_of_part, positions_matter

Incoming = tuple[Tensor, Tensor | None, Tensor, Tensor]  # dO, dLSE, O and LSE


def serves(p: Problem, operands: Operands) -> bool:
    """Whether a problem of the strategy "halo" is computed so."""
    lengths = p.q.has_lengths or p.kv.has_lengths
    return not (lengths or p.fp8 or operands.sink is not None or operands.head
                or positions_matter(p, operands))  # fmt: skip


def _arguments(
    p: Problem, operands: Operands, plan: HaloPlan, part: Part, keys: Keys, shard: Shard
) -> Arguments | Prepared:
    """Those of a part. All but its rows of q, k and v is kept where it can be."""
    prepares = can_prepare(p, operands)
    key = (part, operands.q.device, p.training, p.off_by_one, *p.options.values())
    kept = plan.memo.get(key) if prepares else None
    if kept is None:
        made = arguments_of_part(p, operands, part, keys, (plan.rows, shard), direct=True)
        if prepares:
            plan.memo[key] = prepare(made)
        return made
    rows, columns = region_of(p.q, plan.rows, part.q), region_of(p.kv, shard, part.kv)
    return Prepared(rows.of(operands.q), columns.of(keys[0]), columns.of(keys[1]), kept)


def _large(p: Problem, plan: HaloPlan) -> Part:
    """All rows with the own keys."""
    own = tuple(range(len(p.kv.shard(p.rank).pieces)))
    return Part(0, -1, tuple(range(len(plan.rows.pieces))), own, masked=True, local=True)


def _small(plan: HaloPlan) -> list[tuple[Part, Shard]]:
    """The first rows of the pieces that need keys of others, and where these keys are held."""
    return [
        (Part(0, -1, (2 * i,), (0,), masked=True), shard)
        for i, (shard, _) in enumerate(plan.shards)
        if plan.rows.pieces[2 * i].end > plan.rows.pieces[2 * i].begin
    ]


def forward_window(p: Problem, operands: Operands, keys: Keys, plan: HaloPlan) -> Program:
    """O, LSE and row maxima, and K and V of the first rows, which backward needs again."""
    exchange, held, complete = plan.start(keys)
    handle = yield exchange
    out = Output(p, operands, plan.rows, keys[1].shape[-1], direct=True)
    if plan.rows.size:
        part = _large(p, plan)
        out.add(part.q, _arguments(p, operands, plan, part, keys, p.kv.shard(p.rank)))
    yield handle
    complete()
    for part, shard in _small(plan):
        out.replace(part.q, _arguments(p, operands, plan, part, held, shard))
    return out.finish(), held


def backward_window(
    p: Problem, operands: Operands, keys: Keys, plan: HaloPlan, held: Keys, incoming: Incoming
) -> Program:
    """dQ, and dK and dV of the own rows.

    The first rows come first, so that the gradients of other ranks' keys travel during the large
    launch. There an LSE of -inf leaves these rows out.
    """
    rows, small = _FirstRows(p, operands, plan, incoming), _small(plan)
    total = rows.differentiate(small, held)
    exchange, add_received = plan.send_back(total, keys)
    handle = yield exchange
    dq = torch.empty_like(operands.q)
    sums = [torch.empty_like(t) for t in keys]
    if plan.rows.size:
        lse = incoming[3].clone() if small else incoming[3]
        for part, _ in small:
            region_of(p.q, plan.rows, part.q).of_rows(lse).fill_(-torch.inf)
        part = _large(p, plan)
        arguments = _arguments(p, operands, plan, part, keys, p.kv.shard(p.rank))
        run_backward((dq, *sums), (*incoming[:3], lse), (False, False), arguments)
    rows.put_into(dq)
    plan.add_own(total, sums)
    yield handle
    add_received(sums)
    return dq, sums


class _FirstRows:
    """Gradients of the first rows of pieces, in the type of sums."""

    def __init__(self, p: Problem, operands: Operands, plan: HaloPlan, incoming: Incoming) -> None:
        self.p, self.operands, self.plan, self.incoming = p, operands, plan, incoming
        self.dq: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def differentiate(self, small: list[tuple[Part, Shard]], held: Keys) -> list[Tensor]:
        """dK and dV of the held rows."""
        p, dtype, disjoint = self.p, wide(self.operands.dtype), self.plan.disjoint
        make = torch.empty if disjoint else torch.zeros
        total = [make(t.shape, dtype=dtype, device=t.device) for t in held]
        dout, dlse, o, lse = self.incoming
        for part, shard in small:
            region = region_of(p.q, self.plan.rows, part.q)
            statistics = [region.of_rows(t) for t in (dlse, lse)]
            statistics = [None if t is None else t.contiguous() for t in statistics]
            given = (region.of(dout), statistics[0], region.of(o), statistics[1])
            arguments = _arguments(p, self.operands, self.plan, part, held, shard)
            dq = torch.empty(arguments.q.shape, dtype=dtype, device=held[0].device)
            views = [region_of(p.kv, shard, part.kv).of(t) for t in total]
            parts = views if disjoint else [torch.empty_like(t) for t in views]
            run_backward((dq, *parts), given, (False, False), arguments)
            for view, one in zip(views, parts, strict=True):
                if not disjoint:
                    view.add_(one)
            self.dq.append((region.of, dq))
        return total

    def put_into(self, dq: Tensor) -> None:
        for view_of, rows in self.dq:
            view_of(dq).copy_(rows)
