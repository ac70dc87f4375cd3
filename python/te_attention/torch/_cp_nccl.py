"""NCCL without torch.distributed, which takes several times as long to begin a transfer.

The communicator is that of torch.distributed, and so are the messages: it makes no difference to a
rank which way another one takes.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from te_attention.environment import reader
from te_attention.torch._cp_watch import Guard

FUNCTIONS = ("ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "cudaEventRecord",
             "cudaStreamWaitEvent")  # fmt: skip

EVENTS = 4  # after as many transfers that are under way at a time
_COMMUNICATOR = len(FUNCTIONS)
_nonblocking = reader("TORCH_NCCL_USE_COMM_NONBLOCKING")


@functools.cache
def functions() -> tuple[int, ...] | None:
    """Addresses of FUNCTIONS; None: they are not those of a library, or calls may be unfinished."""
    if _nonblocking()[0] not in (None, b"0", b""):
        return None
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        library = ctypes.CDLL(str(path))  # finds the functions of the libraries that it needs, too
        found = [getattr(library, name) for name in FUNCTIONS]
    except (OSError, AttributeError):
        return None
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in found)


class Direct:
    """Transfers of one group on the current device without torch.distributed.

    Has is_completed() as a dist.Work has, for Guard.
    """

    def __init__(self, guard: Guard, stream: torch.cuda.Stream | None) -> None:
        """guard: of the group. stream: of the transfers; by default one of its own."""
        device = torch.device("cuda", torch.cuda.current_device())
        self.guard, self.backend = guard, guard.group._get_backend(device)
        config = getattr(getattr(self.backend, "options", None), "config", None)
        self.may_be_unfinished = getattr(config, "blocking", 1) == 0
        # With priority, so that NCCL's kernel finds SMs before an attention kernel that is waiting.
        self.stream = stream or torch.cuda.Stream(device, priority=-1)
        self.detour = torch.cuda.Stream(device)
        self.events = [torch.cuda.Event() for _ in range(2 + EVENTS)]
        for event in self.events:
            event.record(self.detour)
        streams = (self.stream.cuda_stream, self.detour.cuda_stream)
        objects = [0, *streams, *(event.cuda_event for event in self.events)]
        self.numbers = torch.tensor([*functions(), *objects])
        self.communicator = 0
        guard.lasting.append(self)  # whose watch thread asks is_completed()

    def table(self) -> Tensor | None:
        """The argument of Recording.replay(); None: there is no communicator (any more).

        Raises RankLostError if a rank has ended.
        """
        self.guard.check()
        found = self.backend._comm_ptr()
        if found != self.communicator:
            self.communicator = self.numbers[_COMMUNICATOR] = found
        return self.numbers if found and not self.may_be_unfinished else None

    def is_completed(self) -> bool:
        """Whether all transfers that were begun are complete."""
        return all(event.query() for event in self.events[2:])
