"""Gradients of parts of one tensor, as a fused projection leaves q, k and v: parts of one, too."""

from itertools import pairwise

import torch
from torch import Tensor


def is_batch(tensor: Tensor | None) -> bool:
    """Of is_grads_batched, which functorch does not know of."""
    return tensor is not None and torch._C._functorch.is_legacy_batchedtensor(tensor)


def _joint(tensors: tuple[Tensor, ...]) -> list[Tensor] | None:
    """Uninitialised parts of a new tensor, if these are parts of one, else None.

    They are if their strides are equal and they begin at equal distances, as what unbind and chunk
    return, or each where the one before it ends, as what split returns.
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
        parts = torch.empty_like(every).unbind()
    else:
        sizes = list(zip(*(t.shape for t in ordered), strict=True))
        differ = [d for d, of_each in enumerate(sizes) if len(set(of_each)) > 1]
        if len(differ) > 1 or any(
            n * stride[differ[0]] != step for n, step in zip(sizes[differ[0]], steps, strict=False)
        ):
            return None
        dim = differ[0]
        every = first.as_strided((*size[:dim], sum(sizes[dim]), *size[dim + 1 :]), stride)
        parts = torch.empty_like(every).split(sizes[dim], dim)
    if parts[0].stride(-1) != 1:  # they overlap within a row: so no gradient can be written
        return None
    # As .data each is a tensor of its own to autograd: one may be changed where another is kept.
    return [parts[order.index(i)].data for i in range(len(order))]


def packed_gradients(
    q: Tensor, k: Tensor, v: Tensor, *incoming: Tensor | None
) -> list[Tensor] | None:
    """Memory for dq, dk and dv that lies as q, k and v do, if all three or the last two are packed.

    None where they are not; where a compiler looks on, which joins what it is given by itself; and
    where what comes in is a batch of gradients, which cannot be written into given memory.
    """
    # Tensors of their own begin where their memory does: most calls end here.
    if k.storage_offset() == v.storage_offset() or torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or any(map(is_batch, incoming)):
        return None
    every = _joint((q, k, v))
    if every is None:
        pair = _joint((k, v))
        every = None if pair is None else [torch.empty_like(q), *pair]
    return every
