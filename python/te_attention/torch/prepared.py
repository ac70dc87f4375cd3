"""attention() for many calls with the same options, which are processed once."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from te_attention.torch._arguments import NUM_INPUTS, Arguments, trimmed
from te_attention.torch._autograd import _Attention, _forward, _inference, _MinimalAttention
from te_attention.torch._options import MINIMAL
from te_attention.torch._types import statistic_dtype
from te_attention.torch.functional import attention, describe


class PreparedAttention:
    """attention() with fixed options, which are checked once: later calls take less host time.

    A call takes q, k and v, then the tensors named in `tensors`, in that order, and returns O.
    Shapes may differ from those of the first call: the operators check the tensors of each call.
    With dropout, rng_state must be one of `tensors`, because a call draws no random numbers.

    Args:
        q, k, v: the tensors of the first call.
        tensors: arguments of attention() that change with each call, by name, with the values of
            the first call.
        options: all other arguments of attention() that differ from their defaults.

    Raises:
        RuntimeError, TypeError, ValueError: as attention() does.
    """

    __slots__ = (
        "_differentiable",
        "_is_deterministic",
        "_is_minimal",
        "_names",
        "_options",
        "_places",
        "_plain",
        "_small",
    )

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict, **options: object) -> None:
        """Checks the options and stores them in the form that the operators take."""
        call = describe(q, k, v, **(options | tensors))
        self._names, self._options = tuple(tensors), options
        fields = ("slopes" if name == "alibi" else name for name in tensors)
        self._places = tuple(map(Arguments._fields.index, fields))
        self._differentiable = self._without_tensors(call._replace(training=True))
        self._plain = self._without_tensors(call._replace(training=call.dropout > 0))
        self._is_deterministic = torch._C._get_deterministic_algorithms()
        self._is_minimal = len(self._differentiable) <= MINIMAL - NUM_INPUTS
        self._small = not {"bias", "sink", "alibi"}.isdisjoint(tensors)

    def _without_tensors(self, call: Arguments) -> tuple:
        """The arguments after q, k and v, with None for those that change with each call."""
        kept = [None if i in self._places else x for i, x in enumerate(trimmed(call))]
        return tuple(kept[NUM_INPUTS:])

    def _unprepared(self, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        given = dict(zip(self._names, tensors, strict=True))
        return attention(q, k, v, **{**self._options, **given})

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        """Returns O."""
        try:
            return self._run(q, k, v, tensors)
        except RuntimeError:  # attention() pads head dims, casts lengths, and says what is wrong
            return self._unprepared(q, k, v, tensors)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        if (
            torch.compiler.is_compiling()
            or torch._C._is_any_autocast_enabled()
            or torch._C._get_deterministic_algorithms() != self._is_deterministic
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return self._unprepared(q, k, v, tensors)
        bias = sink = None
        if self._small:
            given = dict(zip(self._names, tensors, strict=True))
            bias, sink, slopes = given.get("bias"), given.get("sink"), given.get("alibi")
            dtype = statistic_dtype(q)
            if (slopes is not None and (slopes.requires_grad or slopes.dtype != dtype)) or (
                sink is not None and sink.dtype != dtype
            ):
                return self._unprepared(q, k, v, tensors)
        differentiable = torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink is not None and sink.requires_grad)
        )
        if self._is_minimal:
            if differentiable:
                return _MinimalAttention.apply(q, k, v, self._differentiable)
            return _inference(q, k, v, *self._plain)
        options = list(self._differentiable if differentiable else self._plain)
        for place, tensor in zip(self._places, tensors, strict=True):
            options[place - NUM_INPUTS] = tensor
        if differentiable:
            return _Attention.apply(q, k, v, bias, sink, (q, k, v, *options), False)
        return _forward(q, k, v, *options)[0]
