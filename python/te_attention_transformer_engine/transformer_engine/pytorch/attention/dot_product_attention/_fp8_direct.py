"""FP8 without the layers of TransformerEngine's interface: one operator for each direction.

A call of DotProductAttention takes this way if Fused runs it on plain contiguous tensors of 16 bits
without optional tensors. Results, scales and amaxes are those of FusedAttnFunc.
"""

import torch
from torch import Tensor

# torch.autograd.Function without functorch's transforms, whose support costs microseconds.
from torch.autograd.function import _SingleLevelFunction

from te_attention.torch.fp8 import FP8GlobalStateManager
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
from ._fp8 import begin_scale_of_dp, bound_of_dp

_quantize_current = ops.fp8_quantize_current.default
_NO_OPTIONS = (False, False, 0.0)  # of delayed scaling, in the place of those of current scaling


def _options(quantizer: object) -> tuple[bool, bool, float]:
    """The arguments of the operators that say how scales of inputs are found."""
    if not is_current(quantizer):
        return _NO_OPTIONS
    return True, quantizer.force_pow_2_scales, quantizer.amax_epsilon


def _attend(qkv: tuple, quantizers: dict, direct: "DirectFp8") -> tuple[Tensor, Tensor]:
    """O with heads merged, and the tensor for backward."""
    forward = quantizers["scaling_fwd"]
    of_qkv, of_s, of_o = forward[META_QKV], forward[META_S], forward[META_O]
    o_scale, o_amax = (None, None) if is_current(of_o) else (of_o.scale, of_o.amax)
    return direct.forward(
        *(of_qkv.scale, of_qkv.amax, of_s.scale, of_s.amax, o_scale, o_amax),
        *(direct.forward_dtype, *_options(of_qkv), *qkv, *direct.options),
    )


class _Node(_SingleLevelFunction):
    """apply(q, k, v, fp8_meta, quantizers, direct) -> O."""

    @staticmethod
    def forward(ctx, q, k, v, meta, quantizers, direct):
        o, saved = _attend((q, k, v), quantizers, direct)
        if is_current(quantizers["scaling_fwd"][META_O]):
            ctx.save_for_backward(saved, o)
        else:
            ctx.save_for_backward(saved)
        ctx.given = meta, quantizers, direct
        return o

    @staticmethod
    def backward(ctx, dout):
        saved, *o = ctx.saved_tensors
        meta, quantizers, direct = ctx.given
        backward, state = quantizers["scaling_bwd"], meta["scaling_bwd"]
        of_do, of_dp, of_dqkv = backward[META_DO], backward[META_DP], backward[META_DQKV]
        if not state.updated and is_current(of_do):
            _begin(direct, saved, dout, meta, quantizers)
        scale, amax = (None, None) if is_current(of_dqkv) else (of_dqkv.scale, of_dqkv.amax)
        gradients = direct.backward(
            *(dout, saved, o[0] if o else None, of_do.scale, of_do.amax, of_dp.scale, of_dp.amax),
            *(scale, amax, direct.forward_dtype, direct.backward_dtype, *_options(of_do)),
            *(*direct.shapes, *direct.options),
        )
        FP8GlobalStateManager.note_backward()
        state.recorded = True
        return *gradients, None, None, None


def _begin(direct: "DirectFp8", saved: Tensor, dout: Tensor, meta: dict, quantizers: dict) -> None:
    """The first scale of dP, of the largest values of V and dO."""
    of_qkv, of_do = quantizers["scaling_fwd"][META_QKV], quantizers["scaling_bwd"][META_DO]
    found = _quantize_current(dout.contiguous(), direct.backward_dtype, *_options(of_do)[1:])
    # The first number of `saved` is the inverse of the scale of q, k and v.
    inverses = saved[:4].view(torch.float32), found[2]
    dtypes = of_qkv.dtype, of_do.dtype
    bound = bound_of_dp(inverses, dtypes, direct.shapes[2].size(-1), direct.scale)
    begin_scale_of_dp(meta, quantizers, bound)


class DirectFp8:
    """Calls with the options of one call, which are processed once."""

    __slots__ = (
        "backward",
        "backward_dtype",
        "forward",
        "forward_dtype",
        "options",
        "scale",
        "shapes",
    )

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, call: EngineCall, training: bool, quantizers: dict
    ) -> None:
        """The tensors and the options of the first call."""
        found = trimmed(describe(q, k, v, **call.options())._replace(training=training))
        self.options, self.scale = tuple(found)[3:], call.scale
        self.forward, self.backward = fp8_attention_forward(found), fp8_attention_backward(found)
        self.forward_dtype = format_of(quantizers["scaling_fwd"][META_QKV].dtype).name
        self.backward_dtype = format_of(quantizers["scaling_bwd"][META_DO].dtype).name
        # backward needs the shapes of q, k and v: tensors of one element that have them.
        self.shapes = tuple(t.new_empty(()).expand(t.shape) for t in (q, k, v))

    @staticmethod
    def serves(call: EngineCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether calls like this one take this way."""
        halves = q.dtype in (torch.float16, torch.bfloat16)
        plain = not call.tensors() and not call.dropout and not call.return_max_logit
        contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        return halves and plain and contiguous and call.ranks is None and call.scale is not None

    @staticmethod
    def accepts(quantizers: dict) -> bool:
        """Whether the operators find the scales as these quantizers do now."""
        of_inputs = quantizers["scaling_fwd"][META_QKV], quantizers["scaling_bwd"][META_DO]
        return not any(
            is_current(q) and (q.use_existing_amax or q.with_amax_reduction) for q in of_inputs
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, meta: dict, quantizers: dict) -> Tensor:
        """O with heads merged."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Node.apply(q, k, v, meta, quantizers, self)
        return _attend((q, k, v), quantizers, self)[0]
