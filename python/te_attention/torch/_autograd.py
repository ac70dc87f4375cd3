"""Gradients, and the way from arguments to the operators."""

import torch
from torch import Tensor

from te_attention.torch._arguments import BIAS, SINK, TENSORS, Arguments, trimmed
from te_attention.torch._library import LIBRARY, OPS

_forward, _backward = OPS.forward.default, OPS.backward.default


def keep(ctx, arguments: tuple, o: Tensor, lse: Tensor, max_logit: Tensor) -> None:
    """Keeps what backward needs. Every tensor goes where hooks and checkpoints see it."""
    places = [i for i in TENSORS if i < len(arguments) and arguments[i] is not None]
    ctx.save_for_backward(o, lse, *[arguments[i] for i in places])
    ctx.places, ctx.options = places, [None if i in places else x for i, x in enumerate(arguments)]
    ctx.mark_non_differentiable(max_logit)
    ctx.set_materialize_grads(False)


def kept(ctx, dout: Tensor | None) -> tuple[Tensor, Tensor, Tensor, list]:
    """The gradient of O, then O, LSE and the arguments as they were."""
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph is True; needs False: attention has no second derivative")
    o, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.options)
    for i, tensor in zip(ctx.places, tensors, strict=True):
        arguments[i] = tensor
    return torch.zeros_like(o) if dout is None else dout, o, lse, arguments


class _Attention(torch.autograd.Function):
    """Takes the tensors with a gradient, then all arguments as one: each one passed costs time."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, arguments):  # noqa: ARG004
        output = _forward(*arguments)
        keep(ctx, arguments, *output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse, _dmax):
        if dout is None and dlse is None:
            return (None,) * 6
        wants = ctx.needs_input_grad[3:5]
        dout, o, lse, arguments = kept(ctx, dout)
        dq, dk, dv, *small = _backward(dout, dlse, o, lse, *wants, *arguments)
        dbias, dsink = (g if wanted else None for g, wanted in zip(small, wants, strict=True))
        return dq, dk, dv, dbias, dsink, None


# The same for torch.compile and export. In eager mode this way through Python's dispatcher costs
# 300 microseconds with as many arguments as these.
def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    keep(ctx, inputs, *output)


def _differentiate(ctx, dout, dlse, _dmax) -> tuple:
    needs = ctx.needs_input_grad
    gradients = [None] * len(needs)
    if dout is not None or dlse is not None:
        wants = [len(needs) > i and needs[i] for i in (BIAS, SINK)]
        dout, o, lse, arguments = kept(ctx, dout)
        *gradients[:3], dbias, dsink = _backward(dout, dlse, o, lse, *wants, *arguments)
        for i, gradient, wanted in zip((BIAS, SINK), (dbias, dsink), wants, strict=True):
            if wanted:
                gradients[i] = gradient
    return tuple(gradients)


torch.library.register_autograd(
    "te_attention::attention", _differentiate, setup_context=_setup_context, lib=LIBRARY
)


def run(arguments: Arguments) -> tuple:
    """O, LSE and the largest logit (empty unless asked for)."""
    if torch.compiler.is_compiling():
        return OPS.attention.default(*arguments)
    passed = trimmed(arguments)
    if arguments.training and torch.is_grad_enabled():
        a = arguments
        return _Attention.apply(a.q, a.k, a.v, a.bias, a.sink, passed)
    return _forward(*passed)
