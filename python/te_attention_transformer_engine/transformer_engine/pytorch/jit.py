"""Hooks of torch.compile."""

from collections.abc import Callable

import torch


def jit_fuser(function: Callable) -> Callable:
    """Nothing here is worth compiling: the kernels are fused already."""
    return function


def no_torch_dynamo(recursive: bool = True) -> Callable:
    """Decorates what torch.compile should call rather than trace."""
    return lambda function: torch.compiler.disable(function, recursive=recursive)
