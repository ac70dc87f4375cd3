"""The program of one rank: a generator that yields its transfers and computes between them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Gradients, Output, gradient_of_sink
from te_attention.torch._cp_exchange import (
    Exchange,
    Program,
    exchange_all,
    shared_state,
    sum_over_ranks,
)
from te_attention.torch._cp_halo import halo_plan
from te_attention.torch._cp_heads import Heads
from te_attention.torch._cp_layout import Shard
from te_attention.torch._cp_parts import (
    Operands,
    Part,
    Problem,
    arguments_of,
    flat,
    ring_parts,
    unflat,
)

Keys = tuple[Tensor, Tensor]
RINGS = ("ring", "a2a")  # a2a: a ring of one member


@dataclass(eq=False)
class Inputs:
    """The local tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
    slopes: Tensor | None = None
    rng_state: Tensor | None = None


@dataclass(eq=False)
class Saved:
    """The inputs of backward: the tensors of the program after an exchange of heads."""

    operands: Operands
    keys: Keys
    o: Tensor
    lse: Tensor


# ----------------------------------------------------------------------------------------- ring


def _shard(p: Problem) -> Shard:
    return p.q.shard(p.member, p.group)


def _keys_shard(p: Problem, member: int) -> Shard:
    return p.kv.shard(member % p.members, p.group)


def _buffer(p: Problem, keys: Keys, rows: int, dtype: torch.dtype) -> tuple[Tensor, list[tuple]]:
    """A message with K and V, or their gradients, of so many rows; its shapes."""
    shapes = []
    for t in keys:
        shape = list(t.shape)
        shape[p.kv.axis] = rows
        shapes.append(tuple(shape))
    total = sum(torch.Size(shape).numel() for shape in shapes)
    return torch.empty(total, dtype=dtype, device=keys[0].device), shapes


def _peer(p: Problem, member: int) -> int:
    """The rank of another member that has the same heads."""
    return member % p.members * p.group + p.rank % p.group


def _positions(p: Problem, operands: Operands) -> bool:
    """Whether more than the mask depends on positions."""
    return bool(p.dropout) or p.alibi or operands.slopes is not None or operands.bias is not None


def _is_direct(p: Problem, parts: list[Part]) -> bool:
    """Whether every row of O has exactly one part."""
    pieces = sorted(i for part in parts for i in part.q)
    count = len(_shard(p).pieces)
    return pieces == list(range(count)) and (not p.q.ragged or len(parts) == 1)


def _arguments(
    p: Problem, operands: Operands, part: Part, keys: Keys, shard: Shard, direct: bool
) -> Arguments:
    mine = _shard(p)
    pieces = ([mine.pieces[i] for i in part.q], [shard.pieces[i] for i in part.kv])
    sink = {"sink": operands.sink, "off_by_one": p.off_by_one} if direct else {}
    shards = (mine, shard)
    return arguments_of(p, operands, keys, shards, pieces, part.masked, part.local, **sink)


class _Ring:
    """The loop that forward and backward share: K and V of the members pass by."""

    def __init__(self, p: Problem, operands: Operands, keys: Keys) -> None:
        self.p, self.operands, self.keys = p, operands, keys
        self.parts, self.sends, self.receives = ring_parts(p, _positions(p, operands))
        self.direct = p.members == 1 and _is_direct(p, self.parts)

    def source(self, step: int) -> int:
        return (self.p.member - step) % self.p.members

    def has(self, step: int) -> bool:
        """Whether the keys of this step are here."""
        return step == 0 or step - 1 in self.receives

    def next_keys(self, step: int, held: Keys) -> tuple[Exchange, tuple | None]:
        """The transfer that goes on during a step, and the buffer for what comes."""
        p, exchange, coming = self.p, Exchange(), None
        if step in self.sends:
            exchange.sends.append((_peer(p, p.member + 1), flat(held)))
        if step in self.receives:
            coming = self.buffer(self.source(step + 1), self.keys[0].dtype)
            exchange.receives.append((_peer(p, p.member - 1), coming[0]))
        return exchange, coming

    def buffer(self, source: int, dtype: torch.dtype) -> tuple[Tensor, list[tuple]]:
        return _buffer(self.p, self.keys, _keys_shard(self.p, source).size, dtype)

    def arguments(self, part: Part, held: Keys) -> Arguments:
        shard = _keys_shard(self.p, part.source)
        return _arguments(self.p, self.operands, part, held, shard, self.direct)

    def length(self) -> int:
        """How many members further the own keys go."""
        p, last = self.p, 0
        for step in range(1, p.members):
            other = replace(p, rank=_peer(p, p.member + step))
            if step - 1 in ring_parts(other, _positions(p, self.operands))[2]:
                last = step
        return last


