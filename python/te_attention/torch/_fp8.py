"""FP8 of attention(): the scales of a call, its autograd node, and the scales that it finds itself.

attention(fp8="current") casts tensors of 16 or 32 bits inside and keeps no state.
attention(fp8=Fp8(...)) takes tensors that are already in FP8 and the scales that the caller chose.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from te_attention import _library as core
from te_attention.torch._arguments import BIAS, NUM_INPUTS, SINK, Arguments, trimmed
from te_attention.torch._autograd import (
    chosen,
    load_all,
    refuse_second_derivative,
    save_context,
)
from te_attention.torch._library import OPS
from te_attention.torch._packing import packed_gradients
from te_attention.torch._types import FP8, check_fp8
from te_attention.torch.fp8.cast import dense
from te_attention.torch.fp8.formats import E4M3, E5M2

CURRENT = "current"
_SOURCES = (torch.float16, torch.bfloat16, torch.float32)
_CORE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_cast, _cast_current = OPS.fp8_quantize.default, OPS.fp8_quantize_current.default
_dequantize, _scale = OPS.fp8_dequantize.default, OPS.fp8_scale.default
_forward, _forward_amax = OPS.fp8_forward.default, OPS.fp8_forward_amax.default
_backward, _backward_out = OPS.fp8_backward.default, OPS.fp8_backward_out.default


class Fp8(NamedTuple):
    """Scales of attention() on FP8 tensors: float32 [1] on q's device.

    A stored value times scale_inv is the value that it represents; a scale multiplies values before
    they are rounded to FP8. None is 1, except that k_scale_inv and v_scale_inv are q_scale_inv,
    dk_scale and dv_scale are dq_scale, and dout_scale and dp_scale follow from dO and V.

    S is the result of the softmax and dP the gradient of the scores. o_scale and o_scale_inv apply
    only if o_dtype is an FP8 type, dq_scale, dk_scale and dv_scale only if dqkv_dtype is. A dO of
    another type than FP8 is cast to dout_dtype with dout_scale; one in FP8 has dout_scale_inv.
    """

    q_scale_inv: Tensor | None = None
    k_scale_inv: Tensor | None = None
    v_scale_inv: Tensor | None = None
    s_scale: Tensor | None = None
    s_scale_inv: Tensor | None = None
    o_scale: Tensor | None = None
    o_dtype: torch.dtype = torch.bfloat16
    o_scale_inv: Tensor | None = None
    dout_scale: Tensor | None = None
    dout_scale_inv: Tensor | None = None
    dp_scale: Tensor | None = None
    dp_scale_inv: Tensor | None = None
    dq_scale: Tensor | None = None
    dk_scale: Tensor | None = None
    dv_scale: Tensor | None = None
    dout_dtype: torch.dtype = torch.float8_e5m2
    dqkv_dtype: torch.dtype = torch.bfloat16


FORWARD_SCALES = Fp8._fields[:6]
_SAVED = (*FORWARD_SCALES[:5], "o_scale_inv")  # of forward, which backward reads too


def name_of(dtype: torch.dtype) -> str:
    """The name of the operators for a type."""
    return str(dtype).removeprefix("torch.")


def _new_scales_of_s(dropout: float, device: torch.device) -> tuple[Tensor, Tensor]:
    scale = torch.full((1,), E4M3.largest * (1 - dropout), device=device)
    return scale, 1 / scale


_kept_scales_of_s = lru_cache(maxsize=64)(_new_scales_of_s)


def scales_of_s(dropout: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The largest scale of S that cannot saturate, since no P exceeds 1 / (1 - dropout).

    Tensors of a graph capture, or of a mode such as FakeTensorMode, are not kept for other calls.
    """
    transient = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )
    return (_new_scales_of_s if transient else _kept_scales_of_s)(dropout, device)


def _quantized(arguments: tuple) -> tuple[tuple, Fp8]:
    """The arguments with q, k and v in E4M3, each under a scale of its own, and these scales."""
    a = Arguments(*arguments)
    casts = [_cast_current(dense(t), E4M3.name) for t in arguments[:NUM_INPUTS]]
    scales = scales_of_s(a.dropout, a.q.device)
    fp8 = Fp8(*(cast[2] for cast in casts), *scales, o_dtype=a.q.dtype, dqkv_dtype=a.q.dtype)
    return (*(cast[0] for cast in casts), *arguments[NUM_INPUTS:]), fp8


