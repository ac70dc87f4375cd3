"""Rules of torch.func.vmap: one call of an operator after the other.

PyTorch's fallback does the same, but it warns and refuses a mapped dimension of size 0.
"""

import torch
from torch import Tensor

from te_attention.torch._library import LIBRARY, OPS


def _one(value: object, dim: int | None, index: int) -> object:
    return value if dim is None else value.select(dim, index)


def _empty(value: object, dim: int | None) -> object:
    """A tensor like each of those along the mapped dimension, of which there is none."""
    if dim is None:
        return value
    shape = list(value.shape)
    del shape[dim]
    return value.new_zeros(shape)


def _register(name: str) -> None:
    operator = getattr(OPS, name).default

    def rule(info, in_dims: tuple, *arguments: object) -> tuple[tuple[Tensor, ...], tuple]:
        pairs = list(zip(arguments, in_dims, strict=True))
        if info.batch_size == 0:
            results = [operator(*(_empty(*pair) for pair in pairs))]
        else:
            calls = range(info.batch_size)
            results = [operator(*(_one(*pair, i) for pair in pairs)) for i in calls]
        outputs = tuple(torch.stack(same)[: info.batch_size] for same in zip(*results, strict=True))
        return outputs, (0,) * len(outputs)

    torch.library.register_vmap(f"te_attention::{name}", rule, lib=LIBRARY)


for _name in ("forward", "backward", "attention"):
    _register(_name)
