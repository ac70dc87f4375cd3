"""FP8 without the layers of TransformerEngine's interface: one operator for each direction.

A call of DotProductAttention takes this way if Fused runs it on plain contiguous tensors of 16 bits
without optional tensors. Results, scales and amaxes are those of FusedAttnFunc.
"""

import torch
from torch import Tensor

# torch.autograd.Function without functorch's transforms, whose support costs microseconds.
from torch.autograd.function import _SingleLevelFunction

from te_attention.torch.fp8 import DelayedScalingRecipeState, FP8GlobalStateManager
from te_attention.torch.fp8.formats import format_of, is_current
from te_attention.torch.functional import describe
from te_attention.torch.operators import (
    fp8_attention_backward,
    fp8_attention_forward,
    ops,
    trimmed,
)
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

_quantize_current = ops.fp8_quantize_current.default


def _scaling(
    direct: "DirectFp8", quantizer: object, state: DelayedScalingRecipeState, words: tuple
) -> tuple:
    """The arguments of the operators that say how a direction is scaled."""
    if not direct.is_current:
        return None, None, state.scale, state.amax, *words, False, 0.0
    found = quantizer.scale, quantizer.amax, state.scale, state.amax
    return *found, *words, quantizer.force_pow_2_scales, quantizer.amax_epsilon


def _attend(qkv: tuple, meta: dict, quantizers: dict, direct: "DirectFp8") -> tuple[Tensor, Tensor]:
    """O with heads merged, and the tensor for backward."""
    of_qkv, state = quantizers["scaling_fwd"][META_QKV], meta["scaling_fwd"]
    return direct.forward(*_scaling(direct, of_qkv, state, direct.words), *qkv, *direct.options)


class _Node(_SingleLevelFunction):
    """apply(q, k, v, (fp8_meta, quantizers, direct)) -> O: each argument costs time."""

    @staticmethod
    def forward(ctx, q, k, v, given):
        o, saved = _attend((q, k, v), *given)
        if given[-1].is_current:
            ctx.save_for_backward(saved, o)
        else:
            ctx.save_for_backward(saved)
        meta, quantizers, direct = given
        # Those of now: another recipe has others, and may be used before backward.
        ctx.given = meta["scaling_bwd"], quantizers["scaling_bwd"], direct
        return o

    @staticmethod
    def backward(ctx, dout):
        saved, *o = ctx.saved_tensors
        state, quantizers, direct = ctx.given
        of_do = quantizers[META_DO]
        if direct.is_current and not state.updated:
            _begin(direct, saved, dout, state, quantizers)
        gradients = direct.backward(
            *(dout, saved, o[0] if o else None),
            *_scaling(direct, of_do, state, direct.words_of_gradients),
            *(*direct.shapes, *direct.options),
        )
        FP8GlobalStateManager.note_backward()
        state.recorded = True
        return *gradients, None


def _begin(
    direct: "DirectFp8",
    saved: Tensor,
    dout: Tensor,
    state: DelayedScalingRecipeState,
    quantizers: list,
) -> None:
    """The first scale of dP, of the largest values of V and dO."""
    of_do = quantizers[META_DO]
    options = of_do.force_pow_2_scales, of_do.amax_epsilon
    found = _quantize_current(dout.contiguous(), format_of(of_do.dtype).name, *options)
    # The first number of `saved` is the inverse of the scale of q, k and v.
    inverses = saved[:4].view(torch.float32), found[2]
    bound = bound_of_dp(inverses, direct.dtypes, direct.shapes[2].size(-1), direct.scale)
    begin_scale_of_dp({"scaling_bwd": state}, {"scaling_bwd": quantizers}, bound)


class DirectFp8:
    """Calls with the options of one call, which are processed once."""

    __slots__ = (
        "backward",
        "dtypes",
        "forward",
        "is_current",
        "options",
        "scale",
        "shapes",
        "words",
        "words_of_gradients",
    )

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, call: EngineCall, training: bool, quantizers: dict
    ) -> None:
        """The tensors and the options of the first call."""
        found = trimmed(describe(q, k, v, **call.options())._replace(training=training))
        self.options, self.scale = tuple(found)[3:], call.scale
        self.forward, self.backward = fp8_attention_forward(found), fp8_attention_backward(found)
        of_qkv, of_do = quantizers["scaling_fwd"][META_QKV], quantizers["scaling_bwd"][META_DO]
        self.is_current = is_current(of_qkv)
        self.dtypes = of_qkv.dtype, of_do.dtype
        types = tuple(format_of(d).name for d in self.dtypes)
        # The places in the state of delayed scaling, which with both recipes has the last
        # quantizers. int, because a member of an enum takes PyTorch's dispatcher a microsecond.
        first = [n if self.is_current else 0 for _, n in COUNTS.values()]
        own = [-1 if self.is_current else int(n) for n in (META_QKV, META_O, META_DO, META_DQKV)]
        self.words = own[0], META_S - first[0], own[1], types[0]
        self.words_of_gradients = own[2], META_DP - first[1], own[3], *types
        # backward needs the shapes of q, k and v: tensors of one element that have them.
        self.shapes = tuple(t.new_empty(()).expand(t.shape) for t in (q, k, v))

    @staticmethod
    def serves(call: EngineCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether calls like this one take this way."""
        halves = q.dtype in (torch.float16, torch.bfloat16)
        plain = not call.tensors() and not call.dropout and not call.return_max_logit
        contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        return halves and plain and contiguous and call.ranks is None and call.scale is not None

    def accepts(self, quantizers: dict) -> bool:
        """Whether the operators find the scales as these quantizers do now."""
        if not self.is_current:
            return True
        of_qkv, of_do = quantizers["scaling_fwd"][META_QKV], quantizers["scaling_bwd"][META_DO]
        existing = of_qkv.use_existing_amax or of_do.use_existing_amax
        return not (existing or of_qkv.with_amax_reduction or of_do.with_amax_reduction)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: dict, quantizers: dict) -> Tensor:
        """O with heads merged."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Node.apply(q, k, v, (meta, quantizers, self))
        return _attend((q, k, v), meta, quantizers, self)[0]
