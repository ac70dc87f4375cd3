"""The ring: K and V of the ranks pass by, and partial results are merged."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import (
    Gradients,
    KeySums,
    Output,
    Pair,
    pair_of,
    region_of,
)
from te_attention.torch._cp_exchange import Exchange, Program
from te_attention.torch._cp_layout import Shard
from te_attention.torch._cp_parts import (
    Operands,
    Part,
    Prepared,
    Problem,
    arguments_of,
    can_prepare,
    prepare,
    ring_parts,
)

Keys = tuple[Tensor, Tensor]


def shard_of(p: Problem) -> Shard:
    return p.q.shard(p.member, p.group)


def shard_of_keys(p: Problem, member: int) -> Shard:
    return p.kv.shard(member % p.members, p.group)


def messages_of(peer: int, tensors: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """To or from a rank: a message for each tensor, so that none is copied into a buffer."""
    return [(peer, t.contiguous()) for t in tensors if t.numel()]


def _peer(p: Problem, member: int) -> int:
    """The rank of another member that has the same heads."""
    return member % p.members * p.group + p.rank % p.group


def positions_matter(p: Problem, operands: Operands) -> bool:
    """Whether more than the mask depends on positions."""
    return bool(p.dropout) or p.alibi or operands.slopes is not None or operands.bias is not None


def _is_direct(p: Problem, parts: list[Part]) -> bool:
    """Whether every row of O has exactly one part."""
    pieces = sorted(i for part in parts for i in part.q)
    count = len(shard_of(p).pieces)
    return pieces == list(range(count)) and (not p.q.ragged or len(parts) == 1)


def arguments_of_part(
    p: Problem,
    operands: Operands,
    part: Part,
    keys: Keys,
    shards: tuple[Shard, Shard],
    direct: bool,
) -> Arguments:
    mine, shard = shards
    pieces = ([mine.pieces[i] for i in part.q], [shard.pieces[i] for i in part.kv])
    sink = {"sink": operands.sink, "off_by_one": p.off_by_one} if direct else {}
    return arguments_of(p, operands, keys, shards, pieces, part, **sink)


class Ring:
    """The loop that forward and backward share: K and V of the members pass by."""

    def __init__(self, p: Problem, operands: Operands, keys: Keys) -> None:
        self.p, self.operands, self.keys = p, operands, keys
        self.positions = positions_matter(p, operands)
        found = p.memo.get(("ring", self.positions))
        if found is None:
            parts, sends, receives = ring_parts(p, self.positions)
            found = (parts, sends, receives, p.members == 1 and _is_direct(p, parts), {})
            p.memo["ring", self.positions] = found
        self.parts, self.sends, self.receives, self.direct, self.kept = found
        self.prepares = can_prepare(p, operands)

    def own_parts(self) -> tuple[list[Part], list[Part]]:
        """Parts of backward with the own keys. The second ones wait for the end.

        There they are computed while the last sums of dK and dV travel, which nothing else hides.
        """
        p, parts = self.p, [part for part in self.parts if part.step == 0]
        lengths = p.q.has_lengths or p.kv.has_lengths
        if p.members == 1 or lengths or not parts:
            return parts, []
        one = parts[0]
        if len(parts) > 1:  # sums of its keys must exist before those of other members arrive
            others = {piece for part in parts[1:] for piece in part.kv}
            return (parts[1:], [one]) if others.issuperset(one.kv) else (parts, [])
        if len(one.q) == 1 or one.kv != (0, 1) or (one.masked and not one.local):
            return parts, []
        last = one._replace(q=one.q[1:], last=one.masked)
        first = one._replace(q=one.q[:1], kv=one.kv[:1] if one.masked else one.kv)
        return [last], [first]

    def parts_of(self, step: int, divided: bool) -> tuple[list[Part], list[Part]]:
        """Parts of a step; `divided`: the second ones have keys that the first ones have not."""
        parts = [part for part in self.parts if part.step == step]
        whole = self.p.kv.ragged or self.p.kv.has_lengths
        if not divided or whole or len(parts) != 1 or parts[0].masked or len(parts[0].kv) == 1:
            return parts, []
        (one,) = parts
        return [one._replace(kv=one.kv[:1])], [one._replace(kv=one.kv[1:])]

    def source(self, step: int) -> int:
        return (self.p.member - step) % self.p.members

    def has(self, step: int) -> bool:
        """Whether the keys of this step are here."""
        return step == 0 or step - 1 in self.receives

    def next_keys(self, step: int, held: Pair) -> tuple[Exchange, Pair | None]:
        """The transfer that goes on during a step, and the memory for the keys that come."""
        p, exchange, coming = self.p, Exchange(), None
        if step in self.sends:
            exchange.sends = messages_of(_peer(p, p.member + 1), _parts(held, step))
        if step in self.receives:
            coming = self.like(self.source(step + 1), self.keys[0].dtype)
            exchange.receives = messages_of(_peer(p, p.member - 1), _parts(coming, step))
        return exchange, coming

    def shapes_of(self, source: int) -> list[list[int]]:
        """Of K and V of a member."""
        found = self.kept.get(source)
        if found is None:
            found = [list(t.shape) for t in self.keys]
            for shape in found:
                shape[self.p.kv.axis] = shard_of_keys(self.p, source).size
            self.kept[source] = found
        return found

    def like(self, source: int, dtype: torch.dtype) -> Pair:
        """Memory for K and V of a member, or for their gradients."""
        return pair_of(self.shapes_of(source), dtype, self.keys[0].device)

    def arguments(self, part: Part, held: Keys) -> Arguments | Prepared:
        """Those of a part. All but q, k and v is kept where nothing else is on a device."""
        p, operands = self.p, self.operands
        kept = self.kept.get(part) if self.prepares else None
        if kept is None:
            mine, shard = shard_of(p), shard_of_keys(p, part.source)
            made = arguments_of_part(p, operands, part, held, (mine, shard), self.direct)
            if self.prepares:
                regions = (region_of(p.q, mine, part.q), region_of(p.kv, shard, part.kv))
                self.kept[part] = (*regions, prepare(made))
            return made
        rows, columns, rest = kept
        return Prepared(rows.of(operands.q), columns.of(held[0]), columns.of(held[1]), rest)

    def length(self) -> int:
        """How many members further the own keys go."""
        p, key = self.p, ("length", self.positions)
        if key not in p.memo:
            steps = range(1, p.members)
            others = [replace(p, rank=_peer(p, p.member + step)) for step in steps]
            goes = [s - 1 in ring_parts(o, self.positions)[2]
                    for s, o in zip(steps, others, strict=True)]  # fmt: skip
            p.memo[key] = max((s for s, g in zip(steps, goes, strict=True) if g), default=0)
        return p.memo[key]


def _parts(keys: Pair, step: int) -> tuple[Tensor, ...]:
    """The messages of a step: K and V of a rank, which other ranks have in one memory."""
    return keys.tensors if step == 0 else keys.parts()


def forward_ring(ring: Ring) -> Program:
    p = ring.p
    out = Output(p, ring.operands, shard_of(p), ring.keys[1].shape[-1], ring.direct)
    held = Pair(ring.keys)
    for step in range(p.members):
        handle, coming = None, None
        if step < p.members - 1:
            exchange, coming = ring.next_keys(step, held)
            handle = yield exchange
            exchange = None  # the handle keeps the messages until it has been waited for
        for part in ring.parts:
            if part.step == step:
                out.add(part.q, ring.arguments(part, held.tensors))
        if handle is not None:
            yield handle
        if coming is not None:
            held = coming
    return out.finish()


def backward_ring(ring: Ring, incoming: tuple) -> Program:
    """Gradients of the operands, and the sums of dK and dV of the own member.

    The sums of a shard follow its keys one step behind, and go home from the last member that has
    its keys.
    """
    p = ring.p
    grads = Gradients(p, ring.operands, shard_of(p))
    held, home, carried = Pair(ring.keys), None, None
    end, (own, later) = ring.length(), ring.own_parts()
    of_own = grads.sums_of(ring.keys, p.kv, shard_of_keys(p, p.member))

    def finish_own() -> None:
        _differentiate(ring, grads, later, ring.keys, of_own, incoming)

    for step in range(p.members):
        handle, coming = None, None
        if step < p.members - 1:
            exchange, coming = ring.next_keys(step, held)
            handle = yield exchange
            exchange = None
        passed = None
        if step == 0:
            _differentiate(ring, grads, own, held.tensors, of_own, incoming)
            home = of_own.finish()
        elif ring.has(step):
            passed = yield from _sums_of_step(ring, step, held.tensors, grads, incoming, carried)
            carried = None
        if step > 0:
            meanwhile = finish_own if step == p.members - 1 else None
            home, carried = yield from _pass_on(
                ring, step, passed, home, grads.dtype, end, meanwhile
            )
        if handle is not None:
            yield handle
        if coming is not None:
            held = coming
    return grads, list(home.tensors)


def _sums_of_step(
    ring: Ring,
    step: int,
    keys: Keys,
    grads: Gradients,
    incoming: tuple,
    carried: tuple[object, Pair] | None,
) -> Program:
    """dK and dV of the members so far. carried: the transfer of those before, and its memory.

    The transfer goes on during the first parts. The others add to what it has brought.
    """
    first, others = ring.parts_of(step, carried is not None)
    shard = shard_of_keys(ring.p, ring.source(step))
    sums = grads.sums_of(keys, ring.p.kv, shard)
    _differentiate(ring, grads, first, keys, sums, incoming)
    if carried is None:
        return sums.finish()
    handle, came = carried
    yield handle
    passed = sums.added_to(came)
    _differentiate(ring, grads, others, keys, KeySums(came, ring.p.kv, shard, True), incoming)
    return passed


def _differentiate(
    ring: Ring,
    grads: Gradients,
    parts: list[Part],
    keys: Keys,
    sums: KeySums,
    incoming: tuple,
) -> None:
    wants = ring.direct and ring.operands.sink is not None
    for part in parts:
        grads.add((part.q, part.kv), sums, incoming, ring.arguments(part, keys), wants)


def _pass_on(
    ring: Ring,
    step: int,
    sums: Pair | None,
    home: Pair,
    dtype: torch.dtype,
    end: int,
    meanwhile: Callable[[], None] | None,
) -> Program:
    """The sums of a step go on with the keys, or home; the own ones arrive from where they end."""
    p, exchange, back, carried = ring.p, Exchange(), None, None
    if sums is not None:
        to = p.member + 1 if step in ring.sends else ring.source(step)
        exchange.sends += messages_of(_peer(p, to), sums.parts())
    if step in ring.receives:
        carried = ring.like(ring.source(step + 1), dtype)
        exchange.receives += messages_of(_peer(p, p.member - 1), carried.parts())
    if step == end:
        back = ring.like(p.member, dtype)
        exchange.receives += messages_of(_peer(p, p.member + step), back.parts())
    handle = yield exchange
    if meanwhile is not None:
        meanwhile()
    if carried is None or back is not None:
        yield handle
    if back is not None and p.group == 1 and step == p.members - 1:
        home = _rounded_sums(home, back, ring.operands.dtype)
    elif back is not None:
        home.add_(back)
    return home, None if carried is None else (handle, carried)


def _rounded_sums(sums: Pair, others: Pair, dtype: torch.dtype) -> Pair:
    """The last addition, in the type of the gradients: one pass over memory instead of two."""
    out = pair_of([t.shape for t in sums.tensors], dtype, sums.tensors[0].device)
    for mine, theirs, to in zip(sums.parts(), others.parts(), out.parts(), strict=True):
        torch.add(mine, theirs, out=to)
    return out