def _forward_ring(ring: _Ring) -> Program:
    p = ring.p
    out = Output(p, ring.operands, _shard(p), ring.keys[1].shape[-1], ring.direct)
    held = ring.keys
    for step in range(p.members):
        handle, coming = None, None
        if step < p.members - 1:
            exchange, coming = ring.next_keys(step, held)
            handle = yield exchange
        for part in ring.parts:
            if part.step == step:
                out.add(part.q, ring.arguments(part, held))
        if handle is not None:
            yield handle
        if coming is not None:
            held = tuple(unflat(*coming))
    return out.finish()


def _backward_ring(ring: _Ring, incoming: tuple) -> Program:
    """Gradients of the operands, and the sums of dK and dV of the own member.

    The sums of a shard follow its keys one step behind, and go home from the last member that has
    its keys.
    """
    p = ring.p
    grads = Gradients(p, ring.operands, _shard(p))
    held, home, carried = ring.keys, None, None
    end = ring.length()
    for step in range(p.members):
        handle, coming = None, None
        if step < p.members - 1:
            exchange, coming = ring.next_keys(step, held)
            handle = yield exchange
        sums = None
        if ring.has(step):
            sums = _sums_of_step(ring, grads, held, step, incoming)
        if carried is not None:
            yield carried[0]
            _add(sums, carried[1])
            carried = None
        if step == 0:
            home = sums
        else:
            carried = yield from _pass_on(ring, step, sums, home, grads.dtype, end)
        if handle is not None:
            yield handle
        if coming is not None:
            held = tuple(unflat(*coming))
    return grads, home


def _pass_on(ring: _Ring, step: int, sums, home: list[Tensor], dtype: torch.dtype, end: int):
    """The sums of a step go on with the keys, or home; the own ones arrive from where they end."""
    p, exchange, back, carried = ring.p, Exchange(), None, None
    if sums is not None:
        to = p.member + 1 if step in ring.sends else ring.source(step)
        exchange.sends.append((_peer(p, to), flat(sums)))
    if step in ring.receives:
        carried = ring.buffer(ring.source(step + 1), dtype)
        exchange.receives.append((_peer(p, p.member - 1), carried[0]))
    if step == end:
        back = ring.buffer(p.member, dtype)
        exchange.receives.append((_peer(p, p.member + step), back[0]))
    handle = yield exchange
    if carried is None or back is not None:
        yield handle
    if back is not None:
        _add(home, back)
    return None if carried is None else (handle, carried)


def _add(sums: list[Tensor], message: tuple[Tensor, list[tuple]]) -> None:
    for mine, theirs in zip(sums, unflat(*message), strict=True):
        mine.add_(theirs)


def _sums_of_step(
    ring: _Ring, grads: Gradients, held: Keys, step: int, incoming: tuple
) -> list[Tensor]:
    sums = grads.sums_of(held, ring.p.kv, _keys_shard(ring.p, ring.source(step)))
    wants = ring.direct and ring.operands.sink is not None
    for part in ring.parts:
        if part.step == step:
            grads.add((part.q, part.kv), sums, incoming, ring.arguments(part, held), wants)
    return sums.finish()


# ------------------------------------------------------------------ keys of the whole sequence


def _gather(p: Problem, keys: Keys) -> Program:
    """K and V of all ranks in natural order."""
    buffers = [_buffer(p, keys, p.kv.shard(r).size, keys[0].dtype) for r in range(p.world)]
    yield from exchange_all([flat(keys)] * p.world, [b[0] for b in buffers], p.rank)
    shards = [list(keys) if r == p.rank else unflat(*b) for r, b in enumerate(buffers)]
    return tuple(p.kv.join([s[i] for s in shards], 0) for i in range(2))


def _scatter(p: Problem, keys: Keys, total: list[Tensor]) -> Program:
    """The sums, in the order of ranks, of dK and dV of the own rows."""
    split = [p.kv.split(t, 0, p.world) for t in total]
    shares = [[one[r] for one in split] for r in range(p.world)]
    dtype, rows = total[0].dtype, keys[0].shape[p.kv.axis]
    buffers = [_buffer(p, keys, rows, dtype) for _ in range(p.world)]
    yield from exchange_all([flat(s) for s in shares], [b[0] for b in buffers], p.rank)
    sums = None
    for r in range(p.world):
        share = shares[r] if r == p.rank else unflat(*buffers[r])
        if sums is None:
            sums = [t.clone() for t in share]
        else:
            for a, b in zip(sums, share, strict=True):
                a.add_(b)
    return sums


