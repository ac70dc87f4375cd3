"""Activation checkpoints in FP8: the recomputation uses the scales of the first computation.

Between the two an autocast() may have ended, which updates scales, and in the second one no
autocast() is open. The amaxes of the second one are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from te_attention.torch.fp8.formats import is_current
from te_attention.torch.fp8.manager import FP8GlobalStateManager


def frozen(quantizer: object) -> object:
    """A copy whose scale is the present one, whatever happens to the original."""
    out = quantizer.copy()
    out.scale = quantizer.scale.clone()
    return out


def _without_amax(quantizer: object) -> object:
    out = quantizer.copy()
    out.amax = torch.zeros_like(quantizer.amax)
    return out


class Recomputation:
    """A function that a checkpoint calls twice: the first call records scales, others reuse them.

    Modules pass their quantizers of the forward pass through forward_quantizers().
    """

    _active: ClassVar[Recomputation | None] = None

    def __init__(self, function: Callable) -> None:
        """Keeps the autocast() that is open now."""
        self._function, self._autocast = function, FP8GlobalStateManager.get_autocast_state()
        self._recorded: list[list] = []
        self._is_first, self._position = True, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls the function."""
        before = Recomputation._active, FP8GlobalStateManager.get_autocast_state()
        Recomputation._active, self._position = self, 0
        FP8GlobalStateManager.set_autocast_state(self._autocast)
        try:
            return self._function(*args, **kwargs)
        finally:
            self._is_first = False
            Recomputation._active = before[0]
            FP8GlobalStateManager.set_autocast_state(before[1])

    @staticmethod
    def is_active() -> bool:
        """Whether such a function runs."""
        return Recomputation._active is not None

    def _taken(self, quantizers: list) -> list:
        if self._is_first:
            self._recorded.append([q if is_current(q) else frozen(q) for q in quantizers])
            return self._recorded[-1]
        self._position += 1
        recorded = self._recorded[self._position - 1]
        return [q if is_current(q) else _without_amax(q) for q in recorded]


def forward_quantizers(quantizers: list) -> list:
    """The quantizers, or in a checkpointed function those with its scales."""
    active = Recomputation._active
    return quantizers if active is None else active._taken(quantizers)
