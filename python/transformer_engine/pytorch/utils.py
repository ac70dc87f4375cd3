"""What is asked about the machine, and a few functions that models import."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

import transformer_engine_torch as tex


@functools.lru_cache
def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current CUDA device; (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@functools.lru_cache
def get_cudnn_version() -> tuple[int, int, int]:
    """The version whose support rules hold; no cuDNN is behind it."""
    encoded = tex.get_cudnn_version()
    major, rest = divmod(encoded, 1000 if encoded < 90000 else 10000)
    return (major, *divmod(rest, 100))


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bfloat16 can be used: everywhere but on GPUs before sm_80."""
    old = (0, 0) < get_device_compute_capability() < (8, 0)
    reason = "bfloat16 needs a device of compute capability 8.0 or later" if old else ""
    return (not old, reason) if return_reason else not old


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Hides, in place, the scores where the mask is True."""
    return attention_scores.masked_fill_(attention_mask, torch.finfo(attention_scores.dtype).min)


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """An initialiser: normal, with this standard deviation."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """The same for the last layer of a block, of `num_layers` of them."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))
