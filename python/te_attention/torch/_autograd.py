"""Autograd: the functions that call the forward and backward operators."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

# torch.autograd.Function without functorch's transforms, whose support costs microseconds.
from torch.autograd.function import _SingleLevelFunction

from te_attention.torch._arguments import BIAS, NUM_INPUTS, SINK, TENSORS, TRAINING, trimmed
from te_attention.torch._errors import guarded
from te_attention.torch._library import LIBRARY, OPS
from te_attention.torch._packing import packed_gradients

# The function that each overload calls: calling it directly saves one Python call. attention()
# itself sees to the errors of forward.
_forward, _forward_minimal = OPS.forward.default._op, OPS.forward_minimal.default._op
_backward = guarded(OPS.backward.default._op)
_backward_minimal = guarded(OPS.backward_minimal.default._op)
_backward_out = guarded(OPS.backward_out.default._op)
_backward_minimal_out = guarded(OPS.backward_minimal_out.default._op)
_inference, _inference_plain = OPS.inference.default._op, OPS.inference_plain.default._op
# PyTorch differentiates this one in C++: an autograd node in Python costs tens of microseconds.
_fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default._op
_active_modes = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
# Up to this number of elements of q, k and v the host's time counts. Above it kernels take longer,
# and an allocation on a GPU may fail in backward, which only Python raises as OutOfMemoryError.
SMALL = 1 << 22
NO_SECOND_DERIVATIVE = "attention has no second derivative"
NO_FORWARD_MODE = (
    "an input has a tangent; needs none: attention has no forward-mode derivative "
    "(jvp, jacfwd, hessian), only that of reverse mode"
)


def save_context(
    ctx, arguments: tuple, o: Tensor, lse: Tensor, more: Sequence[Tensor | None] = ()
) -> None:
    """Saves O, LSE, the arguments and `more` for backward.

    Every tensor is saved by save_for_backward(), so that hooks and checkpoints can replace it.
    """
    places, options = TENSORS[len(arguments)], list(arguments)
    for i in places:
        options[i] = None
    ctx.save_for_backward(o, lse, *[arguments[i] for i in places], *more)  # some are None
    ctx.options = options


def refuse_second_derivative() -> None:
    """Raises if the backward pass runs with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"create_graph is True; needs False: {NO_SECOND_DERIVATIVE}")


def load_all(ctx) -> tuple[Tensor, Tensor, list, list]:
    """Returns O, LSE, the arguments, and what else save_context() saved."""
    o, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.options)
    places = TENSORS[len(arguments)]
    for i, tensor in zip(places, tensors, strict=False):
        arguments[i] = tensor
    return o, lse, arguments, tensors[len(places) :]


def load_context(ctx) -> tuple[Tensor, Tensor, list]:
    """Returns O, LSE and the arguments that save_context() saved."""
    return load_all(ctx)[:3]


def load_for_backward(ctx, dout: Tensor | None) -> tuple[Tensor, Tensor, Tensor, list]:
    """Returns the gradient of O (zeros for None), O, LSE and the arguments."""
    refuse_second_derivative()
    o, lse, arguments = load_context(ctx)
    return torch.zeros_like(o) if dout is None else dout, o, lse, arguments


class _MinimalAttention(_SingleLevelFunction):
    """The minimal signature: q, k and v are the only tensors, and O is the only output."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        o, lse = _forward_minimal(q, k, v, *options)
        ctx.save_for_backward(o, lse, q, k, v)
        ctx.options = options
        return o

    @staticmethod
    def backward(ctx, dout):
        refuse_second_derivative()
        o, lse, *inputs = ctx.saved_tensors
        gradients = packed_gradients(*inputs, dout)
        if gradients is None:
            return *_backward_minimal(dout, o, lse, *inputs, *ctx.options), None
        _backward_minimal_out(*gradients, dout, o, lse, *inputs, *ctx.options)
        return *gradients, None


class _Attention(_SingleLevelFunction):
    """Any options. The arguments are one tuple, because each argument of apply() costs time."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, arguments, more):  # noqa: ARG004
        o, lse, max_logit = _forward(*arguments)
        save_context(ctx, arguments, o, lse)
        ctx.set_materialize_grads(False)
        if not more:  # each output costs a microsecond
            return o
        ctx.mark_non_differentiable(max_logit)
        return o, lse, max_logit

    @staticmethod
    def backward(ctx, dout, dlse=None, _dmax=None):
        if dout is None and dlse is None:
            return (None,) * 7
        wants = ctx.needs_input_grad[3:5]
        dout, o, lse, arguments = load_for_backward(ctx, dout)
        gradients = packed_gradients(*arguments[:NUM_INPUTS], dout, dlse)
        if gradients is None:
            dq, dk, dv, *small = _backward(dout, dlse, o, lse, *wants, *arguments)
        else:
            dq, dk, dv = gradients
            small = _backward_out(dq, dk, dv, dout, dlse, o, lse, *wants, *arguments)
        dbias, dsink = (g if wanted else None for g, wanted in zip(small, wants, strict=True))
        return dq, dk, dv, dbias, dsink, None, None