def largest_norm(tensor: Tensor, scale_inv: Tensor | None = None) -> Tensor:
    """The largest norm of a row; `scale_inv`: of a tensor in FP8."""
    if tensor.dtype in FP8:
        tensor = _dequantize(dense(tensor), scale_inv, "bfloat16")
    norms = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)
    return norms.amax() if norms.numel() else norms.new_zeros(())


def scales_of_dp(
    norm_v: Tensor, norm_dout: Tensor, largest_dlse: Tensor | None, dropout: float, scale: float,
    dtype: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The scale of dP, and its inverse, from a bound of the largest |dP|.

    `norm_v`, `norm_dout`: the largest norms of rows. `scale`: of the scores.

    dP[i][j] = scale * P[i][j] * (g[i][j] - sum over k of P[i][k] g[i][k]), with
    g[i][j] = dO[i] V[j] / (1 - dropout), of which M = max |dO[i]| max |V[j]| / (1 - dropout) is a
    bound. The term with k = j joins the first: |dP| <= scale * P * (1 - P) * 2 M <= scale * M / 2.
    The bound is twice that, since the sum is computed from the rounded O, and dO and V are rounded,
    by up to 1/16 and 1/8. A gradient of LSE adds scale * P * |dLSE|.
    """
    bound = norm_v * norm_dout * (1 / (1 - dropout))
    if largest_dlse is not None:
        bound = bound + largest_dlse
    return _scale((bound * abs(scale)).float().view(1), dtype)


class _Fp8Attention(torch.autograd.Function):
    """apply(q, k, v, bias, sink, arguments, fp8, amax) -> O, LSE, the largest logits.

    q, k and v are those that have the gradients. `fp8`: Fp8, of the tensors in `arguments`, or None
    to find scales. `amax`: None or float32 [6] for the largest |S|, |O|, and, from the backward
    pass on, |dP|, |dQ|, |dK|, |dV|.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, arguments, fp8, amax):  # noqa: ARG004
        ctx.is_current = fp8 is None
        if ctx.is_current:
            arguments, fp8 = _quantized(arguments)
        arguments = trimmed(arguments)
        given = (*fp8[:6], name_of(fp8.o_dtype), *arguments)
        if amax is None:
            o, lse, max_logit, _ = _forward(*given)
        else:
            o, lse, max_logit = _forward_amax(amax[0:1], amax[1:2], *given)
        save_context(ctx, arguments, o, lse, [getattr(fp8, name) for name in _SAVED])
        ctx.fp8, ctx.amax = fp8._replace(**dict.fromkeys(_SAVED)), amax
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(max_logit)
        return o, lse, max_logit

    @staticmethod
    def backward(ctx, dout, dlse, _dmax):
        if dout is None and dlse is None:
            return (None,) * 8
        wants = ctx.needs_input_grad[3:5]
        refuse_second_derivative()
        o, lse, arguments, scales = load_all(ctx)
        dout = torch.zeros_like(o) if dout is None else dout
        fp8 = ctx.fp8._replace(**dict(zip(_SAVED, scales, strict=True)))
        a = Arguments(*arguments)
        dout_scale_inv = fp8.dout_scale_inv
        if dout.dtype not in FP8:
            name = name_of(fp8.dout_dtype)
            if fp8.dout_scale is None:
                dout, _, dout_scale_inv, _ = _cast_current(dense(dout), name)
            else:
                dout, dout_scale_inv = _cast(dense(dout), fp8.dout_scale, None, name)
        of_dp = fp8.dp_scale, fp8.dp_scale_inv
        if of_dp[0] is None:
            v_scale_inv = fp8.q_scale_inv if fp8.v_scale_inv is None else fp8.v_scale_inv
            of_dp = scales_of_dp(
                largest_norm(a.v, v_scale_inv),
                largest_norm(dout, dout_scale_inv),
                None if dlse is None or not dlse.numel() else dlse.abs().amax(),
                a.dropout,
                a.q.size(-1) ** -0.5 if a.scale is None else a.scale,
                name_of(dout.dtype),
            )
        scales = (*fp8[:5], fp8.o_scale_inv, dout_scale_inv, *of_dp)
        scales += (fp8.dq_scale, fp8.dk_scale, fp8.dv_scale)
        incoming = (dout, dlse, o, lse, *wants)
        packed = None  # a compiler concatenates gradients itself
        if ctx.is_current and ctx.amax is None and not torch.compiler.is_compiling():
            packed = packed_gradients(*a[:NUM_INPUTS])
        if packed is None:
            dtype = name_of(fp8.dqkv_dtype)
            dq, dk, dv, *small, amax = _backward(*incoming, *scales, dtype, *arguments)
            if ctx.amax is not None:
                ctx.amax[2:].copy_(torch.maximum(ctx.amax[2:], amax))
        else:
            dq, dk, dv = packed
            small = _backward_out(dq, dk, dv, None, None, *incoming, *scales, *arguments)
        dbias, dsink = (g if wanted else None for g, wanted in zip(small, wants, strict=True))
        return dq, dk, dv, dbias, dsink, None, None, None


