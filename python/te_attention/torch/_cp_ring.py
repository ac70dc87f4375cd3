"""The ring: K and V of the ranks pass by, and partial results are merged."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments
from te_attention.torch._cp_accumulate import Output, Pair, pair_of, region_of
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


def peer_of(p: Problem, member: int) -> int:
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
        key = ("ring", self.positions, keys[0].shape[p.kv.heads_axis])
        found = p.memo.get(key)
        if found is None:
            parts, sends, receives = ring_parts(p, self.positions)
            found = (parts, sends, receives, p.members == 1 and _is_direct(p, parts), {})
            p.memo[key] = found
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

    def source(self, step: int) -> int:
        return (self.p.member - step) % self.p.members

    def has(self, step: int) -> bool:
        """Whether the keys of this step are here."""
        return step == 0 or step - 1 in self.receives

    def next_keys(self, step: int, held: Pair) -> tuple[Exchange, Pair | None]:
        """The transfer that goes on during a step, and the memory for the keys that come."""
        p, exchange, coming = self.p, Exchange(), None
        if step in self.sends:
            exchange.sends = messages_of(peer_of(p, p.member + 1), _parts(held, step))
        if step in self.receives:
            coming = self.like(self.source(step + 1), self.keys[0].dtype)
            exchange.receives = messages_of(peer_of(p, p.member - 1), _parts(coming, step))
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
            others = [replace(p, rank=peer_of(p, p.member + step)) for step in steps]
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
