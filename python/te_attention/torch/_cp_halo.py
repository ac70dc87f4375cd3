"""Halo: a rank receives the rows of K and V that its queries attend to, and no others."""

import itertools
from collections.abc import Callable, Generator
from dataclasses import replace

import torch
from torch import Tensor

from te_attention.torch._bounded import keep
from te_attention.torch._cp_exchange import Exchange, exchange_all
from te_attention.torch._cp_layout import SHIFT, Number, Piece, Shard, Side
from te_attention.torch._cp_parts import UNBOUNDED, Problem, flat, unflat

Program = Generator[object, object, object]
POSITION = (1 << SHIFT) - 1
MOST = 256  # plans that are kept
_PLANS: dict[tuple, "HaloPlan"] = {}


def halo_plan(p: Problem, local: bool = False) -> "HaloPlan":
    """Which rows travel. That of a dense problem is made once.

    `local`: the rows of a rank are one sequence (_cp_window.py), where the problem splits.
    """
    if p.q.ragged or p.kv.ragged or isinstance(p.shift, Tensor):
        return HaloPlan(p)
    key = (p.format, p.world, p.rank, p.q.zigzag, p.q.length, p.kv.length, p.causal, p.window,
           p.shift, local)  # fmt: skip
    return _PLANS.get(key) or keep(_PLANS, key, HaloPlan(p, local), MOST)


def _host_side(side: Side) -> Side:
    """The same side with its lengths on the host."""
    if not side.ragged:
        return side
    starts = side.host_starts
    return replace(side, cu_seqlens=None, starts=starts, host_starts=starts)


def _on_host(number: Number, count: int) -> Tensor:
    """One number for each sequence."""
    if isinstance(number, Tensor):
        return number
    return torch.full((count,), number, dtype=torch.int64)


def _splits(p: Problem) -> bool:
    """Whether the rows of a piece attend to keys of that piece and to some before it."""
    if p.q.ragged or p.kv.ragged or p.q.length != p.kv.length or isinstance(p.shift, Tensor):
        return False
    left, right = p.window
    return left != UNBOUNDED and (p.causal or right == 0) and p.shift == 0


