"""The state of FP8 in a process: the innermost autocast(), and what its end updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from te_attention.torch.fp8.recipe import DelayedScaling, Recipe
from te_attention.torch.fp8.state import DelayedScalingRecipeState

_MINIMUM = (8, 0)  # the portable engine's
_SIDES = {True: "scaling_fwd", False: "scaling_bwd"}


def _support() -> tuple[bool, str]:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _MINIMUM:
        major, minor = torch.cuda.get_device_capability()
        return False, f"the device is sm_{major}{minor}; FP8 needs sm_80 or later, or the host"
    return True, ""


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether attention runs in FP8: on the host, and on GPUs from sm_80 on.

    With return_reason also why not, or an empty text.
    """
    found = _support()
    return found if return_reason else found[0]


def get_default_recipe() -> Recipe:
    """The recipe of an autocast() without one."""
    return DelayedScaling()


class FP8GlobalStateManager:
    """The state set by autocast(), and the states of delayed scaling that its end updates."""

    FP8_ENABLED = False
    FP8_CALIBRATION = False
    FP8_RECIPE: Recipe | None = None
    FP8_DISTRIBUTED_GROUP: object = None
    FP8_PARAMETERS = False
    IS_FIRST_FP8_MODULE = False
    FP8_GRAPH_CAPTURING = False
    AUTOCAST_DEPTH = 0
    autocast_arguments: ClassVar[dict[str, tuple[Recipe, object]]] = {}
    # By (key of the autocast, forward): weak references, so that no module is kept alive.
    _states: ClassVar[dict[tuple[str, bool], dict[int, weakref.ref]]] = {}
    backward_ran = False  # since the scales of gradients were updated last
    resets = 0  # how often reset() was called: modules must register their states again

    @classmethod
    def reset(cls) -> None:
        """As before the first autocast()."""
        cls.resets += 1
        cls.FP8_ENABLED = cls.FP8_CALIBRATION = cls.FP8_PARAMETERS = False
        cls.FP8_RECIPE = cls.FP8_DISTRIBUTED_GROUP = None
        cls.IS_FIRST_FP8_MODULE = cls.FP8_GRAPH_CAPTURING = cls.backward_ran = False
        cls.AUTOCAST_DEPTH = 0
        cls.autocast_arguments, cls._states = {}, {}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether an enabled autocast() is open."""
        return cls.FP8_ENABLED

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether amaxes are recorded without FP8: never, autocast() refuses it."""
        return cls.FP8_CALIBRATION

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules make FP8 weights: never, attention has none."""
        return cls.FP8_PARAMETERS

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether the innermost autocast() was opened for a CUDA graph."""
        return cls.FP8_GRAPH_CAPTURING

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Whether this is the first call since autocast() was entered."""
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of the innermost autocast(), or the default one."""
        return get_default_recipe() if cls.FP8_RECIPE is None else cls.FP8_RECIPE

    @classmethod
    def get_fp8_group(cls) -> object:
        """The group over which amaxes are reduced."""
        return cls.FP8_DISTRIBUTED_GROUP

    @classmethod
    def get_autocast_state(cls) -> tuple:
        """The argument for set_autocast_state()."""
        return (
            cls.FP8_ENABLED,
            cls.FP8_CALIBRATION,
            cls.FP8_RECIPE,
            cls.FP8_DISTRIBUTED_GROUP,
            cls.IS_FIRST_FP8_MODULE,
            cls.FP8_GRAPH_CAPTURING,
        )

    @classmethod
    def set_autocast_state(cls, fp8_state: tuple) -> None:
        """Restores what get_autocast_state() returned."""
        (
            cls.FP8_ENABLED,
            cls.FP8_CALIBRATION,
            cls.FP8_RECIPE,
            cls.FP8_DISTRIBUTED_GROUP,
            cls.IS_FIRST_FP8_MODULE,
            cls.FP8_GRAPH_CAPTURING,
        ) = fp8_state

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None, group: object = None) -> str:
        """States whose amaxes are reduced together have the same one."""
        return f"{recipe}:{hash(group)}"

    @classmethod
    def register(cls, recipe: Recipe, group: object) -> None:
        """Makes the amaxes of this recipe be reduced over this group."""
        key = cls.get_unique_autocast_key(recipe, group)
        cls.autocast_arguments[key] = (recipe, group)

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict) -> None:
        """Lets the ends of autocast() update the states of delayed scaling of a module."""
        key = cls.get_unique_autocast_key(fp8_meta["recipe"], fp8_meta.get("fp8_group"))
        for forward, name in _SIDES.items():
            state = fp8_meta.get(name)
            if isinstance(state, DelayedScalingRecipeState):
                cls._states.setdefault((key, forward), {})[id(state)] = weakref.ref(state)

    @classmethod
    def note_backward(cls) -> None:
        """Has the next end of an autocast() update the scales of gradients too."""
        cls.backward_ran = True

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """One step of delayed scaling of all states of a direction."""
        for (key, of_forward), references in cls._states.items():
            if of_forward is not forward:
                continue
            for dead in [i for i, reference in references.items() if reference() is None]:
                del references[dead]
            states = [reference() for reference in references.values()]
            recipe, group = cls.autocast_arguments.get(key, (None, None))
            if states:
                cls._update(states, recipe is not None and recipe.reduce_amax, group)

    @staticmethod
    def _update(states: list[DelayedScalingRecipeState], reduces: bool, group: object) -> None:
        if not (reduces and group is not None and torch.distributed.get_world_size(group) > 1):
            for state in states:
                state.update()
            return
        joined = torch.cat([state.amax_history[0] for state in states])
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
        parts = joined.split([state.num_quantizers for state in states])
        for state, amax in zip(states, parts, strict=True):
            state.update(amax)

    @classmethod
    def _enter(cls, enabled: bool, recipe: Recipe | None, group: object, graph: bool) -> None:
        recipe = get_default_recipe() if recipe is None else recipe
        cls.register(recipe, group)
        cls.FP8_ENABLED, cls.FP8_RECIPE, cls.FP8_DISTRIBUTED_GROUP = enabled, recipe, group
        cls.FP8_GRAPH_CAPTURING = graph
        cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE or cls.AUTOCAST_DEPTH == 0
        cls.AUTOCAST_DEPTH += 1

    @classmethod
    def _exit(cls, enabled: bool, graph: bool) -> None:
        cls.AUTOCAST_DEPTH -= 1
        if cls.AUTOCAST_DEPTH or not enabled or graph or not torch.is_grad_enabled():
            return
        cls.reduce_and_update_fp8_tensors(forward=True)
        if cls.backward_ran:
            cls.backward_ran = False
            cls.reduce_and_update_fp8_tensors(forward=False)


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: object = None,
    _graph: bool = False,
) -> Iterator[None]:
    """A context in which DotProductAttention runs in FP8, if the recipe has fp8_dpa or fp8_mha.

    The end of the outermost enabled one, with gradients on, updates the scales of delayed scaling:
    those of the forward pass, and those of gradients if a backward pass has run since.

    Args:
        enabled: False: a context in which nothing runs in FP8.
        calibrating: recording amaxes without FP8 is refused.
        recipe: how scales are chosen. Default: DelayedScaling(), in which attention stays as it is.
        amax_reduction_group: over whose ranks amaxes are reduced. None: each rank has its own.

    Raises:
        ValueError: calibrating is True.
        RuntimeError: the device has no FP8.
    """
    if calibrating:
        raise ValueError("calibrating is True; needs False: amaxes are recorded in FP8 alone")
    available, reason = _support()
    if enabled and not available:
        raise RuntimeError(f"enabled is True; needs False: {reason}")
    before = FP8GlobalStateManager.get_autocast_state()
    FP8GlobalStateManager._enter(enabled, recipe, amax_reduction_group, _graph)
    try:
        yield
    finally:
        FP8GlobalStateManager.set_autocast_state(before)
        FP8GlobalStateManager._exit(enabled, _graph)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: object = None,
    _graph: bool = False,
) -> object:
    """The older name of autocast()."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
