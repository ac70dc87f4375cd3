"""FP8: casts, the step of delayed scaling, and the quantizers of fused_attn_fwd and fused_attn_bwd.

Quantizers and FP8 tensors are recognised by their attributes, so that those of NVIDIA's package
serve too. A quantizer of S or dP only carries a scale and an amax. One of O or dQKV says what is
returned: FP8 tensors with delayed scaling, tensors of fake_dtype with current scaling or without a
quantizer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from te_attention.torch.fp8.cast import dense, largest_into, quantize_together
from te_attention.torch.fp8.formats import codes_of, format_of, is_current, is_fp8_tensor
from te_attention.torch.fp8.tensor import dequantized
from te_attention.torch.operators import Arguments, ops, trimmed
from transformer_engine_torch.calls import BackwardCall, ForwardCall
from transformer_engine_torch.enums import DType

_forward, _backward = ops.fp8_forward_amax.default, ops.fp8_backward_out.default
_FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)
REAL = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def wrapped(quantizer: object, codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> object:
    """An FP8 tensor of the quantizer's own class, of the nominal dtype `dtype`."""
    data = codes.view(torch.uint8)
    if hasattr(quantizer, "_wrapped"):
        return quantizer._wrapped(data, scale_inv, dtype)
    options = {"fake_dtype": dtype, "requires_grad": False, "internal": quantizer.internal}
    out = quantizer.create_tensor_from_data(data, **options)
    out._scale_inv = scale_inv
    return out


def quantize(
    tensor: Tensor, quantizer: object, output: object = None, noop: Tensor | None = None
) -> object:
    """The tensor in FP8, in `output` if that is given. noop is refused: to read it waits."""
    if noop is not None:
        raise ValueError("noop is a tensor; needs None")
    (codes,), scale_inv = quantize_together([tensor], quantizer)
    if output is None:
        return wrapped(quantizer, codes, scale_inv, tensor.dtype)
    output._data.copy_(codes.view(torch.uint8))
    output._scale_inv.copy_(scale_inv.view(output._scale_inv.shape))
    output._transpose_invalid = True
    return output


def dequantize(input: object, otype: DType) -> Tensor:
    """The values of an FP8 tensor in another type."""
    if otype not in REAL:
        raise ValueError(f"otype is {DType(otype).name}; needs kFloat32, kFloat16 or kBFloat16")
    return dequantized(input, REAL[otype])


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Writes the largest magnitude into amax, float32 [1]."""
    amax.zero_()
    largest_into(input, amax)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: DType,
    margin: float,
) -> None:
    """One step of delayed scaling: the buffer holds the latest amaxes of all histories in a row."""
    counts = [scale.numel() for scale in scales]
    name = format_of(fp8_dtype).name
    latest = amax_reduction_buffer.split(counts)
    for amax, history, scale in zip(latest, amax_histories, scales, strict=True):
        ops.fp8_update_scales(history, scale, amax, amax_compute_algo, name, float(margin))


def mha_fill(tensor: Tensor, value: Tensor | float) -> None:
    """Zeros in the rows from `value` on, an integer tensor of one element that is not waited for.

    A number instead fills the whole tensor with it. An FP8 tensor is filled in its data.
    """
    data = tensor._data if is_fp8_tensor(tensor) else tensor
    if not isinstance(value, Tensor):
        data.fill_(value)
        return
    rows = torch.arange(data.shape[0], device=data.device)
    shape = (-1, *[1] * (data.dim() - 1))
    data.masked_fill_((rows >= value.reshape(-1)[-1]).view(shape), 0)


def _scales(quantizer: object) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale, its inverse and the amax of a quantizer, which may be None."""
    if quantizer is None:
        return None, None, None
    return quantizer.scale, torch.reciprocal(quantizer.scale), quantizer.amax


def _plain(call: ForwardCall | BackwardCall) -> ForwardCall | BackwardCall:
    """The call with Q, K and V as tensors of an FP8 dtype."""
    return call._replace(Q=codes_of(call.Q), K=codes_of(call.K), V=codes_of(call.V))


