"""Records what a rank does in a call, so that equal calls repeat it without Python.

The program of a rank (_cp_run.py) does the same each time that shapes, strides and options are the
same: it allocates, computes parts, copies, and begins and awaits transfers. In one call a Recorder
records all of these. src/torch/replay.cpp repeats it, with the memory of the call at hand.
"""

import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from te_attention.torch._cp_exchange import MARK, After, Exchange
from te_attention.torch._cp_nccl import EVENTS
from te_attention.torch._cp_recording import (
    CONSTANT,
    Kind,
    Recording,
    Slot,
    Step,
    Unrecordable,
    View,
    encode,
)
from te_attention.torch._library import OPS

MOST = 1 << 23  # elements of a sum, which takes two passes over memory in replay.cpp

_ATEN = torch.ops.aten
_EMPTY = frozenset(
    (
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    )
)
_COPIES = frozenset((_ATEN.clone.default, _ATEN._to_copy.default))


class Recorder(TorchDispatchMode):
    """Records the operators of a call on `inputs`, and its transfers. `failed`: why it gave up."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.failed: str | None = None
        self.steps: list[Step] = []
        self.launches: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.slots: list[Slot] = []
        self.whole: set[int] = set()  # the slots that are a result with the view of one
        self.active: list[int] = []  # the slots that have their memory still, the last one first
        self.events = list(range(EVENTS))  # that no transfer has
        self.is_after = False  # whether steps are those of After
        self.sums: dict[int, tuple] = {}  # the operands of sums, by the places of their steps
        self.transfers: list[tuple[object, int, Step]] = []  # under way: handles, events
        self._attempt(lambda: [self._add(t) for t in inputs])

    def _attempt(self, work: Callable[[], object]) -> None:
        if self.failed is None:
            try:
                work()
            except Unrecordable as reason:
                self.failed = str(reason)

    # ---------------------------------------------------------------------------------- memory

    def _add(self, tensor: Tensor) -> int:
        if not tensor.numel():
            raise Unrecordable("a tensor without elements")
        slot, number = Slot(tensor), len(self.slots)
        if number >= len(self.inputs):  # where memory is used again, the tensor before is gone
            self.active = [i for i in self.active if not self._overlaps(i, slot)]
        self.slots.append(slot)
        self.active.insert(0, number)
        return number

    def _overlaps(self, number: int, slot: Slot) -> bool:
        other = self.slots[number]
        return other.begin < slot.end and slot.begin < other.end

    def _find(self, address: int) -> tuple[int, int] | None:
        for number in self.active:
            slot = self.slots[number]
            if slot.begin <= address < slot.end and not slot.storage.expired():
                return number, address - slot.begin
        return None

    def _memory(self, tensor: Tensor) -> tuple[int, int]:
        found = self._find(tensor.data_ptr())
        if found is None:
            raise Unrecordable("a tensor from outside the call")
        return found

    def _is_known(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and self._find(tensor.data_ptr()) is not None

    # ----------------------------------------------------------------------------------- steps

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._attempt(lambda: self._record_operator(func, args, kwargs or {}, out))
        return out

    def _record_operator(self, func, args: tuple, kwargs: dict, out: object) -> None:
        if func in _MAKERS:
            _MAKERS[func](self, args, out)
        elif not any(map(self._is_known, tree_leaves((args, kwargs)))):
            pass  # of constants, which are kept where a part reads them
        elif (func, len(kwargs)) in _WRITERS:
            _WRITERS[func, len(kwargs)](self, args, out)
        elif func in _COPIES:
            self._allocate(out)
            self._copy(out, args[0])
        elif func._schema.is_mutable or not self._are_views(out):
            raise Unrecordable(str(func))

    def _zeros(self, _args: tuple, out: Tensor) -> None:
        self._allocate(out)
        self._fill(out, 0.0)

    def _part_forward(self, args: tuple, out: bool) -> None:
        if out:
            self._part(OPS.record_part_forward.default, args, 7)

    def _part_backward(self, args: tuple, out: tuple) -> None:
        if args[7] or args[8]:
            raise Unrecordable("gradients of a bias or a sink")
        if out[2]:
            self._part(OPS.record_part_backward.default, args, 13)

    def _are_views(self, out: object) -> bool:
        return all(map(self._is_known, out if isinstance(out, (list, tuple)) else (out,)))

    def _allocate(self, tensor: Tensor) -> None:
        if tensor.device != self.inputs[0].device:
            raise Unrecordable("memory of another device")
        if self.is_after:
            raise Unrecordable("memory of the stream of transfers")
        number = self._add(tensor)
        self.steps.append(Step(Kind.ALLOCATE, [], (number,)))

    def _copy(self, to: Tensor, source: Tensor) -> None:
        self._elementwise(Kind.COPY, (to, source.expand(to.shape)))

    def _add_tensors(self, *tensors: Tensor) -> None:
        """The sum, and the two that are added."""
        self.sums[len(self.steps)] = [(*self._memory(t), View.of(t)) for t in tensors]
        self._elementwise(Kind.ADD, tensors)

    def _fill(self, to: Tensor, value: float) -> None:
        self._elementwise(Kind.FILL, (to,), struct.unpack("q", struct.pack("d", value)))

    def _elementwise(self, kind: int, tensors: Sequence[Tensor], more: Sequence[int] = ()) -> None:
        operands, slots = [], []
        for tensor in tensors:
            memory = self._memory(tensor)
            operands += [*memory, *View.of(tensor).numbers()]
            slots.append(memory[0])
        self.steps.append(Step(kind, [*operands, *more], tuple(slots)))

    def _part(self, record: Callable, args: tuple, first: int) -> None:
        """first: of the arguments that are the same each time."""
        constants = [t for t in args[first:] if isinstance(t, Tensor)]
        if any(map(self._is_known, constants)):
            raise Unrecordable("a part whose options are tensors of the call")
        self.kept += constants
        self._launch(*record(*args), constants)

    def _launch(self, launch: Tensor, memory: Tensor, constants: list[Tensor]) -> None:
        operands, slots = [], set()
        for index, address in enumerate(memory.tolist()):
            if not address:
                continue
            found = self._find(address)
            if found is None:
                if not any(t.data_ptr() == address for t in constants):
                    raise Unrecordable("memory that a part has made")
                found = (CONSTANT, address)
            operands += [index, *found]
            slots.add(found[0])
        operands = [len(self.launches), len(operands) // 3, *operands]
        self.launches.append(launch)
        self.steps.append(Step(Kind.LAUNCH, operands, tuple(slots - {CONSTANT})))

    def record_request(self, request: object, answer: object) -> None:
        """A request that a program has yielded, and the answer, of an exchange its handle."""
        if request is MARK:
            self.steps.append(Step(Kind.MARK, []))
        elif isinstance(request, After):
            if any(handle is request.handle for handle, *_ in self.transfers):
                self.is_after = True
                self.steps.append(Step(Kind.AFTER, []))
        elif isinstance(request, Exchange):
            self._attempt(lambda: self._begin(request, answer))
        else:
            self._wait(request)

    def _begin(self, exchange: Exchange, handle: object) -> None:
        if not (exchange.sends or exchange.receives):
            return
        if not self.events:
            raise Unrecordable("too many transfers at a time")
        event, slots = self.events.pop(0), []
        operands = [int(exchange.early), event, len(exchange.sends) + len(exchange.receives)]
        for sends, messages in ((1, exchange.sends), (0, exchange.receives)):
            for peer, tensor in messages:
                memory = self._memory(tensor)
                operands += [sends, peer, *memory, tensor.nbytes]
                slots.append(memory[0])
        self.steps.append(Step(Kind.TRANSFER, operands, tuple(slots)))
        self.transfers.append((handle, event, self.steps[-1]))

    def _wait(self, handle: object) -> None:
        for transfer in self.transfers:
            if transfer[0] is handle:
                self.transfers.remove(transfer)
                self.events.append(transfer[1])
                kind, slots = Kind.WAIT, transfer[2].slots
                if self.is_after:  # memory of what followed the transfer is free behind JOIN only
                    kind = Kind.JOIN
                    begin = max(i for i, s in enumerate(self.steps) if s.kind is Kind.AFTER)
                    slots += tuple(slot for step in self.steps[begin:] for slot in step.slots)
                self.steps.append(Step(kind, [transfer[1]], slots))
                self.is_after = False
                return

    # ---------------------------------------------------------------------------------- the end

    def finish(self, results: Sequence[Tensor | None]) -> Recording | None:
        """The recording of the call that has these results; None: there is none."""
        made: list[Recording] = []
        self._attempt(lambda: made.append(self._finish(results)))
        return made[0] if made else None

    def _finish(self, results: Sequence[Tensor | None]) -> Recording:
        if self.transfers:
            raise Unrecordable("a transfer that is not awaited")
        count, places = len(self.inputs), []
        given: dict[tuple[int, int, View], int] = {}  # results in new memory
        for tensor in results:
            if tensor is None:
                places.append(None)
                continue
            key = (*self._memory(tensor), View.of(tensor))
            if key[0] < count:
                places.append(self._input(*key))
                continue
            if key not in given:
                self._result(*key)
                given[key] = count + len(given)
            places.append(given[key])
        sums = self._last_sums(len(given))
        code = encode(self.steps, self.slots, count)
        launches = torch.cat(self.launches) if self.launches else torch.empty(0, dtype=torch.uint8)
        return Recording(code, launches, tuple(places), self.kept, sums)

    def _last_sums(self, count: int) -> list[tuple[int, int, int]]:
        """Takes out the sums that nothing follows which uses them. count: of new results.

        PyTorch computes them in one pass over memory, and the device is busy meanwhile.
        """
        last, used = [], set(range(len(self.inputs)))  # an input is no new result
        for place, step in reversed(list(enumerate(self.steps))):
            if step.kind == Kind.ADD and used.isdisjoint(step.slots):
                last.insert(0, place)
            elif step.kind not in (Kind.WAIT, Kind.JOIN, Kind.RESULT, Kind.VIEW):
                used.update(step.slots)
        found = []
        for place in last:
            operands = self.sums[place]
            for number, offset, view in operands:
                self._part_of_slot(number, offset, view)
            found.append((count, count + 1, count + 2))
            count += 3
        others = [sum_ for place, (sum_, *_) in self.sums.items() if place not in last]
        if any(math.prod(view.size) > MOST for _, _, view in others):
            raise Unrecordable("a sum of so many elements that its host time does not count")
        self.steps = [step for i, step in enumerate(self.steps) if i not in last]
        return found

    def _input(self, number: int, offset: int, view: View) -> int:
        if offset or view != self.slots[number].view:
            raise Unrecordable("a result that is another view of an input")
        return number

    def _result(self, number: int, offset: int, view: View) -> None:
        slot = self.slots[number]
        if (
            view.dtype == slot.view.dtype and view.bytes() == slot.view.bytes()
            and not offset and number not in self.whole
        ):  # fmt: skip
            slot.view = view  # it is allocated so
            self.whole.add(number)
            self.steps.append(Step(Kind.RESULT, [number], (number,)))
        else:
            self._part_of_slot(number, offset, view)

    def _part_of_slot(self, number: int, offset: int, view: View) -> None:
        operands = [number, offset // view.dtype.itemsize, *view.numbers()]
        self.steps.append(Step(Kind.VIEW, operands, (number,)))


# For each operator that makes memory or computes a part: its step.
_MAKERS: dict[object, Callable[[Recorder, tuple, object], None]] = {
    **dict.fromkeys(_EMPTY, lambda recorder, _, out: recorder._allocate(out)),
    _ATEN.zeros.default: Recorder._zeros,
    OPS.part_forward.default: Recorder._part_forward,
    OPS.part_backward.default: Recorder._part_backward,
    OPS.merge_into.default: lambda recorder, args, _: recorder._elementwise(Kind.MERGE, args),
}
# The same of operators that write to memory that is there, with so many named arguments.
_WRITERS: dict[tuple[object, int], Callable[[Recorder, tuple, object], None]] = {
    (_ATEN.copy_.default, 0): lambda recorder, args, _: recorder._copy(*args[:2]),
    (_ATEN.add_.Tensor, 0): lambda recorder, args, _: recorder._add_tensors(args[0], *args),
    (_ATEN.add.out, 1): lambda recorder, args, out: recorder._add_tensors(out, *args),
    (_ATEN.fill_.Scalar, 0): lambda recorder, args, _: recorder._fill(args[0], args[1]),
    (OPS.round_o.default, 0): lambda recorder, args, _: recorder._elementwise(Kind.ROUND, args),
    (_ATEN.zero_.default, 0): lambda recorder, args, _: recorder._fill(args[0], 0.0),
}
