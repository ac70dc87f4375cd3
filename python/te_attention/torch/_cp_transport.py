"""Drives the program of a rank: by torch.distributed, or all ranks in one process in lock-step."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from te_attention.torch._cp_exchange import MARK, After, Exchange, Program
from te_attention.torch._cp_nccl import Direct, functions
from te_attention.torch._cp_record import Recorder
from te_attention.torch._cp_watch import Guard

_guards: dict[str, Guard] = {}  # by the names of groups


def drive(
    program: Program, transport: "GroupTransport", recorder: Recorder | None = None
) -> object:
    """Runs a program to its end; returns its result. recorder: of what it does."""
    value, seen = None, nullcontext() if recorder is None else recorder
    with transport.driven():
        while True:
            try:
                with seen:
                    request = program.send(value)
            except StopIteration as stop:
                return stop.value
            if request is MARK:
                value = transport.mark()
            elif isinstance(request, Exchange):
                value = transport.post(request)
            else:
                value = (request.handle if isinstance(request, After) else request).wait()
            if recorder is not None:
                recorder.record_request(request, value)


class _Done:
    """A transfer without messages."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass
class _Works:
    """Transfers under way; waits once, and copies what was staged on the host to its device."""

    works: list
    staged: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for device, host in self.staged:
            device.copy_(host, non_blocking=True)
        self.works, self.staged, self.kept = [], [], []


class GroupTransport:
    """torch.distributed: a group of all ranks, or the pair of an inner and an outer group.

    NCCL sends and receives on a stream of its own, which the current one waits for only where the
    program reads what came; `stream`: the one that orders NCCL's after what is sent. gloo moves
    host memory: tensors of a GPU are staged through pinned memory, which waits for the GPU.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], stream: "torch.cuda.Stream | None" = None
    ) -> None:
        self.groups, self.stream = tuple(groups), stream
        self.own_stream: torch.cuda.Stream | None = None
        self.marked: torch.cuda.Event | None = None
        self._direct: Direct | None = None
        self.ranks = [dist.get_rank(g) for g in self.groups]
        self.sizes = [dist.get_world_size(g) for g in self.groups]
        self.backend = dist.get_backend(self.groups[0])
        self.tags: dict[tuple[int, int], int] = defaultdict(int)
        self.driver: int | None = None  # the thread that drives a program
        self.places: dict[int, tuple[dist.ProcessGroup, int]] = {}  # of _locate()

    @contextmanager
    def driven(self) -> Iterator[None]:
        """While this thread drives a program."""
        self.driver = threading.get_ident()
        try:
            yield
        finally:
            self.driver = None

    @property
    def world(self) -> int:
        """Ranks of all groups."""
        return self.sizes[0] * (self.sizes[1] if len(self.sizes) > 1 else 1)

    @property
    def rank(self) -> int:
        """Among them: consecutive in the inner group."""
        if len(self.ranks) == 1:
            return self.ranks[0]
        return self.ranks[1] * self.sizes[0] + self.ranks[0]

    def _locate(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        """The group that this rank shares with another one, and the rank of that one there."""
        place = self.places.get(peer)
        if place is None:
            place = self.places[peer] = self._find(peer)
        return place

    def _find(self, peer: int) -> tuple[dist.ProcessGroup, int]:
        if len(self.groups) == 1:
            return self.groups[0], peer
        outer, inner = divmod(peer, self.sizes[0])
        if outer == self.ranks[1]:
            return self.groups[0], inner
        if inner != self.ranks[0]:
            raise ValueError(
                f"rank {self.rank} and rank {peer} share no group; needs transfers inside the "
                "inner or the outer group"
            )
        return self.groups[1], outer

    def post(self, exchange: Exchange) -> "_Works | _Done":
        """Starts a transfer."""
        if not (exchange.sends or exchange.receives):
            return _Done()
        if self.backend == "nccl":
            return self._post_nccl(exchange)
        return self._post_gloo(exchange)

    def _guard(self, group: dist.ProcessGroup) -> Guard:
        """Of a group, made at its first transfer."""
        guard = _guards.get(group.group_name)
        if guard is None or guard.group is not group:
            guard = _guards[group.group_name] = Guard(group, lambda: self.driver)
        return guard

    def _post_nccl(self, exchange: Exchange) -> "_Works":
        kept = [tensor for _, tensor in (*exchange.sends, *exchange.receives)]
        if self.stream is None and not exchange.early:
            return _Works(self._begin(exchange), kept=kept)
        stream, current = self._stream(), torch.cuda.current_stream()
        if exchange.early:
            stream.wait_event(self.marked)
        else:
            stream.wait_stream(current)
        for tensor in kept:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            works = _Works(self._begin(exchange), kept=kept)
        if exchange.early:
            # A persistent kernel that follows would take all SMs as soon as the one before leaves
            # them. By way of another stream it comes microseconds later than NCCL's kernel.
            stream.wait_stream(current)
            current.wait_stream(stream)
        return works

    def mark(self) -> None:
        """The place before which an early exchange may begin."""
        if self.backend == "nccl":
            self.marked = self.marked or torch.cuda.Event()
            self.marked.record()

    def direct(self) -> Tensor | None:
        """The argument of Recording.replay(), or None where all transfers need torch.distributed.

        They do where only its timeout would end a transfer from a rank that has ended.
        """
        if self._direct is None:
            if self.backend != "nccl" or len(self.groups) > 1 or functions() is None:
                return None
            guard = self._guard(self.groups[0])
            guard.check()
            if not guard.is_connected:
                return None
            self._direct = Direct(guard, self.stream)
        return self._direct.table()

    def _stream(self) -> "torch.cuda.Stream":
        """The caller's, or one of this transport for transfers that begin before earlier work."""
        if self.stream is not None:
            return self.stream
        if self.own_stream is None:
            self.own_stream = torch.cuda.Stream()
        return self.own_stream

    def _begin(self, exchange: Exchange) -> list[dist.Work]:
        """One batch for each group, by its backend: PyTorch's dispatcher would take longer."""
        messages = [
            (*self._locate(peer), is_send, tensor)
            for is_send, some in ((True, exchange.sends), (False, exchange.receives))
            for peer, tensor in some
        ]
        works = []
        for group in self.groups:
            batch = [rest for owner, *rest in messages if owner is group]
            if not batch:
                continue
            guard = self._guard(group)
            guard.check()
            backend = group._get_backend(batch[0][2].device)
            backend._start_coalescing()
            for rank, is_send, tensor in batch:
                (backend.send if is_send else backend.recv)([tensor], rank, 0)
            work = backend._end_coalescing()
            guard.works.append(work)
            works.append(work)
        return works

    def _tag(self, sender: int, receiver: int) -> int:
        """The number of a message between two ranks, the same on both."""
        self.tags[sender, receiver] += 1
        return self.tags[sender, receiver]

    def _post_gloo(self, exchange: Exchange) -> _Works:
        out = _Works([])
        for peer, tensor in exchange.receives:
            group, rank = self._locate(peer)
            host = tensor
            if tensor.is_cuda:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                out.staged.append((tensor, host))
            tag = self._tag(peer, self.rank)
            out.works.append(dist.irecv(host, group=group, group_src=rank, tag=tag))
        for peer, tensor in exchange.sends:
            group, rank = self._locate(peer)
            host = tensor
            if tensor.is_cuda:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor)
            out.kept.append(host)
            tag = self._tag(self.rank, peer)
            out.works.append(dist.isend(host, group=group, group_dst=rank, tag=tag))
        return out


