"""Attention on a packed projection: the gradient is written straight into one packed tensor."""

import torch
from torch import Tensor

from te_attention.torch._arguments import Arguments, trimmed
from te_attention.torch._library import OPS
from te_attention.torch.functional import _chosen, _describe

_forward, _backward_out = OPS.forward.default, OPS.backward_out.default


def _views(packed: Tensor, heads_q: int, heads_kv: int, interleaved: bool) -> tuple[Tensor, ...]:
    if interleaved:  # q, k, v of one head side by side
        return tuple(packed.unflatten(-1, (3, -1)).unbind(-2))
    return packed.split((heads_q, heads_kv, heads_kv), dim=-2)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, shape, arguments):
        q, k, v = _views(packed, *shape)
        arguments = arguments._replace(q=q, k=k, v=v)
        o, lse, max_logit = _forward(*trimmed(arguments))
        others = [x for x in arguments[3:] if isinstance(x, Tensor)]
        ctx.save_for_backward(packed, o, lse, *others)
        ctx.shape = shape
        ctx.arguments = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.places = [i for i, x in enumerate(arguments) if i > 2 and isinstance(x, Tensor)]
        ctx.mark_non_differentiable(max_logit)
        ctx.set_materialize_grads(False)
        return o, lse, max_logit

    @staticmethod
    def backward(ctx, dout, dlse, _dmax):
        if dout is None and dlse is None:
            return None, None, None
        packed, o, lse, *others = ctx.saved_tensors
        arguments = ctx.arguments
        for i, tensor in zip(ctx.places, others, strict=True):
            arguments[i] = tensor
        arguments[:3] = _views(packed, *ctx.shape)
        gradient = torch.empty_like(packed)
        dout = torch.zeros_like(o) if dout is None else dout
        out = _views(gradient, *ctx.shape)
        _backward_out(*out, dout, dlse, o, lse, False, False, *arguments)
        return gradient, None, None


def attention_packed(
    qkv: Tensor,
    *,
    heads_kv: int | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
    **options,
) -> Tensor | tuple[Tensor, ...]:
    """attention() of q, k and v that lie in one tensor, as a fused projection leaves them.

    Autograd would join the three gradients by a copy; here backward writes them in place, into one
    tensor of the shape of qkv.

    Args:
        qkv: ``[b, s, h, d]``, ``[s, b, h, d]`` or ``[t, h, d]``: h = heads_q + 2 * heads_kv, the
            heads of q, then those of k, then those of v. Interleaved: ``[..., heads, 3 * d]``, q,
            k and v of one head side by side.
        heads_kv: heads of k, and of v. Default: a third of h.
        interleaved: see qkv.
        return_lse: also return LSE.
        options: as in attention(), with format "bshd" by default. A bias or a sink has no
            gradient here: use attention() where it needs one.

    Raises:
        RuntimeError, ValueError: as attention() does.
    """
    options.setdefault("format", "bshd")
    heads = qkv.shape[-2]
    if heads_kv is None:
        if not interleaved and heads % 3:
            raise ValueError(f"qkv has {heads} heads; needs a multiple of 3, or heads_kv")
        heads_kv = heads if interleaved else heads // 3
    shape = (heads - 2 * heads_kv, heads_kv, interleaved)
    for name in ("bias", "sink"):
        if isinstance(options.get(name), Tensor) and options[name].requires_grad:
            raise ValueError(f"{name} requires a gradient; needs attention() for that")
    with torch.no_grad():
        arguments = _describe(*_views(qkv, *shape), **options)
    training = arguments.training or (torch.is_grad_enabled() and qkv.requires_grad)
    arguments = Arguments(*arguments)._replace(training=training)
    return _chosen(_Packed.apply(qkv, shape, arguments), return_lse, arguments.max_logit)