def _runs(keys: Tensor, rows: Tensor) -> list[tuple[int, int]]:
    """(first, count) of rows that follow each other both in the shard and in the sequence."""
    if not len(rows):
        return []
    position = keys[rows]
    breaks = ((rows.diff() != 1) | (position.diff() != 1)).nonzero()[:, 0] + 1
    begins = [0, *breaks.tolist()]
    ends = [*begins[1:], len(rows)]
    return [(int(rows[a]), b - a) for a, b in zip(begins, ends, strict=True)]


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of spans in ascending order."""
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            first, last = found.pop()
            found.append((first, max(last, end)))
        else:
            found.append((begin, end))
    return found


def _received(rows: Tensor) -> Tensor:
    """Where a message for these rows arrives: they themselves if they are contiguous."""
    if rows.is_contiguous():
        return rows
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


class HaloPlan:
    """Rows of each rank's shard that another one needs, as indices along the axis of rows.

    Dense sequences have one length, so that one stands for all of them. `rows`: the pieces of this
    rank's queries. With `splits` each of them is two: the first rows, whose keys are collected,
    and all others, which attend to keys of this rank alone, so that no copy of those is made.
    """

    def __init__(self, p: Problem, local: bool = False) -> None:
        self.p = p
        self.memo: dict = {}  # of the arguments of parts
        self.q, self.kv = _host_side(p.q), _host_side(p.kv)
        self.device = p.kv.starts.device if p.kv.ragged else None
        self.splits = _splits(p)
        self.local = local and self.splits
        self.rows = self._rows() if self.splits else p.q.shard(p.rank)
        self.count = p.kv.starts.shape[0] - 1 if p.kv.ragged else 1
        keys = [self._keys(r) for r in range(p.world)]
        spans = [self._spans(r) for r in range(p.world)]
        self.wanted = [self._chosen(keys[j], spans[p.rank]) for j in range(p.world)]
        self.given = [self._chosen(keys[p.rank], spans[r]) for r in range(p.world)]
        held = torch.cat([k[i] for k, i in zip(keys, self.wanted, strict=True)])
        self.order = held.argsort()
        self.back = self.order.argsort()
        self.sizes = [len(i) for i in self.wanted]
        self.shards = [(self._shard(held[self.order], a, b), 0) for a, b in spans[p.rank]]
        self._moved: dict[torch.device, list[Tensor]] = {}
        if self.local:
            self._find_runs(keys)

    def _find_runs(self, keys: list[Tensor]) -> None:
        """Rows that follow each other in a shard and where they are held: contiguous memory."""
        rank, at, places = self.p.rank, 0, self.back.split(self.sizes)
        self.gives = [_runs(keys[rank], i) for i in self.given]  # (first row of the shard, count)
        self.takes = []  # (first held row, count)
        for r in range(self.p.world):
            at, rows = 0, []
            for _, count in _runs(keys[r], self.wanted[r]):
                rows.append((int(places[r][at]), count))
                at += count
            self.takes.append(rows)
        pieces = self.q.shard(rank).pieces
        self.before = [self._before(s, self._start(pieces, i))
                       for i, (s, _) in enumerate(self.shards)]  # fmt: skip
        spans = sorted((s.pieces[0].local, s.pieces[0].local + s.pieces[0].end - s.pieces[0].begin)
                       for s in self.before)  # fmt: skip
        self.spans = [(begin, end) for begin, end in spans if end > begin]
        # Whether no two pieces need the same row before theirs.
        self.disjoint = all(a[1] <= b[0] for a, b in itertools.pairwise(self.spans))

    @staticmethod
    def _before(held: Shard, start: int) -> Shard:
        """The held keys before this row."""
        piece = held.pieces[0]
        return Shard((piece._replace(end=max(min(piece.end, start), piece.begin)),), held.size)

    def start(self, keys: tuple[Tensor, Tensor]) -> tuple[Exchange, list[Tensor], Callable]:
        """The transfer of the wanted rows, their memory, and what completes it afterwards."""
        axis, exchange, late = self.p.kv.axis, Exchange(), []
        total = sum(self.sizes)
        held = [torch.empty(self._shape(t, total), dtype=t.dtype, device=t.device) for t in keys]
        for r in range(self.p.world):
            if r == self.p.rank:
                continue
            exchange.sends += [
                (r, t.narrow(axis, begin, count).contiguous())
                for begin, count in self.gives[r]
                for t in keys
            ]
            for begin, count in self.takes[r]:
                for rows in (t.narrow(axis, begin, count) for t in held):
                    message = _received(rows)
                    exchange.receives.append((r, message))
                    if message is not rows:
                        late.append((rows, message))

        def complete() -> None:
            for (begin, count), (to, _) in self._own():
                for t, h in zip(keys, held, strict=True):
                    h.narrow(axis, to, count).copy_(t.narrow(axis, begin, count))
            for rows, message in late:
                rows.copy_(message)

        return exchange, held, complete

    def _own(self) -> list:
        return list(zip(self.gives[self.p.rank], self.takes[self.p.rank], strict=True))

    def send_back(self, total: list[Tensor], keys: tuple[Tensor, Tensor]) -> tuple:
        """The transfer of sums of dK and dV to their owners, and what adds the received ones."""
        axis, exchange, received = self.p.kv.axis, Exchange(), []
        for r in range(self.p.world):
            if r == self.p.rank:
                continue
            for begin, count in self.takes[r]:
                exchange.sends += [(r, t.narrow(axis, begin, count).contiguous()) for t in total]
            for begin, count in self.gives[r]:
                for i, t in enumerate(total):
                    shape = self._shape(keys[i], count)
                    message = torch.empty(shape, dtype=t.dtype, device=t.device)
                    exchange.receives.append((r, message))
                    received.append((i, begin, count, message))

        def add(sums: list[Tensor]) -> None:
            for i, begin, count, message in received:
                sums[i].narrow(axis, begin, count).add_(message)

        return exchange, add

    def add_own(self, total: list[Tensor], sums: list[Tensor]) -> None:
        """Adds sums of keys before pieces to those of the own rows that are among them."""
        axis = self.p.kv.axis
        for (row, count), (at, _) in self._own():
            for begin, end in _union(self.spans):
                first, last = max(begin, at), min(end, at + count)
                for to, t in zip(sums, total, strict=True):
                    if first < last:
                        of_row = to.narrow(axis, row + first - at, last - first)
                        of_row.add_(t.narrow(axis, first, last - first))

    def _start(self, pieces: tuple[Piece, ...], i: int) -> Number:
        """Of the rows that follow each other here up to this piece."""
        follows = self.local and i and pieces[i - 1].end == pieces[i].begin
        return pieces[i - 1 if follows else i].begin

    def _first_rows(self, pieces: tuple[Piece, ...], i: int) -> int:
        """How many rows of a piece attend to keys before it that are not just before it here."""
        piece, start = pieces[i], self._start(pieces, i)
        reach = self.p.window[0] - (piece.begin - start)
        return max(min(reach, piece.end - piece.begin), 0) if start else 0

    def _rows(self) -> Shard:
        whole, pieces = self.q.shard(self.p.rank), []
        for i, x in enumerate(whole.pieces):
            n = self._first_rows(whole.pieces, i)
            pieces.append(Piece(x.begin, x.begin + n, x.local))
            pieces.append(Piece(x.begin + n, x.end, x.local + n))
        return Shard(tuple(pieces), whole.size)

    def _keys(self, rank: int) -> Tensor:
        """Sequence and position of each row of K of a rank."""
        shard = self.kv.shard(rank)
        if self.kv.ragged:
            return self.kv.keys(shard)
        return torch.cat([torch.arange(x.begin, x.end) for x in shard.pieces])

    def _spans(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """For each piece of queries of a rank: the columns [begin, end) that it attends to."""
        p, out = self.p, []
        shift, room = _on_host(p.shift, self.count), _on_host(self.kv.room, self.count)
        if not p.kv.ragged and shift.numel() != 1:  # one range for all sequences
            shifts = (shift.min()[None], shift.max()[None]) if shift.numel() else (room * 0,) * 2
        else:
            shifts = (shift, shift)
        left, right = p.window
        right = 0 if p.causal else right
        pieces = self.q.shard(rank).pieces
        for i, piece in enumerate(pieces):
            last_row = piece.begin + self._first_rows(pieces, i) if self.splits else piece.end
            begin, end = (_on_host(n, self.count) for n in (piece.begin, last_row))
            if not p.kv.ragged and p.q.ragged:  # sequences of queries differ, those of keys do not
                begin = begin.min()[None] if begin.numel() else begin.new_zeros(1)
                end = end.max()[None] if end.numel() else end.new_zeros(1)
            first = begin * 0 if left == UNBOUNDED else begin + shifts[0] - left
            last = room if right == UNBOUNDED else end + shifts[1] + right
            first = torch.minimum(first.clamp(min=0), room)
            last = torch.maximum(torch.minimum(last, room), first)
            empty = end <= begin
            out.append((first, torch.where(empty, first, last)))
        return out

    @staticmethod
    def _chosen(keys: Tensor, spans: list[tuple[Tensor, Tensor]]) -> Tensor:
        sequence, position = keys >> SHIFT, keys & POSITION
        mask = torch.zeros(len(keys), dtype=torch.bool)
        for begin, end in spans:
            if len(keys):
                mask |= (position >= begin[sequence]) & (position < end[sequence])
        return mask.nonzero()[:, 0]

    def _shard(self, keys: Tensor, begin: Tensor, end: Tensor) -> Shard:
        if not self.p.kv.ragged:
            a, b = int(begin), int(end)
            return Shard((Piece(a, b, int(torch.searchsorted(keys, a))),), len(keys))
        sequence = torch.arange(self.count) << SHIFT
        local = torch.searchsorted(keys, sequence | begin)
        piece = Piece(*(t.to(self.device) for t in (begin, end, local)))
        return Shard((piece,), len(keys))

    def _indices(self, device: torch.device) -> list[Tensor]:
        """order, back, then those given to each rank."""
        if device not in self._moved:
            self._moved[device] = [t.to(device) for t in (self.order, self.back, *self.given)]
        return self._moved[device]

    def collect(self, keys: tuple[Tensor, Tensor]) -> Program:
        """K and V of the wanted rows, in natural order."""
        axis, world = self.p.kv.axis, self.p.world
        order, _, *given = self._indices(keys[0].device)
        shapes = [[self._shape(t, n) for t in keys] for n in self.sizes]
        sends, buffers = [None] * world, [None] * world
        mine = [t.index_select(axis, given[self.p.rank]) for t in keys]
        for r in range(world):
            if r == self.p.rank:
                continue
            if len(given[r]):
                sends[r] = flat([t.index_select(axis, given[r]) for t in keys])
            total = sum(torch.Size(s).numel() for s in shapes[r])
            buffers[r] = keys[0].new_empty(total)
        yield from exchange_all(sends, buffers, self.p.rank)
        came = [mine if r == self.p.rank else unflat(buffers[r], shapes[r]) for r in range(world)]
        return tuple(
            torch.cat([one[i] for one in came], axis).index_select(axis, order) for i in range(2)
        )

    def _shape(self, like: Tensor, rows: int) -> tuple[int, ...]:
        shape = list(like.shape)
        shape[self.p.kv.axis] = rows
        return tuple(shape)

    def distribute(
        self,
        total: list[Tensor],
        keys: tuple[Tensor, Tensor],
        dtype: torch.dtype,
        own: list[Tensor] | None = None,
    ) -> Program:
        """Sums of dK and dV of the own rows, in the order of ranks: the way back of collect().

        own: sums of the own rows that are there already, to which the others are added.
        """
        axis, world, rank = self.p.kv.axis, self.p.world, self.p.rank
        _, back, *given = self._indices(keys[0].device)
        shares = [t.index_select(axis, back).split(self.sizes, axis) for t in total]
        sends = [flat([one[r] for one in shares]) for r in range(world)]
        shapes = [[self._shape(t, len(given[r])) for t in keys] for r in range(world)]
        buffers = [
            torch.empty(sum(torch.Size(s).numel() for s in shapes[r]), dtype=dtype,
                        device=keys[0].device)
            for r in range(world)
        ]  # fmt: skip
        yield from exchange_all(sends, buffers, rank)
        out = own
        if out is None:
            out = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t in keys]
        for r in range(world):
            came = [one[r] for one in shares] if r == rank else unflat(buffers[r], shapes[r])
            for to, share in zip(out, came, strict=True):
                to.index_add_(axis, given[r], share)
        return out
