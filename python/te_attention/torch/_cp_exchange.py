"""Transfers between ranks, as data that a rank's program yields."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention.torch._cp_parts import Problem

Program = Generator[object, object, object]


MARK = object()  # a program yields it where an exchange may begin that it yields later


class After(NamedTuple):
    """A program yields it for what follows until it yields the handle again.

    That may run once the transfer is done, at the same time as work that is under way: the two have
    no memory in common that either writes.
    """

    handle: object


@dataclass
class Exchange:
    """Messages to and from ranks of the world: contiguous tensors.

    A program yields it and is sent a handle; it yields the handle before it reads what it receives.
    It must not write to what it sends before that. early: a device may begin after the work before
    the last MARK, by default after all work so far.
    """

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)
    early: bool = False


def exchange_all(sends: list[Tensor | None], receives: list[Tensor | None], rank: int) -> Program:
    """One message to and from every other rank; None, or without elements: none."""
    exchange = Exchange()
    for r, (there, back) in enumerate(zip(sends, receives, strict=True)):
        if r != rank and there is not None and there.numel():
            exchange.sends.append((r, there.contiguous()))
        if r != rank and back is not None and back.numel():
            exchange.receives.append((r, back))
    yield (yield exchange)


def shared_state(p: Problem, mine: Tensor | None, device: torch.device) -> Program:
    """The random state of rank 0."""
    state = torch.empty(2, dtype=torch.int64, device=device) if p.rank else mine
    exchange = Exchange()
    if p.rank == 0:
        exchange.sends = [(r, state) for r in range(1, p.world)]
    else:
        exchange.receives = [(0, state)]
    yield (yield exchange)
    return state


def of_all_ranks(p: Problem, tensor: Tensor) -> Program:
    """A tensor of this shape from each rank, in the order of ranks."""
    tensor = tensor.contiguous()
    buffers = [tensor if r == p.rank else torch.empty_like(tensor) for r in range(p.world)]
    yield from exchange_all([tensor] * p.world, buffers, p.rank)
    return buffers


def ordered_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, the same bits each time, in new memory."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


def sum_over_ranks(p: Problem, tensor: Tensor) -> Program:
    """The sum in the order of ranks, the same bits everywhere."""
    return ordered_sum((yield from of_all_ranks(p, tensor)))
