"""Attention on a packed projection, whose gradient is written into one packed tensor."""

import torch
from torch import Tensor

from te_attention.torch._arguments import FORMATS, NUM_INPUTS, trimmed
from te_attention.torch._autograd import (
    _backward,
    _backward_out,
    is_traced,
    load_for_backward,
    save_context,
)
from te_attention.torch._library import OPS
from te_attention.torch._packing import is_batch
from te_attention.torch._types import check_number, check_slopes, text_of
from te_attention.torch.functional import MULTIPLE, attention, autocast, chosen, describe

_forward = OPS.forward.default


def _views(packed: Tensor, heads: tuple[int, int, int] | None) -> tuple[Tensor, ...]:
    """Views of q, k and v. `heads`: their numbers of heads; None: interleaved."""
    if heads is None:
        return packed.unflatten(-1, (3, -1)).unbind(-2)
    return packed.split(heads, dim=-2)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, heads, arguments):
        arguments = trimmed((*_views(packed, heads), *arguments[3:]))
        o, lse, max_logit = _forward(*arguments)
        save_context(ctx, arguments, o, lse)
        ctx.shape, ctx.heads = packed.shape, heads
        ctx.mark_non_differentiable(max_logit)
        ctx.set_materialize_grads(False)
        return o, lse, max_logit

    @staticmethod
    def backward(ctx, dout, dlse, _dmax):
        if dout is None and dlse is None:
            return None, None, None
        dout, o, lse, arguments = load_for_backward(ctx, dout)
        if is_batch(dout) or is_batch(
            dlse
        ):  # batched gradients cannot be written into given memory
            every = _backward(dout, dlse, o, lse, False, False, *arguments)[:NUM_INPUTS]
            if ctx.heads is None:
                return torch.cat(every, -1), None, None
            return torch.cat(every, -2), None, None
        gradient = o.new_empty(ctx.shape)
        out = _views(gradient, ctx.heads)
        _backward_out(*out, dout, dlse, o, lse, False, False, *arguments)
        return gradient, None, None


def _heads(qkv: Tensor, heads_kv: int | None, interleaved: bool) -> tuple[int, int, int] | None:
    heads = qkv.shape[-2]
    if interleaved:
        if heads_kv not in (None, heads):
            raise ValueError(f"heads_kv is {heads_kv}; needs None: interleaved heads are {heads}")
        if qkv.shape[-1] % 3:
            raise ValueError(f"qkv has {qkv.shape[-1]} elements a head; needs a multiple of 3")
        return None
    if heads_kv is None:
        if heads % 3:
            raise ValueError(f"qkv has {heads} heads; needs a multiple of 3, or heads_kv")
        heads_kv = heads // 3
    if not isinstance(heads_kv, int) or not 0 < 2 * heads_kv < heads:
        raise ValueError(f"heads_kv is {heads_kv}; needs from 1 to {(heads - 1) // 2}")
    return heads - 2 * heads_kv, heads_kv, heads_kv


def _check(qkv: Tensor, options: dict) -> None:
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv is {text_of(qkv)}; needs a tensor")
    form = options["format"]
    if form == "bhsd" or form not in FORMATS:
        raise ValueError(f"format is {form!r}; needs bshd, sbhd or thd: heads before the last")
    rank = 3 if form == "thd" else 4
    if qkv.dim() != rank:
        raise ValueError(f"qkv is of shape {list(qkv.shape)}; needs {rank} dimensions for {form}")
    if not torch.is_grad_enabled():
        return
    check_slopes(options.get("alibi"))
    for name in ("scale", "softcap"):
        check_number(name, options.get(name))
    for name in ("bias", "sink"):
        if isinstance(options.get(name), Tensor) and options[name].requires_grad:
            raise ValueError(f"{name} requires a gradient; needs attention() for that")


def attention_packed(
    qkv: Tensor,
    *,
    heads_kv: int | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
    **options,
) -> Tensor | tuple[Tensor, ...]:
    """attention() of q, k and v that are parts of one tensor, as a fused projection returns them.

    Autograd would concatenate the three gradients by a copy. Here backward writes them in place,
    into one tensor of the shape of qkv. (Compiled code and functorch's transforms use the copy.)

    Args:
        qkv: ``[b, s, h, d]``, ``[s, b, h, d]`` or ``[t, h, d]``: h = heads_q + 2 * heads_kv, the
            heads of q, then those of k, then those of v. Interleaved: ``[..., heads, 3 * d]``, q,
            k and v of one head adjacent.
        heads_kv: number of heads of k and of v. Default: a third of h.
        interleaved: see qkv.
        return_lse: also return LSE.
        options: as in attention(), with format "bshd" by default. A bias or a sink has no
            gradient here: use attention() where it needs one.

    Raises:
        RuntimeError, ValueError: as attention() does.
    """
    options.setdefault("format", "bshd")
    _check(qkv, options)
    if torch.is_autocast_enabled(qkv.device.type):
        (qkv,) = autocast(qkv)
    heads = _heads(qkv, heads_kv, interleaved)
    views = _views(qkv, heads)
    if is_traced() or views[0].shape[-1] % MULTIPLE:  # which attention() pads, by a copy
        return attention(*_views(qkv, heads), return_lse=return_lse, **options)
    differentiable = torch.is_grad_enabled() and qkv.requires_grad
    with torch.no_grad():
        arguments = describe(*_views(qkv, heads), **options)
    arguments = arguments._replace(training=arguments.training or differentiable)
    output = chosen(_Packed.apply(qkv, heads, arguments), return_lse, arguments.max_logit)
    return output if len(output) > 1 else output[0]