def _scale_invs(call: ForwardCall | BackwardCall) -> list[Tensor]:
    for name in ("K", "V"):
        if not is_fp8_tensor(getattr(call, name)):
            raise ValueError(f"{name} is a {type(getattr(call, name)).__name__}; needs FP8 as Q")
    return [tensor._scale_inv for tensor in (call.Q, call.K, call.V)]


def forward(call: ForwardCall) -> tuple[ForwardCall, Callable[[Arguments], tuple]]:
    """The call with plain Q, K and V, and what runs it: returns O, LSE and None."""
    if call.return_max_logit:
        raise ValueError("return_max_logit is True; needs False with FP8 tensors")
    s_scale, s_scale_inv, s_amax = _scales(call.s_quantizer)
    o_quantizer, inputs = call.o_quantizer, _scale_invs(call)
    delayed = o_quantizer is not None and not is_current(o_quantizer)
    o_dtype = str(call.fake_dtype).removeprefix("torch.")
    o_scale, o_scale_inv, o_amax = _scales(o_quantizer)
    if delayed:
        o_dtype = format_of(o_quantizer.dtype).name
    elif o_amax is not None:
        o_amax.zero_()

    def run(arguments: Arguments) -> tuple:
        scales = (*inputs, s_scale, s_scale_inv, o_scale if delayed else None)
        o, lse, _ = _forward(s_amax, o_amax, *scales, o_dtype, *trimmed(arguments))
        if delayed:
            o = wrapped(o_quantizer, o, o_scale_inv, call.fake_dtype)
        return o, lse, None

    return _plain(call), run


def gradient_dtype(call: BackwardCall) -> torch.dtype:
    """The type of dQ, dK and dV as the operator writes them."""
    quantizer = call.dqkv_quantizer
    if call.dqkv_type in REAL:
        return REAL[call.dqkv_type]
    if call.dqkv_type not in _FP8:
        seen = DType(call.dqkv_type).name
        raise ValueError(f"dqkv_type is {seen}; needs an FP8 type, kFloat16, kBFloat16 or kFloat32")
    if quantizer is None or is_current(quantizer):
        return call.fake_dtype
    return format_of(quantizer.dtype).torch


def backward(call: BackwardCall) -> tuple[BackwardCall, Callable[..., tuple]]:
    """The call with plain Q, K and V, and what runs it.

    That takes what operators.backward_out() takes, and returns the gradients, dBias and dSink.
    """
    s_scale, s_scale_inv, _ = _scales(call.s_quantizer)
    dp_scale, dp_scale_inv, dp_amax = _scales(call.dp_quantizer)
    o, dout, inputs, quantizer = call.O, call.dO, _scale_invs(call), call.dqkv_quantizer
    o_scale_inv = o._scale_inv if is_fp8_tensor(o) else None
    dout_scale_inv = dout._scale_inv if is_fp8_tensor(dout) else None
    is_fp8_out = gradient_dtype(call).itemsize == 1
    scale, scale_inv, amax = _scales(quantizer) if is_fp8_out else (None, None, None)

    def run(gradients, dout, dlse, o, lse, arguments, *wants):
        incoming = (dout, dlse, o, lse, *wants)
        scales = (*inputs, s_scale, s_scale_inv, o_scale_inv, dout_scale_inv)
        scales += (dp_scale, dp_scale_inv, scale, None, None)
        small = _backward(*gradients, dp_amax, amax, *incoming, *scales, *trimmed(arguments))
        if is_fp8_out:
            gradients = [wrapped(quantizer, g, scale_inv, call.fake_dtype) for g in gradients]
        return gradients, *(g if wanted else None for g, wanted in zip(small, wants, strict=True))

    if o_scale_inv is not None:
        call = call._replace(O=codes_of(o))
    if dout_scale_inv is not None:
        call = call._replace(dO=dense(codes_of(dout)))
    return _plain(call), run
