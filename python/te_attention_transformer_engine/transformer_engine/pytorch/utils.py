"""Properties of the machine, and functions that models import."""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

import transformer_engine_torch as tex


@functools.lru_cache
def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current CUDA device; (0, 0) without a device."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@functools.lru_cache
def get_cudnn_version() -> tuple[int, int, int]:
    """A version that passes callers' checks. TE Attention does not use cuDNN here."""
    encoded = tex.get_cudnn_version()
    major, rest = divmod(encoded, 1000 if encoded < 90000 else 10000)
    return (major, *divmod(rest, 100))


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bfloat16 can be used: everywhere but on GPUs before sm_80."""
    old = (0, 0) < get_device_compute_capability() < (8, 0)
    reason = "bfloat16 needs a device of compute capability 8.0 or later" if old else ""
    return (not old, reason) if return_reason else not old


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Masks the scores in place where the mask is True."""
    return attention_scores.masked_fill_(attention_mask, torch.finfo(attention_scores.dtype).min)


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """An initialiser: normal, with this standard deviation."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """init_method_normal() for the last layer of a block, with `num_layers` blocks."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of a tensor, as views, or each contiguous."""
    size = tensor.shape[dim]
    if size % num_partitions:
        raise ValueError(f"num_partitions is {num_partitions}; needs a divisor of {size}, the size")
    parts = tensor.split(size // num_partitions, dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def combine_tensors(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Stacks tensors of one shape along a new dimension at index `dim`, as list.insert counts.

    Returns a view if they are stored in one buffer like that and need no gradient, else a copy.
    """
    first = tensors[0]
    size, stride = list(first.shape), list(first.stride())
    at = dim if dim >= 0 else dim + first.dim()
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(tensors)}
    alike = {(t.shape, t.stride(), t.untyped_storage().data_ptr()) for t in tensors}
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if len(alike) > 1 or len(steps) != 1 or min(steps) <= 0 or followed:
        return torch.stack(tuple(tensors), at)
    size.insert(at, len(tensors))
    stride.insert(at, *steps)
    return first.as_strided(size, stride)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates parts along a dimension: a view if they are adjacent in memory, else a copy."""
    first = parts[0]
    stride, memory = first.stride(), first.untyped_storage().data_ptr()
    start, rows = first.storage_offset(), 0
    for part in parts:
        lies = (part.stride(), part.untyped_storage().data_ptr(), part.storage_offset())
        if lies != (stride, memory, start + rows * stride[dim]):
            return torch.cat(tuple(parts), dim)
        rows += part.shape[dim]
    size = list(first.shape)
    size[dim] = rows
    return first.as_strided(size, stride)


class SplitAlongDim(torch.autograd.Function):
    """apply(tensor, dim, sizes, squeeze): split(). Gradients in one buffer are not copied."""

    @staticmethod
    def forward(
        ctx,
        mixed_x_layer: Tensor,
        split_dim: int,
        split_size_or_sections: int | Sequence[int],
        squeeze: bool = False,
    ) -> tuple[Tensor, ...]:
        """The parts; `squeeze` drops the dimension, where each has size 1."""
        ctx.dim, ctx.squeeze = split_dim, squeeze
        parts = mixed_x_layer.split(split_size_or_sections, split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the tensor before the split."""
        parts = [g.unsqueeze(ctx.dim) for g in gradients] if ctx.squeeze else gradients
        return _joined(parts, ctx.dim), None, None, None
