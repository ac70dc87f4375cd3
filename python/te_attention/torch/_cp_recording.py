"""The recording of a call: its instructions, the memory that they name, and their repetition."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from te_attention.torch._errors import guarded
from te_attention.torch._library import OPS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
          torch.float8_e5m2)  # fmt: skip
CONSTANT = -1  # in place of a slot: the offset is an address
ALIGNMENT = 16  # bytes of which engines take account
UNIT = 256  # bytes to which memory in the arena is aligned
MAX_ARENA_BYTES = 1 << 20  # of memory that is allocated at once, and kept to the end

_replay = guarded(OPS.replay.default._op)


class Kind(IntEnum):
    """The instructions, as src/torch/replay.cpp has them."""

    ALLOCATE = 0
    FREE = 1
    LAUNCH = 2
    COPY = 3
    FILL = 4
    ADD = 5
    MERGE = 6
    MARK = 7
    TRANSFER = 8
    WAIT = 9
    RESULT = 10
    VIEW = 11
    AFTER = 12
    JOIN = 13
    ARENA = 14
    PLACE = 15
    ROUND = 16


class Unrecordable(Exception):  # noqa: N818 (no error: the call goes on)
    """A call does something that cannot be recorded."""


class View(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    def bytes(self) -> int:
        """From the first element to the end of the last one."""
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def numbers(self) -> list[int]:
        if self.dtype not in DTYPES:
            raise Unrecordable(f"a tensor of {self.dtype}")
        return [DTYPES.index(self.dtype), len(self.size), *self.size, *self.stride]


class Slot:
    """Memory of the call. An instruction names it by its number, and an offset in bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.view = View.of(tensor)
        self.begin, self.end = tensor.data_ptr(), tensor.data_ptr() + self.view.bytes()
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.device = tensor.device.index if tensor.is_cuda else -1


class Step(NamedTuple):
    """An instruction: its operands, and the slots that it uses."""

    kind: Kind
    operands: list[int]
    slots: tuple[int, ...] = ()


class Recording(NamedTuple):
    """The steps of a call, for replay(). places: of each result, an input's or a new one's."""

    code: Tensor
    launches: Tensor
    places: tuple[int | None, ...]
    kept: list[Tensor]  # constants that the code has by address
    sums: list[tuple[int, int, int]]  # at the end: the sum and what is added, as new results

    def replay(self, inputs: Sequence[Tensor], transport: Tensor) -> list[Tensor | None] | None:
        """Repeats the call; its results. transport: see src/torch/replay.cpp.

        None: the inputs differ from those that were recorded in more than values, and nothing was
        done.
        """
        new = _replay(self.code, self.launches, transport, inputs)
        if not new:
            return None
        for to, one, other in self.sums:
            torch.add(new[one], new[other], out=new[to])
        count = len(inputs)
        return [
            None if i is None else inputs[i] if i < count else new[i - count] for i in self.places
        ]


def head(inputs: Sequence[Slot]) -> list[int]:
    """The facts with which replay.cpp compares inputs: views, places, and which share memory."""
    out = [len(inputs)]
    for slot in inputs:
        dtype, *shape = slot.view.numbers()
        out += [dtype, slot.device, ALIGNMENT, slot.begin % ALIGNMENT, *shape]
    for i, a in enumerate(inputs):
        for j, b in enumerate(inputs):
            if i < j and a.begin < b.end and b.begin < a.end:
                out += [i, j, b.begin - a.begin]
    return [len(out), *out]


def _arena_places(steps: Sequence[Step], slots: Sequence[Slot]) -> tuple[dict[int, int], int]:
    """Places in one memory of all slots that are no results, and its bytes; none if it is large."""
    kept = {slot for step in steps if step.kind in (Kind.RESULT, Kind.VIEW) for slot in step.slots}
    places, end = {}, 0
    for step in steps:
        if step.kind == Kind.ALLOCATE and step.slots[0] not in kept:
            slot = step.slots[0]
            places[slot] = end
            end += -(-slots[slot].view.bytes() // UNIT) * UNIT
    return (places, end) if len(places) > 1 and end <= MAX_ARENA_BYTES else ({}, 0)


def encode(steps: Sequence[Step], slots: Sequence[Slot], count: int) -> Tensor:
    """The argument `code` of replay.cpp. count: of slots that are inputs.

    The memory of the others is freed after the last step that uses it, or at the end if it is
    little, because each allocation takes the host microseconds.
    """
    last = {slot: i for i, step in enumerate(steps) for slot in step.slots}
    places, bytes_of_all = _arena_places(steps, slots)
    out = [*head(slots[:count]), len(slots)]
    if places:
        out += [int(Kind.ARENA), bytes_of_all]
    for i, (kind, operands, used) in enumerate(steps):
        if kind == Kind.ALLOCATE and used[0] in places:
            out += [int(Kind.PLACE), used[0], places[used[0]]]
            continue
        out.append(int(kind))
        if kind == Kind.ALLOCATE:
            out += [used[0], *slots[used[0]].view.numbers()]
        out += operands
        for slot in dict.fromkeys(used):
            if last[slot] == i and slot >= count and slot not in places:
                out += [int(Kind.FREE), slot]
    return torch.tensor(out)