class _Columns:
    """Each piece of queries has one part, with keys that other ranks sent before."""

    def __init__(self, p: Problem, operands: Operands, keys: Keys, of: list | None) -> None:
        self.p, self.operands, self.keys = p, operands, keys
        mine = p.q.shard(p.rank)
        self.of = [(p.kv.shard(0, p.world), 0)] * len(mine.pieces) if of is None else of
        self.pieces = [i for i, x in enumerate(mine.pieces) if p.q.ragged or x.end > x.begin]
        self.direct = bool(self.pieces) and (not p.q.ragged or len(self.pieces) == 1)

    def part(self, i: int) -> tuple[Part, Arguments]:
        shard, j = self.of[i]
        part = Part(0, -1, (i,), (j,), self.p.masks)
        return part, _arguments(self.p, self.operands, part, self.keys, shard, self.direct)

    def forward(self) -> tuple:
        out = Output(self.p, self.operands, self.p.q.shard(self.p.rank), self.keys[1].shape[-1],
                     self.direct)  # fmt: skip
        for i in self.pieces:
            part, arguments = self.part(i)
            out.add(part.q, arguments)
        return out.finish()

    def backward(self, incoming: tuple) -> tuple[Gradients, list[Tensor]]:
        """Gradients of the operands, and dK and dV of these keys."""
        grads = Gradients(self.p, self.operands, self.p.q.shard(self.p.rank))
        total: list[Tensor] | None = None
        for i in self.pieces:
            part, arguments = self.part(i)
            sums = grads.sums_of(self.keys, self.p.kv, self.of[i][0], whole=True)
            wants = self.direct and self.operands.sink is not None
            grads.add((part.q, part.kv), sums, incoming, arguments, wants)
            found = sums.finish()
            if total is None:
                total = found
                continue
            for a, b in zip(total, found, strict=True):
                a.add_(b)
        if total is None:
            total = [torch.zeros(t.shape, dtype=grads.dtype, device=t.device) for t in self.keys]
        return grads, total


# --------------------------------------------------------------------------------- the programs


def forward(p: Problem, x: Inputs) -> Program:
    """O, LSE and row maxima of the local rows, and what backward needs."""
    rng = x.rng_state
    if p.dropout and p.world > 1:
        rng = yield from shared_state(p, rng, x.q.device)
    operands = Operands(x.q, x.bias, x.sink, x.slopes, rng)
    keys: Keys = (x.k, x.v)
    heads = Heads(p) if p.group > 1 else None
    if heads is not None:
        operands, keys = yield from heads.to_heads(operands, keys)
    if heads is not None and heads.idle:
        result = heads.nothing(operands, keys)
    elif p.strategy in RINGS:
        result = yield from _forward_ring(_Ring(p, operands, keys))
    elif p.strategy == "all_gather":
        natural = yield from _gather(p, keys)
        result = _Columns(p, operands, natural, None).forward()
    else:
        plan = halo_plan(p)
        held = yield from plan.collect(keys)
        result = _Columns(p, operands, held, plan.shards).forward()
    o, lse, most = result
    saved = Saved(operands, keys, o, lse)
    if heads is not None:
        o, lse, most = yield from heads.to_rows(o, lse, most)
    return (o, lse, most), saved


def backward(p: Problem, x: Inputs, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Program:
    """Gradients of q, k, v, bias and sink."""
    operands, keys = saved.operands, saved.keys
    heads = Heads(p) if p.group > 1 else None
    if heads is not None:
        dout, dlse = yield from heads.gradients_to_heads(dout, dlse)
    incoming = (dout, dlse, saved.o, saved.lse)
    direct = False
    if heads is not None and heads.idle:
        grads, sums = heads.no_gradients(operands, keys)
    elif p.strategy in RINGS:
        ring = _Ring(p, operands, keys)
        direct = ring.direct
        grads, sums = yield from _backward_ring(ring, incoming)
    elif p.strategy == "all_gather":
        natural = yield from _gather(p, keys)
        columns = _Columns(p, operands, natural, None)
        direct = columns.direct
        grads, total = columns.backward(incoming)
        sums = yield from _scatter(p, keys, total)
    else:
        plan = halo_plan(p)
        held = yield from plan.collect(keys)
        columns = _Columns(p, operands, held, plan.shards)
        direct = columns.direct
        grads, total = columns.backward(incoming)
        sums = yield from plan.distribute(total, keys, grads.dtype)
    dsink = grads.dsink
    if operands.sink is not None and not direct:
        dsink = gradient_of_sink(p, operands.sink, incoming)
    dq, dbias = grads.finish(), grads.dbias
    if heads is not None:
        dq, sums, dbias, dsink = yield from heads.gradients_to_rows(dq, sums, dbias, dsink, x)
    if x.sink is not None:
        dsink = yield from sum_over_ranks(p, dsink)
    if x.bias is not None:
        if p.bias_row:
            dbias = yield from sum_over_ranks(p, dbias)
        dbias = dbias.to(x.bias.dtype)
    return dq, *(t.to(x.k.dtype) for t in sums), dbias, dsink
