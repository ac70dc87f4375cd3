"""Softmax over scores in memory, and the transposes around flash attention."""

import torch
from torch import Tensor

from te_attention.torch.operators import ops

_forward, _backward = ops.scaled_softmax_forward.default, ops.scaled_softmax_backward.default


def _require_rank(name: str, tensor: Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; needs {rank} dimensions")


def scaled_softmax_forward(input: Tensor, scale_factor: float, /) -> Tensor:
    """softmax(scale * x) of [b, h, sq, sk]."""
    _require_rank("input", input, 4)
    return _forward(input, None, float(scale_factor), "none")


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale_factor: float, /) -> Tensor:
    """softmax(scale * x) with a mask [1 or b, 1, sq, sk], 1 = masked. Fully masked rows are 0."""
    _require_rank("input", input, 4)
    hidden = mask.contiguous().view(torch.bool)
    return _forward(input.contiguous(), hidden, float(scale_factor), "given")


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale_factor: float, /) -> Tensor:
    """softmax(scale * x) of [b * h, s, s], causal."""
    _require_rank("input", input, 3)
    return _forward(input, None, float(scale_factor), "causal")


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale_factor: float, /) -> Tensor:
    """softmax(scale * x) of [b, h, sq, sk], causal, bottom-right aligned."""
    _require_rank("input", input, 4)
    return _forward(input, None, float(scale_factor), "causal_bottom_right")


def scaled_softmax_backward(
    output_grad: Tensor, softmax_results: Tensor, scale_factor: float, /
) -> Tensor:
    """scale * y * (dy - sum(dy * y)): the gradient of each of the four functions."""
    kind = "none"  # masked elements have y = 0 and therefore no gradient
    return _backward(output_grad.contiguous(), softmax_results, float(scale_factor), kind)


scaled_masked_softmax_backward = scaled_softmax_backward
scaled_upper_triang_masked_softmax_backward = scaled_softmax_backward
scaled_aligned_causal_masked_softmax_backward = scaled_softmax_backward


def fa_prepare_fwd(qkvi: Tensor, /) -> Tensor:
    """[3, b, s, h, d] from the Q of a buffer [s, b, h, 3 * d], where K and V follow Q."""
    _require_rank("qkvi", qkvi, 4)
    s, b, h, d = qkvi.shape
    strides = (b * h * 3 * d, h * 3 * d, 3 * d, 1)
    if qkvi.stride() != strides:
        raise ValueError(f"qkvi has strides {qkvi.stride()}; needs {strides}: Q of layout sbh3d")
    return ops.flash_prepare_forward.default(qkvi.as_strided((s, b, h, 3 * d), strides))


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
    """[s, b, h, 3 * d] from the three gradients [b, s, h, d]."""
    return ops.flash_prepare_backward.default(q, k, v)
