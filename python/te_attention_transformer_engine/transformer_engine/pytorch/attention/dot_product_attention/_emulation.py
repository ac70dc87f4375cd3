"""FP8: emulation of its rounding, and functions that have no effect without FP8."""

import torch
from torch import Tensor

from transformer_engine.pytorch._refusal import NOT_YET, require

# The number of tensors that share one scale, in forward and in backward.
_ROUNDED = {
    "QKV_quantizer": (3, 0),
    "S_quantizer": (1, 0),
    "O_quantizer": (1, 0),
    "dQKV_quantizer": (0, 3),
    "dO_quantizer": (0, 1),
    "dP_quantizer": (0, 1),
}


def _rounded(tensors: tuple[Tensor | None, ...], count: int, quantizer: object) -> list:
    """The tensors, with the first `count` rounded to FP8 with one common scale."""
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
        del qkv_layout  # one scale for all three, in any layout
        forward, ctx.backward_count = _ROUNDED[quantizer_name]
        ctx.quantizer = quantizer
        return tuple(_rounded((tensor1, tensor2, tensor3), forward, quantizer))

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_rounded(gradients, ctx.backward_count, ctx.quantizer), None, None, None


def combine_and_quantize(
    qkv_layout: str, q: Tensor, k: Tensor, v: Tensor, qkv_quantizer: object
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors themselves: quantizers are refused."""
    del qkv_layout
    kind = type(qkv_quantizer).__name__
    require(qkv_quantizer is None, "qkv_quantizer", f"a {kind}", f"None: {NOT_YET}")
    return q, k, v


def combine_and_dequantize(
    qkv_layout: str,
    q_fp8: Tensor,
    k_fp8: Tensor,
    v_fp8: Tensor,
    src_nominal_dtype: torch.dtype | None = None,
    des_nominal_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The tensors, which are not quantised, cast to des_nominal_dtype if it is given."""
    del qkv_layout, src_nominal_dtype
    for name, tensor in (("q_fp8", q_fp8), ("k_fp8", k_fp8), ("v_fp8", v_fp8)):
        require(tensor.dtype.itemsize > 1, name, tensor.dtype, f"16 bits or more: {NOT_YET}")
    return tuple(t.to(des_nominal_dtype or t.dtype) for t in (q_fp8, k_fp8, v_fp8))


def get_attention_quantizers(fp8: bool, quantizers: dict) -> tuple[None, ...]:
    """The quantizers of QKV, O, S, dQKV, dO and dP: all None."""
    del quantizers
    require(not fp8, "fp8", fp8, f"False: {NOT_YET}")
    return (None,) * 6
