"""Casts of several tensors under one scale, without copies: packed ones as the buffer they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_attention.torch._library import OPS
from te_attention.torch._packing import packed_whole
from te_attention.torch.fp8.formats import format_of, is_current

_amax, _scale = OPS.amax.default, OPS.fp8_scale.default
_joint, _joint_current = OPS.fp8_quantize_joint.default, OPS.fp8_quantize_joint_current.default


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if its memory has holes."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def largest_into(tensor: Tensor, amax: Tensor) -> None:
    """Raises `amax` to the largest magnitude of a tensor."""
    _amax(dense(tensor.detach()), amax)


def find_scale(tensors: list[Tensor], quantizer: object) -> Tensor:
    """The inverse scale of current scaling, of an amax that is given or reduced over ranks.

    The quantizer's scale and amax become those.
    """
    if not quantizer.use_existing_amax:
        quantizer.amax.zero_()
        for tensor in tensors:
            _amax(tensor, quantizer.amax)
    if quantizer.with_amax_reduction:
        op, group = torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group
        torch.distributed.all_reduce(quantizer.amax, op=op, group=group)
    name = format_of(quantizer.dtype).name
    options = quantizer.force_pow_2_scales, quantizer.amax_epsilon
    quantizer.scale, scale_inv = _scale(quantizer.amax, name, *options)
    return scale_inv


def _buffers(tensors: list[Tensor]) -> tuple[list[Tensor], list[Callable | None]]:
    """The tensors to cast, each with a function that splits it: all as one, or the last two."""
    if len(tensors) == 3:
        for start in (0, 1):
            found = packed_whole(tuple(tensors[start:]))
            if found is not None and is_dense(found[0]):
                alone = [dense(t) for t in tensors[:start]]
                return [*alone, found[0]], [*[None] * start, found[1]]
    return [dense(t) for t in tensors], [None] * len(tensors)


def quantize_together(tensors: list[Tensor], quantizer: object) -> tuple[list[Tensor], Tensor]:
    """Codes of several tensors under one scale of a quantizer of any class, and scale_inv [1].

    Codes have the FP8 dtype and the strides of their tensors. Tensors that fill one buffer, as a
    fused projection leaves q, k and v, are cast as that buffer, and their codes fill one too.
    """
    buffers, splits = _buffers([t.detach() for t in tensors])
    name = format_of(quantizer.dtype).name
    if not is_current(quantizer):
        codes, scale_inv = _joint(buffers, quantizer.scale, quantizer.amax, name)
    elif quantizer.use_existing_amax or quantizer.with_amax_reduction:
        scale_inv = find_scale(buffers, quantizer)
        codes, _ = _joint(buffers, quantizer.scale, None, name)
    else:
        options = quantizer.force_pow_2_scales, quantizer.amax_epsilon
        codes, quantizer.scale, scale_inv, quantizer.amax = _joint_current(buffers, name, *options)
    out = []
    for code, split in zip(codes, splits, strict=True):
        out += [code] if split is None else split(code)
    return out, scale_inv