class _Transformed(torch.autograd.Function):
    """The form for functorch's transforms, which need setup_context() and a vmap rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_more, *arguments):
        return _forward(*trimmed(arguments))

    @staticmethod
    def setup_context(ctx, inputs, output):
        more, *arguments = inputs
        o, lse, max_logit = output
        save_context(ctx, arguments, o, lse)
        ctx.mark_non_differentiable(*([max_logit] if more else [lse, max_logit]))
        ctx.more = more

    @staticmethod
    def backward(ctx, dout, dlse, _dmax):
        wants = [ctx.needs_input_grad[1 + i] for i in (BIAS, SINK)]
        o, lse, arguments = load_context(ctx)
        gradients = [None] * (1 + len(arguments))
        dlse = dlse if ctx.more else None
        *gradients[1 : 1 + NUM_INPUTS], dbias, dsink = _TransformedBackward.apply(
            dout, dlse, o, lse, *wants, *arguments
        )
        for i, gradient, wanted in zip((BIAS, SINK), (dbias, dsink), wants, strict=True):
            if wanted:
                gradients[1 + i] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(_ctx, *_):
        raise RuntimeError(NO_FORWARD_MODE)


class _TransformedBackward(torch.autograd.Function):
    """The backward pass for functorch, which requires an autograd function for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_ctx, *_):
        raise RuntimeError(NO_SECOND_DERIVATIVE)

    @staticmethod
    def jvp(_ctx, *_):
        raise RuntimeError(NO_FORWARD_MODE)


# The form for torch.compile and export. Eager mode does not use it: an operator with a registered
# gradient and this many arguments takes 300 microseconds in PyTorch's dispatcher.
def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    o, lse, max_logit = output
    save_context(ctx, inputs, o, lse)
    ctx.mark_non_differentiable(max_logit)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, _dmax) -> tuple:
    needs = ctx.needs_input_grad
    gradients = [None] * len(needs)
    if dout is not None or dlse is not None:
        wants = [len(needs) > i and needs[i] for i in (BIAS, SINK)]
        dout, o, lse, arguments = load_for_backward(ctx, dout)
        *gradients[:3], dbias, dsink = _backward(dout, dlse, o, lse, *wants, *arguments)
        for i, gradient, wanted in zip((BIAS, SINK), (dbias, dsink), wants, strict=True):
            if wanted:
                gradients[i] = gradient
    return tuple(gradients)


torch.library.register_autograd(
    "te_attention::attention", _differentiate, setup_context=_setup_context, lib=LIBRARY
)


def is_traced() -> bool:
    """Whether torch.compile, functorch or forward-mode differentiation traces the calls."""
    return _is_compiling() or _are_functorch_transforms_active() or forward_ad._current_level >= 0


def _refuse_tangents(arguments: tuple) -> None:
    """Raises where an input has a tangent, also below the wrappers of other transforms."""
    for i in TENSORS[len(arguments)]:
        tensor = arguments[i]
        while tensor is not None:
            if forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(NO_FORWARD_MODE)
            wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            tensor = torch._C._functorch.get_unwrapped(tensor) if wrapped else None


def chosen(output: tuple, return_lse: bool, return_max_logit: bool) -> tuple[Tensor, ...]:
    """A tuple of O and the requested ones of LSE and the largest logit."""
    o, lse, max_logit = output
    return (o, *([lse] if return_lse else []), *([max_logit] if return_max_logit else []))


def run_minimal(
    q: Tensor, k: Tensor, v: Tensor, form: str, mask: str | None, scale: float | None
) -> Tensor:
    """O of an attention() that has only these options and is not traced."""
    if mask is None:
        mask = "none"
    if _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if (
            (form == "bhsd" and (mask == "none" or mask == "causal"))
            # Parts of one tensor take the path that writes their gradients into one.
            and k.storage_offset() == v.storage_offset()
            # Subclasses and modes, such as FLOP counters, know the operators of te_attention.
            and (type(q) is Tensor and not _active_modes())
            # Other devices, such as meta, have no kernel of PyTorch's operator.
            and (q.is_cpu or (q.is_cuda and q.numel() + k.numel() + v.numel() <= SMALL))
        ):
            if scale is None and mask == "none":
                return _fused(q, k, v)[0]
            return _fused(q, k, v, None, 0.0, mask == "causal", scale=scale)[0]
        options = (form, mask, True) if scale is None else (form, mask, True, scale)
        return _MinimalAttention.apply(q, k, v, options)
    if scale is not None:
        return _inference(q, k, v, form, mask, False, scale)
    if form == "bhsd":  # each argument passed costs time
        if mask == "none":
            return _inference_plain(q, k, v)
        if mask == "causal":
            return _inference_plain(q, k, v, True)
    return _inference(q, k, v, form, mask)


def run(arguments: tuple, more: bool) -> Tensor | tuple[Tensor, ...]:
    """Returns O, or with `more` a tuple of O, LSE and the largest logit."""
    if is_traced():
        if forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        if _is_compiling() or not _are_functorch_transforms_active():
            output = OPS.attention.default(*arguments)
        else:
            output = _Transformed.apply(more, *arguments)
        return output if more else output[0]
    passed = trimmed(arguments)
    if arguments[TRAINING]:
        return _Attention.apply(
            *passed[:NUM_INPUTS], arguments[BIAS], arguments[SINK], passed, more
        )
    output = _forward(*passed)
    return output if more else output[0]