# ----------------------------------------------------------------------------------- lock-step


class DeadlockError(RuntimeError):
    """Every rank waits for a message that was not sent, or one was sent and not received."""


@dataclass
class _Pending:
    """The messages of one exchange of one rank that have not arrived."""

    missing: list[tuple[tuple[int, int, int], Tensor]]


class LockStep:
    """All ranks of a world in one process and one thread. `received`: bytes that came to each."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = list(programs)
        n = len(self.programs)
        self.messages: dict[tuple[int, int, int], Tensor] = {}
        self.sent: dict[tuple[int, int], int] = defaultdict(int)
        self.taken: dict[tuple[int, int], int] = defaultdict(int)
        self.received = [0] * n
        self.exchanges = [0] * n

    def run(self) -> list[object]:
        """The results of all programs. Raises DeadlockError where they do not fit together."""
        n = len(self.programs)
        results: list[object] = [None] * n
        values: list[object] = [None] * n
        waits: list[_Pending | None] = [None] * n
        alive = set(range(n))
        while alive:
            moved = False
            for rank in sorted(alive):
                if waits[rank] is not None:
                    if not self._arrived(rank, waits[rank]):
                        continue
                    waits[rank] = None
                moved = True
                try:
                    request = self.programs[rank].send(values[rank])
                except StopIteration as stop:
                    results[rank] = stop.value
                    alive.discard(rank)
                    continue
                values[rank] = None
                if request is MARK:
                    continue
                if isinstance(request, Exchange):
                    values[rank] = self._post(rank, request)
                else:
                    waits[rank] = request.handle if isinstance(request, After) else request
            if not moved:
                stuck = {r: [k for k, _ in waits[r].missing] for r in sorted(alive)}
                raise DeadlockError(
                    f"no rank can go on; (from, to, number) awaited by each: {stuck}"
                )
        if self.messages:
            raise DeadlockError(
                f"(from, to, number) sent and not received: {sorted(self.messages)}"
            )
        return results

    def _post(self, rank: int, exchange: Exchange) -> _Pending:
        self.exchanges[rank] += 1
        for peer, tensor in exchange.sends:
            key = (rank, peer, self.sent[rank, peer])
            self.sent[rank, peer] += 1
            self.messages[key] = tensor.clone()
        missing = []
        for peer, tensor in exchange.receives:
            missing.append(((peer, rank, self.taken[peer, rank]), tensor))
            self.taken[peer, rank] += 1
        return _Pending(missing)

    def _arrived(self, rank: int, pending: _Pending) -> bool:
        rest = []
        for key, tensor in pending.missing:
            message = self.messages.pop(key, None)
            if message is None:
                rest.append((key, tensor))
                continue
            if message.shape != tensor.shape or message.dtype != tensor.dtype:
                raise DeadlockError(
                    f"message {key} is {tuple(message.shape)} of {message.dtype}; "
                    f"needs {tuple(tensor.shape)} of {tensor.dtype}"
                )
            tensor.copy_(message)
            self.received[rank] += message.numel() * message.element_size()
        pending.missing = rest
        return not rest


_transports: dict[tuple, GroupTransport] = {}


def transport_of(
    groups: tuple[dist.ProcessGroup, ...], stream: "torch.cuda.Stream | None"
) -> GroupTransport:
    """The transport of these groups; it counts their messages."""
    key = (*(g.group_name for g in groups), stream)
    found = _transports.get(key)
    if found is None or found.groups != groups:  # names are used again after groups are destroyed
        found = _transports[key] = GroupTransport(groups, stream)
    return found
