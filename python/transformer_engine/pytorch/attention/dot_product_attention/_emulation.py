"""What FP8 would do to the numbers of Unfused, without FP8: there and back through a quantizer."""

import torch
from torch import Tensor

# How many of the three tensors go through the quantizer together, forward and backward.
_ROUNDED = {
    "QKV_quantizer": (3, 0),
    "S_quantizer": (1, 0),
    "O_quantizer": (1, 0),
    "dQKV_quantizer": (0, 3),
    "dO_quantizer": (0, 1),
    "dP_quantizer": (0, 1),
}


def _rounded(tensors: tuple[Tensor | None, ...], count: int, quantizer: object) -> list:
    """The first `count` tensors with the precision that one common scale leaves them."""
    if not count:
        return list(tensors)
    parts = tensors[:count]
    joined = torch.cat([t.flatten() for t in parts])
    flat = quantizer(joined).dequantize(dtype=parts[0].dtype).split([t.numel() for t in parts])
    return [f.view(t.shape) for f, t in zip(flat, parts, strict=True)] + list(tensors[count:])


class FP8EmulationFunc(torch.autograd.Function):
    """apply(tensor1, tensor2, tensor3, quantizer, its name, layout) -> the three tensors."""

    @staticmethod
    def forward(
        ctx,
        tensor1: Tensor,
        tensor2: Tensor | None,
        tensor3: Tensor | None,
        quantizer: object,
        quantizer_name: str,
        qkv_layout: str | None,
    ) -> tuple[Tensor | None, ...]:
        del qkv_layout  # one scale for all three, however they lie
        forward, ctx.backward_count = _ROUNDED[quantizer_name]
        ctx.quantizer = quantizer
        return tuple(_rounded((tensor1, tensor2, tensor3), forward, quantizer))

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_rounded(gradients, ctx.backward_count, ctx.quantizer), None, None, None
