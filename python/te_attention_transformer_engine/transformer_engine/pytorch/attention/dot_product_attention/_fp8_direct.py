"""FP8 without the layers of TransformerEngine's interface: the operators alone, options known.

A call of DotProductAttention takes this way if Fused runs it on plain contiguous tensors of 16 bits
without optional tensors. Results, scales and amaxes are those of FusedAttnFunc.
"""

import torch
from torch import Tensor

# torch.autograd.Function without functorch's transforms, whose support costs microseconds.
from torch.autograd.function import _SingleLevelFunction

from te_attention.torch.fp8 import FP8GlobalStateManager
from te_attention.torch.fp8.cast import quantize_together
from te_attention.torch.fp8.formats import format_of, is_current
from te_attention.torch.functional import describe
from te_attention.torch.operators import fp8_backward_out, fp8_forward, ops, trimmed
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    META_DO,
    META_DP,
    META_DQKV,
    META_O,
    META_QKV,
    META_S,
)

from ._engine import EngineCall
from ._fp8 import COUNTS, begin_scale_of_dp, bound_of_dp

_dequantize = ops.fp8_dequantize.default
_SIDES = {"scaling_fwd": (META_S, META_O), "scaling_bwd": (META_DP, META_DQKV)}


def _scales(meta: dict, side: str) -> tuple[Tensor | None, ...]:
    """Scale and inverse of S, then of O, or of dP and dQKV, as copies; None: of current scaling."""
    scales, inverses = meta[side].snapshot()
    before = COUNTS[side][0] - len(scales)  # quantizers that belong to current scaling
    first, second = _SIDES[side]
    found = scales[first - before], inverses[first - before]
    if second < before:
        return *found, None, None
    return *found, scales[second - before], inverses[second - before]


def _attend(tensors: list, meta: dict, quantizers: dict, direct: "DirectFp8") -> tuple:
    """O in 16 bits, then what backward needs: the codes, O as it is, LSE and scales."""
    forward = quantizers["scaling_fwd"]
    of_qkv, of_s, of_o = forward[META_QKV], forward[META_S], forward[META_O]
    codes, scale_inv = quantize_together(tensors, of_qkv, are_separate=True)
    s, s_inverse, of_output, o_inverse = _scales(meta, "scaling_fwd")
    delayed = of_output is not None
    o_dtype, o_amax = (format_of(of_o.dtype).name, of_o.amax) if delayed else (direct.dtype, None)
    before = of_s.amax, o_amax, scale_inv, scale_inv, scale_inv, s, s_inverse, of_output, o_dtype
    o, lse = fp8_forward(before, (*codes, *direct.options))
    out = _dequantize(o, o_inverse, direct.dtype) if delayed else o
    return out, codes, o, lse, scale_inv, (s, s_inverse, o_inverse)


class _Node(_SingleLevelFunction):
    """apply(q, k, v, fp8_meta, quantizers, direct) -> O."""

    @staticmethod
    def forward(ctx, q, k, v, meta, quantizers, direct):
        out, codes, o, lse, scale_inv, ctx.scales = _attend([q, k, v], meta, quantizers, direct)
        ctx.save_for_backward(*codes, o, lse, scale_inv)
        ctx.meta, ctx.quantizers, ctx.direct, ctx.dtype = meta, quantizers, direct, q.dtype
        return out

    @staticmethod
    def backward(ctx, dout):
        *codes, o, lse, scale_inv = ctx.saved_tensors
        s_scale, s_scale_inv, o_scale_inv = ctx.scales
        backward, state = ctx.quantizers["scaling_bwd"], ctx.meta["scaling_bwd"]
        of_do, of_dp, of_dqkv = backward[META_DO], backward[META_DP], backward[META_DQKV]
        (dout8,), dout_inv = quantize_together([dout.contiguous()], of_do, are_separate=True)
        if not state.updated and is_current(of_do):
            types = ctx.quantizers["scaling_fwd"][META_QKV].dtype, of_do.dtype
            found = (scale_inv, dout_inv), types, codes[2].size(-1), ctx.direct.scale
            bound = bound_of_dp(*found)
            begin_scale_of_dp(ctx.meta, ctx.quantizers, bound)
        dp, dp_inverse, of_gradients, inverse = _scales(ctx.meta, "scaling_bwd")
        delayed = of_gradients is not None
        dtype = format_of(of_dqkv.dtype).torch if delayed else ctx.dtype
        gradients = [torch.empty_like(t, dtype=dtype) for t in codes]
        amaxes = of_dp.amax, of_dqkv.amax if delayed else None
        incoming = (dout8, None, o, lse, False, False, scale_inv, scale_inv, scale_inv)
        scales = (s_scale, s_scale_inv, o_scale_inv, dout_inv, dp, dp_inverse, of_gradients)
        before = (*gradients, *amaxes, *incoming, *scales, None, None)
        fp8_backward_out(before, (*codes, *ctx.direct.options))
        if delayed:
            gradients = [_dequantize(g, inverse, ctx.direct.dtype) for g in gradients]
        FP8GlobalStateManager.note_backward()
        state.recorded = True
        return *gradients, None, None, None


class DirectFp8:
    """Calls with the options of one call, which are processed once."""

    __slots__ = ("dtype", "options", "scale")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: EngineCall, training: bool) -> None:
        """The tensors and the options of the first call."""
        found = describe(q, k, v, **call.options())._replace(training=training)
        self.options, self.scale = tuple(trimmed(found))[3:], call.scale
        self.dtype = str(q.dtype).removeprefix("torch.")

    @staticmethod
    def serves(call: EngineCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether calls like this one take this way."""
        halves = q.dtype in (torch.float16, torch.bfloat16)
        plain = not call.tensors() and not call.dropout and not call.return_max_logit
        contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        return halves and plain and contiguous and call.ranks is None and call.scale is not None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: dict, quantizers: dict) -> Tensor:
        """O with heads merged."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Node.apply(q, k, v, meta, quantizers, self).flatten(-2)
        return _attend([q, k, v], meta, quantizers, self)[0].flatten(-2)
