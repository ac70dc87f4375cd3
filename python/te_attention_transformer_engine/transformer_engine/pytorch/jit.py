"""Hooks of torch.compile."""

from collections.abc import Callable

import torch


def jit_fuser(function: Callable) -> Callable:
    """Returns the function unchanged, because the kernels are already fused."""
    return function


def no_torch_dynamo(recursive: bool = True) -> Callable:
    """Decorates what torch.compile should call rather than trace."""
    return lambda function: torch.compiler.disable(function, recursive=recursive)
