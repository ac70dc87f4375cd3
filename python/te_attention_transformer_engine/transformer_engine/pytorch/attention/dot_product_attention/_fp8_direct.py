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
from te_attention.torch.operators import ops, trimmed
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

_forward, _backward = ops.fp8_forward_amax.default._op, ops.fp8_backward_out.default
_dequantize = ops.fp8_dequantize.default
_SIDES = {"scaling_fwd": (META_S, META_O), "scaling_bwd": (META_DP, META_DQKV)}


class _Scales:
    """Scales of S and O, or of dP and dQKV, as copies, and their inverses; None: of no state."""

    __slots__ = ("first", "first_inverse", "second", "second_inverse")

    def __init__(self, meta: dict, side: str) -> None:
        scales, inverses = meta[side].snapshot()
        before = COUNTS[side][0] - len(scales)  # quantizers that belong to current scaling
        first, second = _SIDES[side]
        self.first, self.first_inverse = scales[first - before], inverses[first - before]
        self.second = self.second_inverse = None
        if second >= before:
            self.second, self.second_inverse = scales[second - before], inverses[second - before]


def _attend(tensors: tuple, meta: dict, quantizers: dict, options: tuple) -> tuple:
    """O in 16 bits, then what backward needs: the codes, O as it is, LSE and scales."""
    forward = quantizers["scaling_fwd"]
    of_qkv, of_s, of_o = forward[META_QKV], forward[META_S], forward[META_O]
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    codes, scale_inv = quantize_together(list(tensors), of_qkv)
    scales = _Scales(meta, "scaling_fwd")
    delayed = scales.second is not None
    o_dtype, o_amax = (format_of(of_o.dtype).name, of_o.amax) if delayed else (dtype, None)
    inverses = (scale_inv,) * 3
    s = scales.first, scales.first_inverse
    o, lse, _ = _forward(of_s.amax, o_amax, *inverses, *s, scales.second, o_dtype, *codes, *options)
    out = _dequantize(o, scales.second_inverse, dtype) if delayed else o
    return out, codes, o, lse, scale_inv, (*s, scales.second_inverse)


class _Node(_SingleLevelFunction):
    """apply(q, k, v, fp8_meta, quantizers, options) -> O."""

    @staticmethod
    def forward(ctx, q, k, v, meta, quantizers, options):
        found = _attend((q, k, v), meta, quantizers, options)
        out, codes, o, lse, scale_inv, ctx.scales = found
        ctx.save_for_backward(*codes, o, lse, scale_inv)
        ctx.meta, ctx.quantizers, ctx.options, ctx.dtype = meta, quantizers, options, q.dtype
        return out

    @staticmethod
    def backward(ctx, dout):
        *codes, o, lse, scale_inv = ctx.saved_tensors
        s_scale, s_scale_inv, o_scale_inv = ctx.scales
        backward, state = ctx.quantizers["scaling_bwd"], ctx.meta["scaling_bwd"]
        of_do, of_dp, of_dqkv = backward[META_DO], backward[META_DP], backward[META_DQKV]
        (dout8,), dout_inv = quantize_together([dout.contiguous()], of_do)
        if is_current(of_do) and not state.updated:
            largest = ctx.quantizers["scaling_fwd"][META_QKV].dtype, of_do.dtype
            bound = bound_of_dp((scale_inv, dout_inv), largest, codes[2].size(-1), ctx.options[3])
            begin_scale_of_dp(ctx.meta, ctx.quantizers, bound)
        scales = _Scales(ctx.meta, "scaling_bwd")
        delayed = scales.second is not None
        dtype = format_of(of_dqkv.dtype).torch if delayed else ctx.dtype
        gradients = [torch.empty_like(t, dtype=dtype) for t in codes]
        incoming = (dout8, None, o, lse, False, False)
        of_tensors = (scale_inv,) * 3 + (s_scale, s_scale_inv, o_scale_inv, dout_inv)
        of_tensors += (scales.first, scales.first_inverse, scales.second, None, None)
        amaxes = of_dp.amax, of_dqkv.amax if delayed else None
        _backward(*gradients, *amaxes, *incoming, *of_tensors, *codes, *ctx.options)
        if delayed:
            name, inverse = str(ctx.dtype).removeprefix("torch."), scales.second_inverse
            gradients = [_dequantize(g, inverse, name) for g in gradients]
        FP8GlobalStateManager.note_backward()
        state.recorded = True
        return *gradients, None, None, None


class DirectFp8:
    """Calls with the options of one call, which are processed once."""

    __slots__ = ("_options",)

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: EngineCall, training: bool) -> None:
        """The tensors and the options of the first call."""
        # The scale is always among the arguments that are passed: backward reads it from there.
        found = describe(q, k, v, **call.options())._replace(training=training)
        self._options = tuple(trimmed(found))[3:]

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
            return _Node.apply(q, k, v, meta, quantizers, self._options).flatten(-2)
        return _attend((q, k, v), meta, quantizers, self._options)[0].flatten(-2)