def _check_gradient(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raises if autograd would cast the gradient to FP8, without a scale."""
    if not tensor.requires_grad:
        return
    accepted = getattr(tensor, "grad_dtype", tensor.dtype) if tensor.is_leaf else tensor.dtype
    if accepted is not None and accepted != dtype:
        hint = f" ({name}.grad_dtype = None, of a leaf)" if tensor.is_leaf else ""
        raise ValueError(
            f"fp8.dqkv_dtype is {name_of(dtype)} and autograd casts the gradient of {name} to "
            f"{name_of(accepted)}; needs the same type, or none{hint}"
        )


def check(q: Tensor, fp8: object) -> None:
    """Raises for an argument fp8 that attention() does not take."""
    if isinstance(fp8, str) and fp8 == CURRENT:
        if q.dtype not in _SOURCES:
            needed = "float16, bfloat16 or float32 with fp8='current'"
            raise ValueError(f"q.dtype is {name_of(q.dtype)}; needs {needed}")
        return
    check_fp8(q, fp8)


def runner(q: Tensor, fp8: object, return_amax: bool, is_described: bool) -> Callable:
    """The function that runs attention() with these arguments, if they are valid."""
    if is_described:
        raise ValueError("fp8 is given; needs attention() or explain()")
    if fp8 is None:
        raise ValueError("return_amax is True without fp8; needs False")
    check(q, fp8)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "fp8 is given in a transform of torch.func; needs None there, or torch.autograd.grad"
        )
    return partial(_run, fp8, return_amax)


def _run(
    fp8: Fp8 | str, return_amax: bool, arguments: tuple, return_lse: bool, return_max_logit: bool
) -> Tensor | tuple[Tensor, ...]:
    """O, or a tuple of O and what is asked for."""
    a = Arguments(*arguments)
    is_current = isinstance(fp8, str)
    if a.training and not is_current and torch.is_grad_enabled():
        for name, tensor in zip("qkv", arguments, strict=False):
            _check_gradient(name, tensor, fp8.dqkv_dtype)
    amax = torch.zeros(6, dtype=torch.float32, device=a.q.device) if return_amax else None
    if a.k.dtype != a.q.dtype or a.v.dtype != a.q.dtype:  # the casts would make them equal
        name, other = ("k", a.k) if a.k.dtype != a.q.dtype else ("v", a.v)
        seen, needed = name_of(other.dtype), name_of(a.q.dtype)
        raise ValueError(f"{name}.dtype is {seen}; needs that of q, {needed}")
    given = arguments[:NUM_INPUTS], arguments[BIAS], arguments[SINK]
    scales = None if is_current else fp8
    output = _Fp8Attention.apply(*given[0], *given[1:], arguments, scales, amax)
    output = chosen(output, return_lse, return_max_logit)
    output += () if amax is None else (amax,)
    return output if len(output) > 1 else output[0]


def explain(fp8: Fp8 | str, arguments: Arguments) -> str:
    """The text of explain() for attention() with fp8."""
    check(arguments.q, fp8)
    q, current = arguments.q, isinstance(fp8, str)
    if current:
        casts = (torch.empty_like(t, dtype=E4M3.torch) for t in arguments[:NUM_INPUTS])
        arguments = Arguments(*casts, *arguments[NUM_INPUTS:])
    o, dqkv = (q.dtype, q.dtype) if current else (fp8.o_dtype, fp8.dqkv_dtype)
    types = {"o_dtype": o}
    if arguments.training:
        types["dout_dtype"] = o if o in FP8 else E5M2.torch if current else fp8.dout_dtype
        types["dqkv_dtype"] = dqkv
    problem = OPS.explain.default(*trimmed(arguments)).partition("\n")[0]
    problem += "".join(f" {field}={_CORE_NAMES[dtype]}" for field, dtype in types.items())
    device = -1 if q.device.type == "cpu" else q.device.index
    return f"{problem}\n{core.explain(problem, device)}"
