"""Windows over sequences that ranks share, where nothing but the mask depends on positions.

Large launches take all rows of a rank with its own keys, as if they were one sequence. That is
right for all rows but the first ones of a piece, whose keys are partly those of the piece before;
what is computed for those is replaced. They are few: as many as the window has keys. So K and V of
no rows but those near the start of a piece are copied, and transfers go on during the large
launches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Output, region_of, wide
from te_attention.torch._cp_exchange import MARK, Program
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
    run_forward,
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


def _small(plan: HaloPlan) -> list[tuple[Part, Shard]]:
    """The first rows of the pieces that need keys of others, and where these keys are held."""
    return [
        (Part(0, -1, (2 * i,), (0,), masked=True), shard)
        for i, (shard, _) in enumerate(plan.shards)
        if plan.rows.pieces[2 * i].end > plan.rows.pieces[2 * i].begin
    ]


def _shares(p: Problem) -> list[tuple[int, int]]:
    """(first, count) of the key heads of each large launch."""
    half = p.heads_kv // 2
    return [(0, half), (half, p.heads_kv - half)] if half else [(0, p.heads_kv)]


class _Large:
    """The launches of all rows of a rank with its own keys: two, of half of the heads each.

    The first one begins before the host prepares a transfer, which takes it hundreds of
    microseconds. NCCL's kernel finds SMs when that one ends.
    """

    def __init__(self, p: Problem, operands: Operands, keys: Keys, plan: HaloPlan) -> None:
        self.p, self.group = p, p.heads_q // p.heads_kv
        self.shares = _shares(p) if plan.rows.size else []
        own = tuple(range(len(p.kv.shard(p.rank).pieces)))
        self.pieces = tuple(range(len(plan.rows.pieces)))
        part = Part(0, -1, self.pieces, own, masked=True, local=True)
        if self.shares:
            self.arguments = _arguments(p, operands, plan, part, keys, p.kv.shard(p.rank))

    def run(self, launch: Callable, rows: tuple, statistics: tuple, keys: tuple = ()) -> None:
        """Calls launch() for the next share of the heads, if any, with views of these tensors."""
        if not self.shares:
            return
        p, a, (begin, count) = self.p, self.arguments, self.shares.pop(0)
        of_q = (begin * self.group, count * self.group)
        rows, statistics, (q,) = (
            [None if t is None else t.narrow(axis, *of_q) for t in tensors]
            for tensors, axis in ((rows, p.q.heads_axis), (statistics, 1), ((a.q,), p.q.heads_axis))
        )
        k, v, *keys = (t.narrow(p.kv.heads_axis, begin, count) for t in (a.k, a.v, *keys))
        a = a._replace(q=q, k=k, v=v)
        if isinstance(a, Arguments) and a.k_descale is not None and a.k_descale.numel() > 1:
            descales = (t.narrow(0, begin, count) for t in (a.k_descale, a.v_descale))
            a = a._replace(**dict(zip(("k_descale", "v_descale"), descales, strict=True)))
        launch(rows, statistics, keys, a)


def forward_window(p: Problem, operands: Operands, keys: Keys, plan: HaloPlan) -> Program:
    """O, LSE and row maxima, and K and V of the first rows, which backward needs again."""
    large, (exchange, held, complete) = _Large(p, operands, keys, plan), plan.start(keys)
    exchange.early = True
    out = Output(p, operands, plan.rows, keys[1].shape[-1], direct=True)

    def launch(rows: list, statistics: list, _: list, arguments: Arguments | Prepared) -> None:
        run_forward(*rows, *statistics, arguments)

    yield MARK
    large.run(launch, (out.o,), (out.lse, out.max))
    handle = yield exchange
    large.run(launch, (out.o,), (out.lse, out.max))
    out.written = set(large.pieces)
    yield handle
    complete()
    for part, shard in _small(plan):
        out.replace(part.q, _arguments(p, operands, plan, part, held, shard))
    return out.finish(), held


def backward_window(
    p: Problem, operands: Operands, keys: Keys, plan: HaloPlan, held: Keys, incoming: Incoming
) -> Program:
    """dQ, and dK and dV of the own rows.

    The first rows come before the second large launch, so that the gradients of other ranks' keys
    travel during that one. In the large launches an LSE of -inf leaves these rows out.
    """
    dout, dlse, o, lse = incoming
    large, small = _Large(p, operands, keys, plan), _small(plan)
    dq = torch.empty_like(operands.q)
    sums = [torch.empty_like(t) for t in keys]
    hidden = lse.clone() if small else lse
    for part, _ in small:
        region_of(p.q, plan.rows, part.q).of_rows(hidden).fill_(-torch.inf)

    def launch(rows: list, statistics: list, sums: list, arguments: Arguments | Prepared) -> None:
        of_dlse, of_lse = (None if t is None else t.contiguous() for t in statistics)
        given = (rows[1], of_dlse, rows[2], of_lse)
        run_backward((rows[0], *sums), given, (False, False), arguments)

    large.run(launch, (dq, dout, o), (dlse, hidden), sums)
    rows = _FirstRows(p, operands, plan, incoming)
    total = rows.differentiate(small, held)
    exchange, add_received = plan.send_back(total, keys)
    handle = yield exchange
    large.run(launch, (dq, dout, o), (dlse, hidden), sums)
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
