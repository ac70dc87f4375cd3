"""Random states by name, and recomputation in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils import checkpoint as torch_checkpoint

from te_attention.torch.fp8 import FP8GlobalStateManager
from te_attention.torch.fp8.recompute import Recomputation


class _DeviceRandom:
    """The default generator: a CUDA device's, in a form that graphs capture, or the host's."""

    @staticmethod
    def _generator() -> torch.Generator:
        if torch.cuda.is_available():
            torch.cuda.init()
            return torch.cuda.default_generators[torch.cuda.current_device()]
        return torch.default_generator

    def seeded(self, seed: int) -> torch.Tensor | torch.Generator:
        generator = self._generator()
        if generator.device.type == "cpu":
            return torch.Generator().manual_seed(seed).get_state()
        return generator.clone_state().manual_seed(seed)

    def get(self) -> torch.Tensor | torch.Generator:
        generator = self._generator()
        host = generator.device.type == "cpu"
        return generator.get_state() if host else generator.graphsafe_get_state()

    def set(self, state: torch.Tensor | torch.Generator) -> None:
        generator = self._generator()
        if isinstance(state, torch.Generator):
            generator.graphsafe_set_state(state)
        else:
            generator.set_state(state)


_RANDOM = _DeviceRandom()


def _copied(state: torch.Tensor | torch.Generator) -> torch.Tensor | torch.Generator:
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()


class CudaRNGStatesTracker:
    """Random states by name. Dropout inside fork(name) draws from the state of that name."""

    def __init__(self) -> None:
        """Creates a tracker without states."""
        self.reset()

    def reset(self) -> None:
        """Removes every state."""
        self.states_: dict = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict:
        """A copy of the table. The states are not copied."""
        return dict(self.states_)

    def set_states(self, states: dict) -> None:
        """Replaces the table."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed is {seed}, which a state has; needs another one")
        if name in self.states_:
            raise RuntimeError(f"name is {name!r}, which exists; needs another one")
        self.seeds_.add(seed)
        self.states_[name] = _RANDOM.seeded(seed)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """A context in which random numbers are drawn from the state of this name."""
        if name not in self.states_:
            raise KeyError(f"name is {name!r}; needs one of {sorted(self.states_)}")
        outside = _RANDOM.get()
        _RANDOM.set(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _RANDOM.get()
            _RANDOM.set(outside)


class _Replayed:
    """A function whose second call restores the tracker's states of the first call."""

    def __init__(self, function: Callable, tracker: CudaRNGStatesTracker) -> None:
        self.function, self.tracker = function, tracker
        self.before: dict | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.before is None:
            self.before = {k: _copied(v) for k, v in self.tracker.get_states().items()}
            return self.function(*args, **kwargs)
        now = self.tracker.get_states()
        self.tracker.set_states({k: _copied(v) for k, v in self.before.items()})
        try:
            return self.function(*args, **kwargs)
        finally:
            self.tracker.set_states(now)


def checkpoint(
    function: Callable,
    *args: object,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None = None,
    tp_group: object = None,
    use_reentrant: bool = True,
    **kwargs: object,
) -> object:
    """Runs a function without storing its activations; the backward pass runs it again.

    The default generators, the scales of FP8 and, if given, the tracker's states are the same in
    both runs. tp_group
    is the group for distribute_saved_activations, which is refused.
    """
    if distribute_saved_activations:
        raise ValueError(f"distribute_saved_activations is True (over {tp_group}); needs False")
    if FP8GlobalStateManager.FP8_ENABLED:
        function = Recomputation(function)
    if get_rng_state_tracker is not None:
        function = _Replayed(function, get_rng_state_tracker())
    if use_reentrant and kwargs:
        inner, options = function, kwargs
        function, kwargs = lambda *a: inner(*a, **options), {}
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False,
    recompute_phase: bool = False,
) -> Iterator[None]:
    """Marks the two forward passes of a checkpoint for layers that keep scales between them.

    Without FP8 there are none, and nothing happens.
    """
    if activation_recompute and FP8GlobalStateManager.is_fp8_enabled():
        phase = "recompute_phase" if recompute_phase else "activation_recompute"
        raise NotImplementedError(
            f"{phase} is True with FP8; needs transformer_engine.pytorch.checkpoint()"
        )
    yield


def get_distributed_world_size(group: torch.distributed.ProcessGroup | None = None) -> int:
    """The ranks of a group; 1 where nothing is distributed."""
    return torch.distributed.get_world_size(group) if _is_distributed() else 1


def get_distributed_rank(group: torch.distributed.ProcessGroup | None = None) -> int:
    """The rank of this process in a group. Raises RuntimeError where nothing is distributed."""
    if not _is_distributed():
        raise RuntimeError("torch.distributed is not initialised; needs init_process_group()")
    return torch.distributed.get_rank(group)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _Exchanged:
    """The handle of a transfer of a single rank, which has nothing to wait for."""

    def wait(self) -> None:
        """Returns."""


def gather_along_first_dim(
    inp: torch.Tensor,
    process_group: torch.distributed.ProcessGroup,
    async_op: bool = False,
    quantizer: object = None,
) -> tuple[torch.Tensor, object]:
    """The tensors of all ranks, one after the other along dimension 0, and what to wait for."""
    if quantizer is not None:
        raise ValueError("quantizer is given; needs None: tensors are not quantised on the way")
    ranks = get_distributed_world_size(process_group)
    if ranks == 1:
        return inp, _Exchanged() if async_op else None
    inp = inp.contiguous()
    out = inp.new_empty((ranks * inp.shape[0], *inp.shape[1:]))
    handle = torch.distributed.all_gather_into_tensor(out, inp, process_group, async_op)
    return out, handle


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, tp_group: torch.distributed.ProcessGroup, async_op: bool = False
) -> tuple[torch.Tensor, object]:
    """This rank's share, along dimension 0, of the sum over ranks; and what to wait for."""
    ranks = get_distributed_world_size(tp_group)
    if ranks == 1:
        return inp, _Exchanged() if async_op else None
    if inp.shape[0] % ranks:
        raise ValueError(f"inp.shape[0] is {inp.shape[0]}; needs a multiple of {ranks} ranks")
    out = inp.new_empty((inp.shape[0] // ranks, *inp.shape[1:]))
    handle = torch.distributed.reduce_scatter_tensor(
        out, inp.contiguous(), group=tp_group, async_op=async_op
    )
    return out, handle
