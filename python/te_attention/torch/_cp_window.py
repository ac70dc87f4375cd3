"""Windows over sequences that ranks share, where nothing but the mask depends on positions.

Rows of a rank that follow each other are a run. The first rows of a run, as many as the window has
keys, attend to keys of other ranks; all others to keys of the run alone. So large launches take
those with the keys of the run, while K and V of few rows travel, and small launches the first rows.
Backward knows O and LSE: there small launches take the first rows with keys before the run alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Output, region_of, wide
from te_attention.torch._cp_exchange import MARK, After, Program
from te_attention.torch._cp_halo import HaloPlan
from te_attention.torch._cp_layout import Piece, Shard
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
    p: Problem, operands: Operands, plan: HaloPlan, part: Part, keys: Keys,
    shards: tuple[Shard, Shard],
) -> Arguments | Prepared:  # fmt: skip
    """Those of a part. All but its rows of q, k and v is kept where it can be."""
    prepares = can_prepare(p, operands)
    chosen = zip(shards, (part.q, part.kv), strict=True)
    places = tuple(shard.pieces[i] for shard, pieces in chosen for i in pieces)
    key = (part, places, operands.q.device, p.training, p.off_by_one, *p.options.values())
    kept = plan.memo.get(key) if prepares else None
    if kept is None:
        made = arguments_of_part(p, operands, part, keys, shards, direct=True)
        if prepares:
            plan.memo[key] = prepare(made)
        return made
    rows, columns = region_of(p.q, shards[0], part.q), region_of(p.kv, shards[1], part.kv)
    return Prepared(rows.of(operands.q), columns.of(keys[0]), columns.of(keys[1]), kept)


def _small(plan: HaloPlan, shards: list[Shard]) -> list[tuple[Part, Shard]]:
    """The first rows of the pieces that need keys of others. shards: held keys of each piece."""
    return [
        (Part(0, -1, (2 * i,), (0,), masked=True), shard)
        for i, shard in enumerate(shards)
        if plan.rows.pieces[2 * i].end > plan.rows.pieces[2 * i].begin
    ]


class _Large:
    """The launches of rows with keys of this rank alone: one for each run.

    Forward, a single run has two, of half of the heads each: the transfer has begun before them,
    and NCCL's kernel finds SMs when the first one ends. Backward, the small launch comes first.
    """

    def __init__(
        self, p: Problem, operands: Operands, keys: Keys, plan: HaloPlan, whole: bool = False
    ) -> None:
        """whole: of all rows, the first ones of a run too."""
        self.p, self.operands, self.keys, self.plan = p, operands, keys, plan
        runs = plan.memo.get("runs") or plan.memo.setdefault("runs", _runs(plan))
        runs = [(of_keys if whole else rows, of_keys) for rows, of_keys in runs]
        runs = [run for run in runs if run[0].size]
        half = p.heads_kv // 2 if len(runs) == 1 and not whole else 0
        shares = [(0, half), (half, p.heads_kv - half)] if half else [(0, p.heads_kv)]
        self.launches = [(run, share) for run in runs for share in shares]

    def run(self, launch: Callable, rows: tuple, statistics: tuple, keys: tuple = ()) -> None:
        """Calls launch() for the next of them, if any, with views of these tensors."""
        if not self.launches:
            return
        p, (shards, share) = self.p, self.launches.pop(0)
        last = shards[0].size < shards[1].size
        part = Part(0, -1, (0,), (0,), masked=True, local=True, last=last)
        a = _arguments(p, self.operands, self.plan, part, self.keys, shards)
        of_rows, of_keys = region_of(p.q, shards[0], (0,)), region_of(p.kv, shards[1], (0,))
        rows = [of_rows.of(t) for t in rows]
        statistics = [of_rows.of_rows(t) for t in statistics]
        keys = [of_keys.of(t) for t in keys]
        if share[1] < p.heads_kv:
            a, rows, statistics, keys = self._heads(share, a, rows, statistics, keys)
        launch(rows, statistics, keys, a)

    def _heads(
        self, share: tuple[int, int], a: Arguments | Prepared, rows: list, statistics: list,
        keys: list,
    ) -> tuple:  # fmt: skip
        """The same of some key heads."""
        p, (begin, count) = self.p, share
        group = p.heads_q // p.heads_kv
        of_q = (begin * group, count * group)
        *rows, q = (t.narrow(p.q.heads_axis, *of_q) for t in (*rows, a.q))
        statistics = [None if t is None else t.narrow(1, *of_q) for t in statistics]
        k, v, *keys = (t.narrow(p.kv.heads_axis, begin, count) for t in (a.k, a.v, *keys))
        a = a._replace(q=q, k=k, v=v)
        if isinstance(a, Arguments) and a.k_descale is not None and a.k_descale.numel() > 1:
            descales = (t.narrow(0, begin, count) for t in (a.k_descale, a.v_descale))
            a = a._replace(**dict(zip(("k_descale", "v_descale"), descales, strict=True)))
        return a, rows, statistics, keys


def _runs(plan: HaloPlan) -> list[tuple[Shard, Shard]]:
    """Of each run: the rows that attend to its keys alone, and its keys."""
    found: list[tuple[Piece, Piece]] = []
    for first, rest in zip(plan.rows.pieces[::2], plan.rows.pieces[1::2], strict=True):
        rows, keys = rest, Piece(first.begin, rest.end, first.local)
        if found and found[-1][1].end == keys.begin:
            before_rows, before_keys = found.pop()
            keys = before_keys._replace(end=rest.end)
            if before_rows.end > before_rows.begin:
                rows = before_rows._replace(end=rest.end)
        if keys.end > keys.begin:
            found.append((rows, keys))
    return [tuple(Shard((x,), x.end - x.begin) for x in one) for one in found]


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
    out.written = set(range(len(plan.rows.pieces)))
    yield After(handle)
    complete()
    for part, shard in _small(plan, [shard for shard, _ in plan.shards]):
        out.replace(part.q, _arguments(p, operands, plan, part, held, (plan.rows, shard)))
    yield handle
    return out.finish(), held


def backward_window(
    p: Problem, operands: Operands, keys: Keys, plan: HaloPlan, held: Keys, incoming: Incoming
) -> Program:
    """dQ, and dK and dV of the own rows.

    Large launches take all rows with the keys of their run, small ones the first rows with the keys
    before it. These come first, so that the gradients of other ranks' keys travel meanwhile.
    """
    dout, dlse, o, lse = incoming
    large = _Large(p, operands, keys, plan, whole=True)
    dq = torch.empty_like(operands.q)
    sums = [torch.empty_like(t) for t in keys]

    def launch(rows: list, statistics: list, sums: list, arguments: Arguments | Prepared) -> None:
        of_dlse, of_lse = (None if t is None else t.contiguous() for t in statistics)
        given = (rows[1], of_dlse, rows[2], of_lse)
        run_backward((rows[0], *sums), given, (False, False), arguments)

    rows = _FirstRows(p, operands, plan, incoming)
    total = rows.differentiate(_small(plan, plan.before), held)
    exchange, add_received = plan.send_back(total, keys)
    handle = yield exchange
    while large.launches:
        large.run(launch, (dq, dout, o), (dlse, lse), sums)
    rows.add_to(dq)
    plan.add_own(total, sums)
    yield handle
    add_received(sums)
    return dq, sums


class _FirstRows:
    """Gradients from the first rows of pieces with the keys before, in the type of sums."""

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
            shards = (self.plan.rows, shard)
            arguments = _arguments(p, self.operands, self.plan, part, held, shards)
            dq = torch.empty(arguments.q.shape, dtype=dtype, device=held[0].device)
            views = [region_of(p.kv, shard, part.kv).of(t) for t in total]
            parts = views if disjoint else [torch.empty_like(t) for t in views]
            run_backward((dq, *parts), given, (False, False), arguments)
            for view, one in zip(views, parts, strict=True):
                if not disjoint:
                    view.add_(one)
            self.dq.append((region.of, dq))
        return total

    def add_to(self, dq: Tensor) -> None:
        for view_of, rows in self.dq:
            view_of(dq).add_(rows)
