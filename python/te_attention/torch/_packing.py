"""Gradients of q, k and v that are parts of one tensor: they are allocated as one tensor, too."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor


def is_batch(tensor: Tensor | None) -> bool:
    """Whether this is a batch of gradients (is_grads_batched), which functorch does not track."""
    return tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor)


def packed_whole(
    tensors: tuple[Tensor, ...],
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]] | None:
    """The tensor that `tensors` are parts of, and a function that splits one like it; or None.

    They are parts of one tensor if their strides are equal and their offsets are equally spaced
    (unbind, chunk), or each tensor begins at the end of the previous one (split).
    """
    order = sorted(range(len(tensors)), key=lambda i: tensors[i].storage_offset())
    ordered = [tensors[i] for i in order]
    first = ordered[0]
    size, stride, memory = first.shape, first.stride(), first.untyped_storage()._cdata
    for t in ordered[1:]:
        if t.stride() != stride or t.untyped_storage()._cdata != memory:
            return None
    starts = [t.storage_offset() for t in ordered]
    steps = [b - a for a, b in pairwise(starts)]
    if all(t.shape == size for t in ordered):
        if not steps[0] or any(step != steps[0] for step in steps):
            return None
        every = first.as_strided((len(ordered), *size), (steps[0], *stride))
        split = Tensor.unbind
    else:
        sizes = list(zip(*(t.shape for t in ordered), strict=True))
        differ = [d for d, of_each in enumerate(sizes) if len(set(of_each)) > 1]
        if len(differ) > 1 or any(
            n * stride[differ[0]] != step for n, step in zip(sizes[differ[0]], steps, strict=False)
        ):
            return None
        dim = differ[0]
        every = first.as_strided((*size[:dim], sum(sizes[dim]), *size[dim + 1 :]), stride)
        split = partial(Tensor.split, split_size=sizes[dim], dim=dim)

    def apart(whole: Tensor) -> list[Tensor]:
        parts = split(whole)
        return [parts[order.index(i)] for i in range(len(order))]

    return every, apart


def _allocate_packed(tensors: tuple[Tensor, ...]) -> list[Tensor] | None:
    """Uninitialised parts of a new tensor, if `tensors` are parts of one tensor, else None."""
    found = packed_whole(tensors)
    if found is None:
        return None
    every, apart = found
    parts = apart(torch.empty_like(every))
    if parts[0].stride(-1) != 1:  # interleaved elements: backward writes contiguous rows
        return None
    # .data makes independent tensors for autograd: one may be modified while another is saved.
    return [part.data for part in parts]


def packed_gradients(
    q: Tensor, k: Tensor, v: Tensor, *incoming: Tensor | None
) -> list[Tensor] | None:
    """Memory for dq, dk and dv in the layout of q, k and v, if all three or k and v are packed.

    Returns None if they are not packed; under a compiler, which concatenates gradients by itself;
    and if `incoming` holds a batch of gradients, which cannot be written into given memory.
    """
    # Fast path: k and v that own their memory both have offset 0.
    if k.storage_offset() == v.storage_offset() or torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or any(map(is_batch, incoming)):
        return None
    every = _allocate_packed((q, k, v))
    if every is None:
        pair = _allocate_packed((k, v))
        every = None if pair is None else [torch.empty_like(q), *pair]
    return every
