"""Cuts tensors into the rows of each rank, and puts them together."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_attention.torch._cp_choice import Sharding
from te_attention.torch._cp_exchange import exchange_all, ordered_sum
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_problem import SHARDINGS, refuse, shares
from te_attention.torch._cp_transport import drive, transport_of


def _side(
    size: int, world: int, sharding: Sharding, cu_seqlens: Tensor | None, seqlen: int | None
) -> Side:
    """How a tensor is cut; `size`: its rows."""
    if sharding not in SHARDINGS:
        refuse("sharding", repr(sharding), f"one of {', '.join(SHARDINGS)}")
    zigzag = sharding == "zigzag"
    if cu_seqlens is None:
        return Side("bshd", world, zigzag, size if seqlen is None else seqlen)
    lengths = cu_seqlens.diff().long()
    if cu_seqlens.device.type == "cpu":
        tokens = tuple(shares(lengths, world, zigzag))
    else:
        tokens = (size // world,) * world
    return Side("thd", world, zigzag, 0, cu_seqlens, cu_seqlens, tokens, size)


def shard(
    x: Tensor,
    group: dist.ProcessGroup,
    axis: int = 1,
    *,
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    rank: int | None = None,
) -> Tensor:
    """The rows of this rank, or of `rank`, along `axis` of a tensor with all rows: a copy.

    cu_seqlens: for tokens of ragged sequences, where each sequence starts, with its padding; on a
    GPU all lengths are multiples of twice the ranks. Lengths that are not give ranks different
    numbers of rows: chunks are multiples of 16 then, and the last ones short.
    """
    world = dist.get_world_size(group)
    rank = dist.get_rank(group) if rank is None else rank
    side = _side(x.shape[axis], world, sharding, cu_seqlens, None)
    if side.ragged:
        keys = side.keys(side.shard(rank))
        every = side.keys(side.shard(0, world))
        return x.index_select(axis, torch.searchsorted(every, keys).to(x.device))
    pieces = side.shard(rank).pieces
    return torch.cat([x.narrow(axis, p.begin, p.end - p.begin) for p in pieces], axis)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, side, axis, transport):
        ctx.side, ctx.axis, ctx.transport = side, axis, transport
        rank, world = transport.rank, transport.world
        buffers = []
        for r in range(world):
            shape = list(x.shape)
            shape[axis] = side.shard(r).size
            buffers.append(x if r == rank else x.new_empty(shape))
        drive(exchange_all([x.contiguous()] * world, buffers, rank), transport)
        return side.join(buffers, 0, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        transport = ctx.transport
        rank, world = transport.rank, transport.world
        parts = ctx.side.split(gradient, 0, world, ctx.axis)
        parts = [part.contiguous() for part in parts]
        buffers = [parts[rank] if r == rank else torch.empty_like(parts[rank])
                   for r in range(world)]  # fmt: skip
        drive(exchange_all(parts, buffers, rank), transport)
        return ordered_sum(buffers), None, None, None


def unshard(
    x: Tensor,
    group: dist.ProcessGroup,
    axis: int = 1,
    *,
    sharding: Sharding = "zigzag",
    cu_seqlens: Tensor | None = None,
    seqlen: int | None = None,
) -> Tensor:
    """All rows, on every rank, from the rows of each: the inverse of shard().

    seqlen: all rows, where ranks have different numbers of them. The gradient of a row is the sum
    of those that the ranks have for it.
    """
    world = dist.get_world_size(group)
    rows = x.shape[axis]
    side = _side(rows * world, world, sharding, cu_seqlens, seqlen)
    needed = side.shard(dist.get_rank(group)).size
    if rows != needed:
        refuse(f"x.shape[{axis}]", rows, f"{needed} rows (seqlen= gives the sum of all ranks)")
    return _Unshard.apply(x, side, axis, transport_of((group,), None))
