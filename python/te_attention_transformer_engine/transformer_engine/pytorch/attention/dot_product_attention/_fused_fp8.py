"""FusedAttnFunc in FP8: what is cast, what is saved for backward, what comes back."""

from torch import Tensor

from te_attention.torch.fp8 import Float8TensorStorage, FP8GlobalStateManager
from te_attention.torch.fp8.formats import is_current, is_fp8_tensor
from te_attention.torch.fp8.recompute import forward_quantizers, frozen
from te_attention.torch.fp8.tensor import dequantized
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)

from ._emulation import combine_and_dequantize, combine_and_quantize, get_attention_quantizers
from ._fp8 import backward_in_fp8, begin_scale_of_dp, bound_of_dp, saves_o_in_16_bits

FP8, F16 = FusedAttnBackend["FP8"], FusedAttnBackend["F16_arbitrary_seqlen"]


class _Saved:
    """Tensors of an autograd node, of which some are in FP8: saved as data and scale."""

    def __init__(self, ctx, *tensors: object) -> None:
        self._types: list[object] = []
        parts: list[Tensor | None] = []
        for tensor in tensors:
            is_fp8 = is_fp8_tensor(tensor)
            self._types.append(tensor._fp8_dtype if is_fp8 else None)
            parts += [tensor._data, tensor._scale_inv] if is_fp8 else [tensor]
        ctx.save_for_backward(*parts)

    def restored(self, parts: tuple[Tensor | None, ...]) -> list:
        left, out = list(parts), []
        for dtype in self._types:
            data = left.pop(0)
            if dtype is not None:
                fields = {"data": data, "fp8_scale_inv": left.pop(0), "fp8_dtype": dtype}
                data = Float8TensorStorage(**fields)
            out.append(data)
        return out


def forward(ctx, q, k, v, lengths, sizes, pages, small, options, fp8_meta, quantizers, fp8_output):
    """O of FusedAttnFunc.

    lengths: cu_seqlens of both sides, then the padded ones; sizes: is_training and both max_seqlen;
    small: bias, softmax offset and generator; options: what forward and backward both take.
    """
    found = forward_quantizers(list(get_attention_quantizers(True, quantizers)[:3]))
    of_qkv, of_o, of_s = found
    *_, of_dqkv, of_do, of_dp = get_attention_quantizers(True, quantizers)
    current, given = is_current(of_qkv), is_fp8_tensor(q)
    dtype = q.dtype
    of_s = frozen(of_s)  # backward uses this scale, whatever autocast() updates in between
    q8, k8, v8 = (q, k, v)
    if not given:
        q8, k8, v8 = combine_and_quantize(options["qkv_layout"], q, k, v, of_qkv)
    is_training, *max_seqlens = sizes
    bias, sink, generator = small
    # fmt: off
    raw, aux = fused_attn_fwd(
        is_training, *max_seqlens, *lengths[:2], q8, k8, v8, dtype, FP8, bias, *lengths[2:], *pages,
        of_s, of_o, rng_gen=generator, softmax_offset=sink, **options,
    )
    # fmt: on
    in_fp8 = backward_in_fp8()
    out = saved = raw
    if current:
        if fp8_output or (in_fp8 and not saves_o_in_16_bits()):
            quantized = of_o.quantize(raw)
            out = quantized if fp8_output else raw
            saved = raw if saves_o_in_16_bits() else quantized
    elif not fp8_output:
        out = dequantized(raw, dtype)
    ctx.saved = _Saved(ctx, q8, k8, v8, saved, *lengths, *aux)
    ctx.quantizers, ctx.of_backward = (of_s,), (of_dqkv, of_do, of_dp)
    ctx.nominal, ctx.given, ctx.in_fp8, ctx.current = dtype, given, in_fp8, current
    ctx.options, ctx.max_seqlens = options, max_seqlens
    ctx.fp8_meta, ctx.fp8_quantizers = fp8_meta, quantizers
    return out


def backward(ctx, d_out: object, deterministic: bool) -> list:
    """dQ, dK, dV, dBias and dSoftmaxOffset."""
    q, k, v, out, cu_q, cu_kv, *padded, stats, zinv, rng, third = _split(ctx)
    layout, options = ctx.options["qkv_layout"], ctx.options
    of_dqkv, of_do, of_dp = ctx.of_backward
    common = (*ctx.max_seqlens, cu_q, cu_kv)
    dtype = ctx.nominal
    if not ctx.in_fp8:
        q, k, v = combine_and_dequantize(layout, q, k, v, None, dtype)
        out = dequantized(out, dtype) if is_fp8_tensor(out) else out
        dout = d_out.dequantize(dtype=dtype) if is_fp8_tensor(d_out) else d_out
        # fmt: off
        dq, dk, dv, *small = fused_attn_bwd(
            *common, q, k, v, out, dout.contiguous(), dtype, TE_DType[dtype], [stats, rng, *third],
            F16, *padded, deterministic=deterministic, **options,
        )
        # fmt: on
    else:
        dout = d_out if is_fp8_tensor(d_out) else of_do.quantize(d_out.contiguous())
        if ctx.current and not is_current(of_dp):
            dim, scale, given = v.size(-1), options["attn_scale"], (v, dout)
            scale = dim**-0.5 if scale is None else scale
            inverses, dtypes = zip(*((t._scale_inv, t._fp8_dtype) for t in given), strict=True)
            bound = bound_of_dp(inverses, dtypes, dim, scale, options["dropout"])
            begin_scale_of_dp(ctx.fp8_meta, ctx.fp8_quantizers, bound)
        # fmt: off
        dq, dk, dv, *small = fused_attn_bwd(
            *common, q, k, v, out, dout, dtype, dout._fp8_dtype, [stats, zinv, rng, *third], FP8,
            *padded, *ctx.quantizers, of_dp, of_dqkv, deterministic=deterministic, **options,
        )
        # fmt: on
        if is_fp8_tensor(dq) and not ctx.given:
            dq, dk, dv = combine_and_dequantize(layout, dq, dk, dv, None, dtype)
        FP8GlobalStateManager.note_backward()
        ctx.fp8_meta["scaling_bwd"].recorded = True
    if ctx.given and not is_fp8_tensor(dq):
        dq, dk, dv = combine_and_quantize(layout, dq, dk, dv, of_dqkv)
    return [dq, dk, dv, *small]


def _split(ctx) -> list:
    """The saved tensors; the bias and the offset as one list."""
    restored = ctx.saved.restored(ctx.saved_tensors)
    return [*restored[:11], restored[11:]]
