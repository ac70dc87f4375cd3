"""CUDA graphs: whether one is being captured, and modules that replay one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps

import torch
from torch import Tensor

from te_attention.torch.fp8 import DelayedScalingRecipeState, FP8GlobalStateManager, autocast
from transformer_engine.pytorch._refusal import refuse, require
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_making = False  # whether make_graphed_callables() runs


def is_graph_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph, or is about to be."""
    return _making or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _states_of(module: torch.nn.Module) -> list[DelayedScalingRecipeState]:
    """The states of scales of a module and of those in it."""
    found = [
        m.fp8_meta.get(name)
        for m in module.modules()
        if isinstance(m, TransformerEngineBaseModule)
        for name in ("scaling_fwd", "scaling_bwd")
    ]
    return [state for state in found if isinstance(state, DelayedScalingRecipeState)]


@contextmanager
def _unchanged_scales(modules: tuple[torch.nn.Module, ...]) -> Iterator[None]:
    """Undoes what the iterations before a capture record, which are of sample tensors."""
    before = {
        id(state): (state.scale.clone(), state.amax_history.clone(), state.recorded)
        for module in modules
        for state in _states_of(module)
    }
    ran = FP8GlobalStateManager.backward_ran
    yield
    FP8GlobalStateManager.backward_ran = ran
    for state in (s for module in modules for s in _states_of(module)):
        if id(state) in before:
            scale, history, state.recorded = before[id(state)]
            state.scale.copy_(scale)
            state.amax_history.copy_(history)
        else:
            state.amax_history.zero_()
            state.recorded = state.mode == "forward"


class _Frozen(torch.nn.Module):
    """A module as a function of the tensors among its arguments; the others stay as they were."""

    def __init__(
        self, module: torch.nn.Module, args: tuple, kwargs: dict, context: Callable
    ) -> None:
        super().__init__()
        self.module, self._call, self._context = module, module.forward, context
        self._args, self._kwargs = list(args), dict(kwargs)
        self._places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        self.names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]

    def tensors(self, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """The tensors among the arguments of a call."""
        for name in self.names:
            if name not in kwargs:
                raise TypeError(f"{name} is missing; needs a tensor, as in sample_kwargs")
        if len(args) != len(self._args):
            needed = f"{len(self._args)}, as sample_args"
            raise TypeError(f"{len(args)} positional arguments are given; needs {needed}")
        return (*(args[i] for i in self._places), *(kwargs[name] for name in self.names))

    def forward(self, *tensors: Tensor) -> object:
        args, kwargs = list(self._args), dict(self._kwargs)
        for place, tensor in zip(self._places, tensors, strict=False):
            args[place] = tensor
        kwargs |= zip(self.names, tensors[len(self._places) :], strict=True)
        with self._context():
            return self._call(*args, **kwargs)


def _note_backward(module: torch.nn.Module, _gradient: Tensor) -> None:
    """Does what the Python code of a backward pass in FP8 does, which a replay does not run."""
    FP8GlobalStateManager.note_backward()
    for state in _states_of(module):
        state.recorded = True


def _replaced_forward(frozen: _Frozen, run: Callable, in_fp8: bool) -> Callable:
    """The new forward() of a module: it runs the graph in the mode, training or not, of capture."""
    module, original, training = frozen.module, frozen._call, frozen.module.training

    @wraps(original)
    def forward(*args: object, **kwargs: object) -> object:
        if module.training is not training:
            return original(*args, **kwargs)
        if in_fp8:  # a replay runs no Python code that would register the states
            for m in module.modules():
                if isinstance(m, TransformerEngineBaseModule) and m.fp8_initialized:
                    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(m.fp8_meta)
        output = run(*frozen.tensors(args, kwargs))
        first = output[0] if isinstance(output, tuple) else output
        if in_fp8 and first.requires_grad:
            first.register_hook(partial(_note_backward, module))
        return output

    return forward


def _patch(frozen: _Frozen, run: Callable, in_fp8: bool) -> torch.nn.Module:
    module, original = frozen.module, frozen._call
    module.forward = _replaced_forward(frozen, run, in_fp8)

    def reset() -> None:
        """Gives the module its own forward() back."""
        module.forward = original

    module.reset = reset
    return module


def _captured(frozen: tuple[_Frozen, ...], samples: tuple, options: dict) -> tuple[Callable, ...]:
    """The functions that replay the graphs; on the host, where there are none, the modules."""
    if not all(t.is_cuda for tensors in samples for t in tensors):
        return frozen
    graphed = torch.cuda.make_graphed_callables(frozen, samples, **options)
    torch.cuda.synchronize()
    return graphed


def make_graphed_callables(
    modules: torch.nn.Module | tuple[torch.nn.Module, ...],
    sample_args: tuple,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: dict | tuple[dict, ...] | None = None,
    fp8_enabled: bool | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: object = None,
    fp8_group: object = None,
    fp8_weight_caching: bool | None = None,
    *,
    enabled: bool | None = None,
    calibrating: bool | None = None,
    recipe: object = None,
    amax_reduction_group: object = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: object = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
) -> torch.nn.Module | tuple[torch.nn.Module, ...]:
    """The modules, whose forward() and backward pass now replay CUDA graphs.

    Tensors among the arguments are copied into those of the graph; other arguments stay those of
    the samples. Outputs and gradients are tensors of the graph too: the module's next call or
    backward pass overwrites them, as with torch.cuda.make_graphed_callables(). On the host nothing
    is captured. With `enabled` the modules run in FP8 as in autocast(); call them inside an
    autocast(), whose end updates the scales.
    """
    for name, value in (
        ("_order", _order),
        ("_num_layers_per_chunk", _num_layers_per_chunk),
        ("retain_graph_in_backward", retain_graph_in_backward),
        ("_reuse_graph_input_output_buffers", _reuse_graph_input_output_buffers),
        ("calibrating", calibrating or fp8_calibrating),
    ):
        require(not value, name, value, "its default: one forward and one backward graph a module")
    del cache_quantized_params, fp8_weight_caching  # attention has no weights
    in_fp8 = bool(fp8_enabled if enabled is None else enabled)
    group = fp8_group if amax_reduction_group is None else amax_reduction_group
    words = {"enabled": in_fp8, "recipe": fp8_recipe if recipe is None else recipe}

    def context() -> object:
        return autocast(**words, amax_reduction_group=group, _graph=True)

    single = not isinstance(modules, tuple)
    given, args = ((modules,), (sample_args,)) if single else (modules, sample_args)
    kwargs = sample_kwargs if isinstance(sample_kwargs, tuple) else (sample_kwargs or {},)
    kwargs = kwargs * len(given) if len(kwargs) == 1 else kwargs
    if not len(given) == len(args) == len(kwargs):
        refuse("sample_args and sample_kwargs", f"of {len(args)} and {len(kwargs)} modules",
               f"one of each for {len(given)} modules")  # fmt: skip
    frozen = tuple(_Frozen(*each, context) for each in zip(given, args, kwargs, strict=True))
    samples = tuple(f.tensors(a, k) for f, a, k in zip(frozen, args, kwargs, strict=True))
    options = {"num_warmup_iters": num_warmup_iters, "allow_unused_input": allow_unused_input}
    global _making  # noqa: PLW0603
    _making = True
    try:
        with _unchanged_scales(given):
            runs = _captured(frozen, samples, options | {"pool": pool})
    finally:
        _making = False
    out = tuple(_patch(f, run, in_fp8) for f, run in zip(frozen, runs, strict=True))
    return out[0] if single else out
