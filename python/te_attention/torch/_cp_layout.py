"""The distribution of rows: one side of a problem whose sequences several ranks share.

The rule is that of src/math/cp.h, here on numbers of the host (dense formats) and on tensors with a
number for each sequence (ragged formats, whose lengths may be on the device).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch._arguments import FORMATS

MULTIPLE = 16  # of the rows of a chunk that is not exact
SHIFT = 40  # a key is sequence << SHIFT | position
Number = int | Tensor  # of the host, or int64 [batch]


def chunk_rows(length: Number, chunks: int) -> Number:
    """Rows of every chunk but the last ones."""
    rounded = (length // chunks + MULTIPLE) // MULTIPLE * MULTIPLE
    if isinstance(length, Tensor):
        return torch.where(length % chunks == 0, length // chunks, rounded)
    return length // chunks if length % chunks == 0 else rounded


def _at_most(a: Number, b: Number) -> Number:
    return torch.minimum(a, b) if isinstance(a, Tensor) else min(a, b)


class Piece(NamedTuple):
    """Rows that follow each other: [begin, end) of the sequence, from `local` on in a shard."""

    begin: Number
    end: Number
    local: Number


@dataclass(frozen=True)
class Shard:
    """The rows of one rank, or of a group of them. `size`: rows along the axis, on the host."""

    pieces: tuple[Piece, ...]
    size: int

    @cached_property
    def regions(self) -> dict:
        """Of region_of(), by format and pieces."""
        return {}


@dataclass(frozen=True, eq=False)
class Side:
    """Queries, or keys and values, of the whole problem.

    Dense: `length` rows of each sequence, of which cu_seqlens, if there are any, tell the valid
    ones. Ragged: sequences with room from starts[i] to starts[i + 1] among all tokens, `tokens` of
    them with each rank, the longest of at most `longest` rows.
    """

    format: str
    world: int
    zigzag: bool
    length: int = 0
    cu_seqlens: Tensor | None = None
    starts: Tensor | None = None
    tokens: tuple[int, ...] = ()
    longest: int = 0
    host_starts: Tensor | None = None  # starts on the host, where they are known there

    @cached_property
    def ragged(self) -> bool:
        """Whether sequences follow each other along one axis."""
        return self.starts is not None

    @cached_property
    def has_lengths(self) -> bool:
        """Whether tensors tell the rows of sequences."""
        return self.ragged or self.cu_seqlens is not None

    @cached_property
    def axis(self) -> int:
        """Of rows or tokens."""
        return FORMATS[self.format][1]

    @cached_property
    def heads_axis(self) -> int:
        """Of heads."""
        return FORMATS[self.format][2]

    @cached_property
    def pieces(self) -> int:
        """Runs of rows of a rank."""
        return 2 if self.zigzag else 1

    @cached_property
    def room(self) -> Number:
        """Rows of a sequence with its padding."""
        return self.starts.diff().long() if self.ragged else self.length

    @cached_property
    def valid(self) -> Number:
        """Rows of a sequence without its padding."""
        if self.cu_seqlens is None:
            return self.room
        lengths = self.cu_seqlens.diff().long()
        return torch.minimum(lengths, self.room) if self.ragged else lengths.clamp(max=self.length)

    def bound(self, chunks: int) -> int:
        """At least the rows of a piece of that many chunks of any sequence."""
        return min(self.longest, chunks * chunk_rows_bound(self.longest, self.world * self.pieces))

    def shard(self, member: int, group: int = 1) -> Shard:
        """Of `group` consecutive ranks, the member-th such group; of all ranks: natural order."""
        key = (member, group)
        if key not in self._shards:
            self._shards[key] = self._make_shard(member, group)
        return self._shards[key]

    @cached_property
    def _shards(self) -> dict[tuple[int, int], Shard]:
        return {}

    def _make_shard(self, member: int, group: int) -> Shard:
        chunks = self.world * self.pieces
        if group == self.world:
            runs = [(0, chunks)]
        else:
            runs = [(member * group, (member + 1) * group)]
            if self.zigzag:
                runs.append((chunks - runs[0][1], chunks - runs[0][0]))
        rows, room = chunk_rows(self.room, chunks), self.room
        spans = [(_at_most(rows * a, room), _at_most(rows * b, room)) for a, b in runs]
        if not self.ragged:
            local, pieces = 0, []
            for begin, end in spans:
                pieces.append(Piece(begin, end, local))
                local += end - begin
            return Shard(tuple(pieces), local)
        counts = torch.stack([end - begin for begin, end in spans])
        local = counts.sum(0).cumsum(0) - counts.sum(0)
        places = [local, local + counts[0]]
        size = sum(self.tokens[member * group : (member + 1) * group])
        pieces = [Piece(*span, at) for span, at in zip(spans, places, strict=False)]
        return Shard(tuple(pieces), size)

    def keys(self, shard: Shard) -> Tensor:
        """Sequence and position of each token of a ragged shard as one number, int64 [size]."""
        device = self.starts.device
        first, *second = shard.pieces
        count = first.end - first.begin
        total = count + sum(p.end - p.begin for p in second)
        token = torch.arange(shard.size, device=device)
        batch = total.shape[0]
        if batch == 0:
            return token
        sequence = torch.searchsorted(first.local, token, right=True).clamp_(1, batch) - 1
        at = token - first.local[sequence]
        position = first.begin[sequence] + at
        if second:
            later = second[0].begin[sequence] + at - count[sequence]
            position = torch.where(at < count[sequence], position, later)
        return (sequence << SHIFT) | position

    def valid_rows(self, shard: Shard) -> Tensor | None:
        """Which rows of a shard are no padding: bool [batch, size], ragged [size]; None: all."""
        if self.ragged:
            keys = self.keys(shard)
            sequence = keys >> SHIFT
            if self.valid.shape[0] == 0:
                return torch.zeros(shard.size, dtype=torch.bool, device=keys.device)
            return (keys & ((1 << SHIFT) - 1)) < self.valid[sequence]
        if self.cu_seqlens is None:
            return None
        positions = [torch.arange(p.begin, p.end, device=self.valid.device) for p in shard.pieces]
        return torch.cat(positions) < self.valid[:, None]

    def take(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """A view of rows of a dense tensor."""
        return tensor.narrow(self.axis, begin, end - begin)

    def _parts(self, group: int, member: int) -> tuple[list[int], list[tuple[int, Piece]]]:
        """Ranks of a group, and their pieces in the order in which its shard has them."""
        ranks = list(range(member * group, (member + 1) * group))
        ordered = [(r, self.shard(r).pieces[0]) for r in ranks]
        if self.zigzag:
            ordered += [(r, self.shard(r).pieces[1]) for r in reversed(ranks)]
        return ranks, ordered

    @cached_property
    def _orders(self) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        return {}

    def _order(self, member: int, group: int) -> tuple[Tensor, Tensor]:
        """Of the tokens of a group: from rank after rank to its shard, and back."""
        key = (member, group)
        if key not in self._orders:
            ranks = range(member * group, (member + 1) * group)
            there = torch.cat([self.keys(self.shard(r)) for r in ranks]).argsort()
            self._orders[key] = (there, there.argsort())
        return self._orders[key]

    def join(self, shards: list[Tensor], member: int, axis: int | None = None) -> Tensor:
        """The shard of a group from those of its ranks, in their order."""
        axis = self.axis if axis is None else axis
        group = len(shards)
        if group == 1:
            return shards[0]
        if self.ragged:
            return torch.cat(shards, axis).index_select(axis, self._order(member, group)[0])
        ranks, ordered = self._parts(group, member)
        return torch.cat(
            [shards[r - ranks[0]].narrow(axis, p.local, p.end - p.begin) for r, p in ordered], axis
        )

    def split(self, tensor: Tensor, member: int, group: int, axis: int | None = None) -> list:
        """The shards of the ranks of a group from that of the group: the inverse of join()."""
        axis = self.axis if axis is None else axis
        if group == 1:
            return [tensor]
        ranks = range(member * group, (member + 1) * group)
        sizes = [self.shard(r).size for r in ranks]
        if self.ragged:
            back = tensor.index_select(axis, self._order(member, group)[1])
            return list(back.split(sizes, axis))
        _, ordered = self._parts(group, member)
        runs: dict[int, list[Tensor]] = {r: [] for r in ranks}
        at = 0
        for r, p in ordered:
            runs[r].append(tensor.narrow(axis, at, p.end - p.begin))
            at += p.end - p.begin
        return [torch.cat(runs[r], axis) if len(runs[r]) > 1 else runs[r][0] for r in ranks]


def chunk_rows_bound(longest: int, chunks: int) -> int:
    """At least chunk_rows() of any length up to `longest`."""
    return (longest // chunks + MULTIPLE) // MULTIPLE * MULTIPLE if longest else 0
