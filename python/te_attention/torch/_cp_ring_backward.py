"""The ring in backward: sums of dK and dV follow K and V, and go home."""

from te_attention.torch._cp_accumulate import Gradients, KeySums, Pair, pair_of
from te_attention.torch._cp_exchange import Exchange, Program
from te_attention.torch._cp_heads import HEADS_OF_LSE, operands_of_heads
from te_attention.torch._cp_parts import Part
from te_attention.torch._cp_ring import (
    Keys,
    Ring,
    messages_of,
    peer_of,
    shard_of,
    shard_of_keys,
)


def backward_ring(ring: Ring, incoming: tuple) -> Program:
    """Gradients of the operands, and the sums of dK and dV of the own member.

    The sums of a shard follow its keys one step behind, and go home from the last member that has
    its keys. Those of half of the heads travel while the other half is computed, so that a part
    adds to sums that have arrived.
    """
    p = ring.p
    grads = Gradients(p, ring.operands, shard_of(p))
    held, (own, later) = Pair(ring.keys), ring.own_parts()
    of_own = grads.sums_of(ring.keys, p.kv, shard_of_keys(p, p.member))
    halves: list[_Half] = []
    for step in range(p.members):
        handle, coming = None, None
        if step < p.members - 1:
            exchange, coming = ring.next_keys(step, held)
            handle = yield exchange
            exchange = None
        if step == 0:
            _differentiate(ring, grads, own, ring.keys, of_own, incoming)
            of_own.finish()
            halves = [_Half(ring, grads, incoming, heads) for heads in _heads_of_halves(ring)]
        else:
            for half in halves:
                yield from half.step(step, held.tensors, of_own.pair)
        if handle is not None:
            yield handle
        if coming is not None:
            held = coming
    grads.written.update(halves[-1].grads.written)
    _differentiate(ring, grads, later, ring.keys, of_own, incoming)
    home, out = of_own.pair, None
    if p.group == 1 and ring.length() == p.members - 1 > 0:  # the last addition of all
        out = pair_of([t.shape for t in home.tensors], ring.operands.dtype, ring.keys[0].device)
    for half in halves:
        yield from half.arrive(home, out)
    return grads, list((out or home).tensors)


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


def _heads_of_halves(ring: Ring) -> list[range]:
    """The heads of K and V of each half. One has all where no sums arrive during a step."""
    heads = ring.keys[0].shape[ring.p.kv.heads_axis]
    if ring.p.members <= 2 or heads < 2:
        return [range(heads)]
    return [range(heads // 2), range(heads // 2, heads)]


class _Half:
    """The steps of backward with some heads, and the sums of dK and dV that go round for them."""

    def __init__(self, ring: Ring, grads: Gradients, incoming: tuple, heads: range) -> None:
        p, self.heads = ring.p, heads
        all_heads = ring.keys[0].shape[p.kv.heads_axis]
        self.ring, self.grads, self.incoming = ring, grads, incoming
        if len(heads) < all_heads:
            group = ring.operands.q.shape[p.q.heads_axis] // all_heads
            of_q = range(heads.start * group, heads.stop * group)
            operands = operands_of_heads(p, ring.operands, of_q, heads)
            self.ring = Ring(p, operands, self._keys(ring.keys))
            self.grads = grads.of_heads(operands, of_q)
            axes = (p.q.heads_axis, HEADS_OF_LSE) * 2
            self.incoming = tuple(
                None if t is None else t.narrow(axis, of_q.start, len(of_q))
                for t, axis in zip(incoming, axes, strict=True)
            )
        self.transfer: object = None  # of the step before
        self.carried: Pair | None = None  # the sums that it brings for the next step
        self.back: Pair | None = None  # those of the own keys

    def _keys(self, keys: Keys) -> Keys:
        axis = self.ring.p.kv.heads_axis
        if keys[0].shape[axis] == len(self.heads):
            return keys
        return tuple(t.narrow(axis, self.heads.start, len(self.heads)) for t in keys)

    def step(self, step: int, keys: Keys, home: Pair) -> Program:
        """Computes the parts of a step, and begins the transfer of their sums.

        They go on with the keys, or home; the own ones arrive from where they end.
        """
        ring, p = self.ring, self.ring.p
        yield from self.arrive(home, None)
        exchange, carried = Exchange(), self.carried
        self.carried = None
        if ring.has(step):
            shard = shard_of_keys(p, ring.source(step))
            keys = self._keys(keys)
            sums = KeySums(carried, p.kv, shard, complete=True) if carried is not None else (
                self.grads.sums_of(keys, p.kv, shard)
            )  # fmt: skip
            parts = [part for part in ring.parts if part.step == step]
            _differentiate(ring, self.grads, parts, keys, sums, self.incoming)
            to = p.member + 1 if step in ring.sends else ring.source(step)
            exchange.sends = messages_of(peer_of(p, to), sums.finish().parts())
        if step in ring.receives:
            self.carried = ring.like(ring.source(step + 1), self.grads.dtype)
            exchange.receives += messages_of(peer_of(p, p.member - 1), self.carried.parts())
        if step == ring.length():
            self.back = ring.like(p.member, self.grads.dtype)
            exchange.receives += messages_of(peer_of(p, p.member + step), self.back.parts())
        self.transfer = yield exchange

    def arrive(self, home: Pair, out: Pair | None) -> Program:
        """Waits for the transfer that was begun. out: the memory of home with what it brings."""
        if self.transfer is not None:
            yield self.transfer
        if self.back is not None:
            mine, to = (pair.of_heads(self.ring.p.kv, self.heads) for pair in (home, out or home))
            mine.add(self.back, to)
        self.transfer, self.back = None, None
