"""FP8: emulation of its rounding, and casts of q, k and v together."""

import torch
from torch import Tensor

from te_attention.torch.fp8 import Float8CurrentScalingQuantizer
from te_attention.torch.fp8.cast import is_dense, packed_whole, quantize_together
from te_attention.torch.fp8.formats import codes_of, is_current, is_fp8_tensor
from te_attention.torch.fp8.tensor import dequantized
from te_attention.torch.operators import ops
from transformer_engine.pytorch._refusal import require
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    META_DO,
    META_DP,
    META_DQKV,
    META_O,
    META_QKV,
    META_S,
)
from transformer_engine_torch.fp8 import wrapped

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


class Rounding:
    """The tensors that Unfused rounds to FP8, forward and backward; none without FP8."""

    def __init__(
        self, fp8: bool, fp8_meta: dict | None, quantizers: dict | None, qkv_layout: str
    ) -> None:
        """S and dP have current scaling too where the recipe has it."""
        self._layout, self._fp8 = qkv_layout, fp8
        names = ("QKV", "O", "S", "dQKV", "dO", "dP")
        self._of = dict(zip(names, get_attention_quantizers(fp8, quantizers), strict=True))
        if not fp8:
            return
        require(fp8_meta is not None, "fp8_meta", None, "that of a module with fp8")
        for name, like in (("S", "QKV"), ("dP", "dO")):
            if is_current(self._of[like]):
                dtype, device = self._of[like].dtype, self._of[like].scale.device
                current = {"rowwise": True, "columnwise": False}
                self._of[name] = Float8CurrentScalingQuantizer(dtype, device, **current)

    def _apply(self, name: str, *tensors: Tensor) -> tuple:
        given = (*tensors, None, None)[:3]
        quantizer = self._of[name]
        return FP8EmulationFunc.apply(*given, quantizer, f"{name}_quantizer", self._layout)

    def qkv(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, whose gradients are rounded too; FP8 tensors become plain ones."""
        if is_fp8_tensor(q):
            q, k, v = (t.dequantize() for t in (q, k, v))
        elif self._fp8:
            q, k, v = self._apply("QKV", q, k, v)
        return self._apply("dQKV", q, k, v) if self._fp8 else (q, k, v)

    def scores(self, scores: Tensor) -> Tensor:
        """Scores, whose gradient is rounded."""
        return self._apply("dP", scores)[0] if self._fp8 else scores

    def probabilities(self, probabilities: Tensor) -> Tensor:
        """Probabilities, after dropout."""
        return self._apply("S", probabilities)[0] if self._fp8 else probabilities

    def out(self, out: Tensor, fp8_output: bool) -> Tensor:
        """O, whose gradient is rounded too, in FP8 if that is asked for."""
        if not self._fp8:
            return out
        out = self._apply("dO", self._apply("O", out)[0])[0]
        return self._of["O"](out) if fp8_output else out


def combine_and_quantize(
    qkv_layout: str, q: Tensor, k: Tensor, v: Tensor, qkv_quantizer: object
) -> tuple:
    """The three in FP8 under one scale; without a quantizer as they are.

    Nothing is copied: tensors that are packed in one buffer are cast as that buffer.
    """
    del qkv_layout  # strides say the same
    if qkv_quantizer is None:
        return q, k, v
    codes, scale_inv = quantize_together([q, k, v], qkv_quantizer)
    given = zip(codes, (q, k, v), strict=True)
    return tuple(wrapped(qkv_quantizer, code, scale_inv, t.dtype) for code, t in given)


def combine_and_dequantize(
    qkv_layout: str,
    q_fp8: Tensor,
    k_fp8: Tensor,
    v_fp8: Tensor,
    src_nominal_dtype: torch.dtype | None = None,
    des_nominal_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The values of three FP8 tensors, packed as these are. Other tensors are cast alone.

    Their dtype is des_nominal_dtype, else src_nominal_dtype, else that of the tensors.
    """
    del qkv_layout
    given = (q_fp8, k_fp8, v_fp8)
    dtype = des_nominal_dtype or src_nominal_dtype
    if not all(map(is_fp8_tensor, given)):
        for name, tensor in zip(("q_fp8", "k_fp8", "v_fp8"), given, strict=True):
            bytes_ = tensor.dtype.itemsize
            require(bytes_ > 1, name, tensor.dtype, "an FP8 tensor with a scale, or 16 bits")
        return tuple(t.to(dtype or t.dtype) for t in given)
    dtype = dtype or getattr(q_fp8, "dtype", torch.float32)
    shared = q_fp8._scale_inv is k_fp8._scale_inv is v_fp8._scale_inv
    found = packed_whole(tuple(map(codes_of, given))) if shared else None
    if found is None or not is_dense(found[0]):
        return tuple(dequantized(t, dtype) for t in given)
    whole, apart = found
    name = str(dtype).removeprefix("torch.")
    return tuple(apart(ops.fp8_dequantize(whole, q_fp8._scale_inv, name)))


def get_attention_quantizers(fp8: bool, quantizers: dict | None) -> tuple:
    """The quantizers of QKV, O, S, dQKV, dO and dP, set up for attention; None without FP8.

    Those of QKV, S, dO and dP return storages, which stay inside; those of O and dQKV tensors.
    """
    if not fp8:
        return (None,) * 6
    forward, backward = quantizers["scaling_fwd"], quantizers["scaling_bwd"]
    found = (
        *(forward[META_QKV], forward[META_O], forward[META_S]),
        *(backward[META_DQKV], backward[META_DO], backward[META_DP]),
    )
    internal = (True, False, True, False, True, True)
    for quantizer, stays in zip(found, internal, strict=True):
        quantizer.set_usage(rowwise=True, columnwise=False)
        quantizer.internal = stays
    return found
