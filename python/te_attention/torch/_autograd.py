"""Gradients, and the way from arguments to the operators."""

import torch

from te_attention.torch._arguments import BIAS, SINK, TENSORS, Arguments, trimmed
from te_attention.torch._library import LIBRARY, OPS


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    o, lse, max_logit = output
    # Every tensor goes through save_for_backward, where hooks and checkpoints see it.
    places = [i for i in TENSORS if i < len(inputs) and inputs[i] is not None]
    ctx.save_for_backward(o, lse, *[inputs[i] for i in places])
    options = list(inputs)
    for i in places:
        options[i] = None
    ctx.places, ctx.options = places, options
    ctx.mark_non_differentiable(max_logit)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse, _dmax) -> tuple:
    o, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.options)
    gradients = [None] * len(arguments)
    if dout is None and dlse is None:
        return tuple(gradients)
    if dout is None:
        dout = torch.zeros_like(o)
    for i, tensor in zip(ctx.places, tensors, strict=True):
        arguments[i] = tensor
    needs = ctx.needs_input_grad  # of the arguments that were passed
    wants_dbias, wants_dsink = (len(needs) > i and needs[i] for i in (BIAS, SINK))
    *gradients[:3], dbias, dsink = OPS.backward.default(
        dout, dlse, o, lse, wants_dbias, wants_dsink, *arguments
    )
    if wants_dbias:
        gradients[BIAS] = dbias
    if wants_dsink:
        gradients[SINK] = dsink
    return tuple(gradients)


# For torch.compile and export. In eager mode its detour through Python's dispatcher costs 300
# microseconds with as many arguments as these.
torch.library.register_autograd(
    "te_attention::attention", _backward, setup_context=_setup_context, lib=LIBRARY
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = OPS.forward.default(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


_forward = OPS.forward.default


def run(arguments: Arguments) -> tuple:
    """O, LSE and the largest logit (empty unless asked for)."""
    if torch.compiler.is_compiling():
        return OPS.attention.default(*arguments)
    if arguments.training and torch.is_grad_enabled():
        return _Attention.apply(*trimmed(arguments))
    return _forward(*trimmed(arguments))
