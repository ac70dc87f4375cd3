"""attention() and related functions of tensors, in the style of torch.nn.functional."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, Never, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from te_attention.torch import _fp8
from te_attention.torch._arguments import NONE, Arguments, trimmed
from te_attention.torch._autograd import chosen, is_traced, run, run_minimal
from te_attention.torch._errors import raise_clearer, refuse_unknown
from te_attention.torch._fp8 import Fp8
from te_attention.torch._jagged import attend_jagged
from te_attention.torch._library import OPS
from te_attention.torch._types import (
    HALVES,
    WINDOW,
    as_statistic,
    check_number,
    check_slopes,
    refuse_causal_bias,
    text_of,
)

Mask: TypeAlias = Literal["causal", "causal_bottom_right", "bottom_right"]
Window: TypeAlias = tuple[int | None, int | None]
BiasType: TypeAlias = Literal["post_scale", "pre_scale"]
Sink: TypeAlias = Tensor | Literal["off_by_one"]
F = TypeVar("F", bound=Callable)
MAX_WINDOW = 2**62  # larger than any sequence length
NO_WINDOW = (-1, -1)
BIAS_DIMENSIONS = 4
MULTIPLE = 8  # of the head dims that the operators take
_INT32 = torch.iinfo(torch.int32)
# The types that autocast converts. float64 stays as it is, as in SDPA; other types are refused.
AUTOCAST = frozenset((torch.float16, torch.bfloat16, torch.float32))
PAGES = (
    "page_table is given and an input requires a gradient; needs torch.no_grad(), or ragged or "
    "padded keys: pages have none"
)
# Names of this module, because looking them up in torch takes as long as the calls themselves.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling
_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_get_deterministic_algorithms = torch._C._get_deterministic_algorithms
_are_all_deterministic = torch.are_deterministic_algorithms_enabled


def _run(arguments: tuple, return_lse: bool, return_max_logit: bool) -> Tensor | tuple[Tensor, ...]:
    if return_lse or return_max_logit:
        return chosen(run(arguments, True), return_lse, return_max_logit)
    return run(arguments, False)


def _fast(function: F) -> F:
    """attention() with a way past its options for calls that have none but these three."""

    @wraps(function)
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        format: str = "bhsd",
        **options: Any,
    ) -> Any:
        if not (  # is_traced() first, in place: compilers do not know the functions after it
            (options or _is_compiling() or _are_functorch_transforms_active())
            or (forward_ad._current_level >= 0 or _is_any_autocast_enabled())
            or (_get_deterministic_algorithms() or not (scale is None or type(scale) is float))
        ):
            try:
                return run_minimal(q, k, v, format, mask, scale)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                pass  # the other way pads head dims, and says what is wrong
        if getattr(q, "is_nested", False):
            minimal = {"q": q, "k": k, "v": v, "mask": mask, "scale": scale, "format": format}
            return attend_jagged(attention, {**minimal, **options})
        return function(q, k, v, mask=mask, scale=scale, format=format, **options)

    # The signature for help() and inspect: the arguments that callers may pass.
    signature = inspect.signature(function)
    hidden = ("_finish", "unknown")
    shown = [p for p in signature.parameters.values() if p.name not in hidden]
    attention.__signature__ = signature.replace(parameters=shown)
    return attention


@_fast
def attention(  # noqa: C901 (a call for each branch would cost every caller time)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    window: Window | None = None,
    bias: Tensor | None = None,
    bias_type: BiasType = "post_scale",
    alibi: bool | Tensor | None = False,
    softcap: float = NONE,
    sink: Sink | None = None,
    dropout: float = NONE,
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
    scale: float | None = None,
    format: str = "bhsd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    offsets_q: Tensor | None = None,
    offsets_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    page_table_v: Tensor | None = None,
    origin: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    engine: str = "",
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    max_ctas: int | None = None,
    fp8: Fp8 | Literal["current"] | None = None,
    return_amax: bool = False,
    _finish: Callable[[tuple, bool, bool], Any] = _run,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """softmax(scale * q k^T + ...) v, with gradients for q, k, v, bias and a learnable sink.

    Shapes by default as in ``scaled_dot_product_attention``: q ``[b, heads_q, s_q, d]``, k
    ``[b, heads_kv, s_kv, d]``, v ``[b, heads_kv, s_kv, d_v]``, with heads_q a multiple of heads_kv
    (grouped queries need no expansion). float16, bfloat16, float32, or on the CPU float64; head
    dims up to 1024, with gradients up to 512. Any strides, if the last is 1. Tensors are copied
    only where a head dim is no multiple of 8: then q, k and v are padded with zeros, which changes
    neither the result nor the default of scale. The host never waits for the device.
    docs/semantics.md defines each option.

    q, k and v may be nested tensors of layout torch.jagged, ``[b, heads, s, d]`` in the order of
    the format: each sequence then has its own length, and O is such a tensor too.

    Args:
        q, k, v: queries, keys and values, of the same dtype (but see k_descale) and on the same
            device.
        mask: None; "causal": column <= row; "causal_bottom_right": the last query of the actual
            length attends up to the last key, as in decoding; "bottom_right": masks no key, but
            window and ALiBi are relative to that diagonal.
        window: (left, right): the numbers of columns before and after the diagonal that a row
            attends to, both inclusive. None as an element: no bound on that side.
        bias: added to the scores: ``[b, heads_q, s_q, s_kv]``, where each dimension is full or 1
            and leading dimensions may be omitted (ragged: sizes of max_seqlen); dtype of q or
            float32.
        bias_type: "post_scale": after scale and softcap; "pre_scale": before scale.
        alibi: True: the published slopes; or slopes, ``[heads_q]`` or ``[b, heads_q]``, which have
            no gradient. False or None: no ALiBi.
        softcap: c > 0: a score x becomes c * tanh(x / c). 0: no soft cap. softcap, scale and
            dropout are numbers: they have no gradient, and reading a tensor on the GPU would make
            the host wait.
        sink: an additional logit in the softmax's denominator: ``[heads_q]``, learnable; or
            "off_by_one": a logit of 0. Sinks and slopes of another floating-point type are cast to
            float32, or to float64 where q is float64.
        dropout: dropout probability in [0, 1). It is applied in every call: pass 0 in evaluation.
        rng_state: int64 ``[2]`` {seed, offset} on q's device, which determines the dropout mask.
            Default: drawn from `generator`, or from PyTorch's default generator, by an operator
            that CUDA graphs and activation checkpoints replay.
        generator: the generator from which rng_state is drawn.
        scale: factor of q k^T. Default: 1 / sqrt(d). For a learnable scale, multiply q by it and
            pass 1.
        format: order of dimensions: "bhsd", "bshd", "sbhd", "thd" (ragged: the tokens of all
            sequences, concatenated), or one for q and one for k and v, as in "thd_bshd".
        cu_seqlens_q, cu_seqlens_kv: int32 ``[b + 1]`` on q's device: cumulative actual lengths.
            int64 here, in offsets and in page tables is cast, on the device. "thd" requires them.
            The other formats treat rows past the length as padding, whose output is 0.
        max_seqlen_q, max_seqlen_kv: for "thd" and pages: upper bounds of the lengths, not
            necessarily tight. Default: the number of tokens, or of slots in the page table.
        offsets_q, offsets_kv: int32 ``[b + 1]``, "thd": the first token of each sequence, if there
            are gaps between sequences. If both sides are "thd", pass both or neither.
        page_table: int32 ``[b, pages]``: k and v are pools ``[pages, page_size, heads_kv, d]``
            (in the order of the format of k and v; "bshd" if q is "thd"). Inference only.
        page_table_v: the page table of v, if it differs from that of k.
        origin: int64 ``[4]`` on q's device: batch, head, row and column of the larger problem at
            which this shard begins. It shifts masks, ALiBi and dropout. Or ``[b, 5]``: these
            numbers for each sequence, and what is added to column - row of its diagonal (CPU only).
        return_lse: also return LSE, the natural logarithm of the softmax's denominator: float32
            (float64 where q is float64) ``[b, heads_q, s_q]``, "thd" ``[tokens, heads_q]``; -inf
            for rows without keys.
        return_max_logit: also return each row's largest score, in the shape of LSE.
        deterministic: bitwise equal results for equal inputs. Default:
            ``torch.are_deterministic_algorithms_enabled()``.
        batch_invariant: the bits of a sequence's O and LSE depend neither on the other sequences of
            the batch nor on how its rows are divided among calls (chunked prefill, decoding). It
            costs speed: docs/semantics.md.
        engine: name of the engine; "": the first engine that accepts. See :func:`explain`.
        k_descale, v_descale: with q of 16 bits and k and v in float8_e4m3fn or float8_e5m2, a KV
            cache: float32 ``[1]`` or ``[heads_kv]`` on q's device, by which codes are multiplied.
            Default: 1. There are no gradients.
        max_ctas: on a GPU, at most so many thread blocks of an attention kernel at a time, which
            leaves room for kernels of other streams. Default, and 0: no limit.
        fp8: "current": q, k and v of 16 or 32 bits are cast to float8_e4m3fn inside, and the
            gradient of O to float8_e5m2, each under a scale from its largest magnitude (padding
            counts); O and the gradients have the type of q. Or an :class:`Fp8`: the scales of q, k
            and v in float8_e4m3fn or float8_e5m2, and the types of O and of the gradients. Default:
            FP8 tensors have scales of 1, O has the type of q, and there are no gradients.
        return_amax: with fp8, also return the largest magnitudes before scaling, float32 ``[6]``:
            those of S and O, and, once the backward pass has run, of dP, dQ, dK and dV.

    Returns:
        O in the shape of q with v's head dim; with return_lse, return_max_logit or return_amax a
        tuple of O and these. For "bhsd", O is contiguous in the order b, s, h, d.

    Raises:
        RuntimeError, ValueError: an argument is invalid (the text gives its name, the value seen
            and the value needed), or no engine accepts the problem (the text gives each engine's
            reason). No output has been written then. Invalid lengths and pages raise on the CPU; a
            GPU clamps them, and raises with TE_ATTENTION_CHECK=1 in the environment, where each
            call waits for the device.
        TypeError: an argument has a wrong type.
    """
    if unknown:
        refuse_unknown(unknown, attention)
    try:
        if _is_any_autocast_enabled() and torch.is_autocast_enabled(q.device.type):
            q, k, v = autocast(q, k, v)
            bias = _autocast_bias(bias, q)
        if scale is not None and type(scale) is not float:
            check_number("scale", scale)
        if (  # the minimal signature has a fast path: reading the other options takes longer
            (window is bias is sink is rng_state is generator is origin is fp8 is None)
            and (cu_seqlens_q is cu_seqlens_kv is max_seqlen_q is max_seqlen_kv is None)
            and (offsets_q is offsets_kv is page_table is page_table_v is None)
            and (k_descale is v_descale is max_ctas is None)
            and (alibi is batch_invariant is False and bias_type == "post_scale" and engine == "")
            and (dropout is NONE or (type(dropout) is float and dropout == 0))
            and (softcap is NONE or (type(softcap) is float and softcap == 0))
            and not (return_lse or return_max_logit or return_amax or deterministic or is_traced())
            and (_finish is _run and not (deterministic is None and _are_all_deterministic()))
        ):
            try:
                return run_minimal(q, k, v, format, mask, scale)
            except RuntimeError:  # to ask first would cost every call a microsecond
                if not _has_odd_dims(q, v):
                    raise
        dim, dim_v = q.size(-1), v.size(-1)
        if dim % MULTIPLE != 0 or dim_v % MULTIPLE != 0:
            scale = dim**-0.5 if scale is None else scale
            q, k, v = _padded(q), _padded(k), _padded(v)
        if type(softcap) is not float or type(dropout) is not float:
            check_number("softcap", softcap)
            check_number("dropout", dropout)
        check_slopes(alibi)
        bias = None if bias is None else _four_dimensional(bias)
        learnable = as_statistic(sink, q) if isinstance(sink, Tensor) else None
        differentiable = torch.is_grad_enabled() and (
            (q.requires_grad or k.requires_grad or v.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (learnable is not None and learnable.requires_grad)
        )
        left, right = NO_WINDOW if window is None else _bounds(window)
        # fmt: off
        arguments = (  # in the order of Arguments, whose construction takes a microsecond
            q, k, v, format,
            "none" if mask is None else mask,
            dropout > 0 or differentiable,
            scale,
            left, right,
            NONE if dropout == 0 else dropout,
            _random_state(q, rng_state, generator) if dropout else None,
            bias,
            learnable,
            _as_int32(cu_seqlens_q), _as_int32(cu_seqlens_kv),
            -1 if max_seqlen_q is None else max_seqlen_q,
            -1 if max_seqlen_kv is None else max_seqlen_kv,
            _as_int32(page_table),
            NONE if softcap == 0 else softcap,
            as_statistic(alibi, q) if isinstance(alibi, Tensor) else None,
            alibi is not False and _named("alibi", alibi, False, True, ", None or slopes"),
            _as_int32(offsets_q),
            _as_int32(offsets_kv),
            _as_int32(page_table_v),
            origin,
            bias_type != "post_scale" and _named("bias_type", bias_type, "post_scale", "pre_scale"),
            sink is not None and _named("sink", sink, None, "off_by_one", ", or a tensor"),
            return_max_logit,
            _are_all_deterministic() if deterministic is None else deterministic,
            batch_invariant, engine, k_descale, v_descale, -1 if max_ctas is None else max_ctas,
        )
        # fmt: on
        if page_table is not None:
            _check_pages(differentiable, dropout)
        if fp8 is not None or return_amax:
            _finish = _fp8.runner(q, fp8, return_amax, _finish is not _run)
        output = _finish(arguments, return_lse, return_max_logit)
        return output if q.size(-1) == dim and v.size(-1) == dim_v else _cut(output, dim_v, format)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if not torch.compiler.is_compiling():  # which does not support locals()
            raise_clearer(error, locals())
        raise


def _has_odd_dims(q: Tensor, v: Tensor) -> bool:
    return q.size(-1) % MULTIPLE != 0 or v.size(-1) % MULTIPLE != 0


def _padded(tensor: Tensor) -> Tensor:
    """With zeros up to the next multiple of 8 in the last dimension."""
    missing = -tensor.size(-1) % MULTIPLE
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _cut(output: Any, dim: int, form: str) -> Any:
    """O without the columns that padding added, in the memory order of an O that has none."""
    if isinstance(output, Arguments):  # of describe(): they are padded, as the operators need
        return output
    if isinstance(output, tuple):
        return (_cut(output[0], dim, form), *output[1:])
    if form.startswith("bhsd"):
        return output.transpose(1, 2)[..., :dim].contiguous().transpose(1, 2)
    return output[..., :dim].contiguous()


def _autocast_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """A bias in the other 16-bit type in q's type; float32 stays."""
    other = bias is not None and bias.dtype in HALVES and bias.dtype != q.dtype
    return bias.to(q.dtype) if other else bias


def _check_pages(differentiable: bool, dropout: float) -> None:
    if differentiable:
        raise ValueError(PAGES)
    if dropout > 0:
        raise ValueError(f"dropout is {dropout} with page_table; needs 0: pages are for inference")


def _as_int32(tensor: Tensor | None) -> Tensor | None:
    """Lengths or pages in the operators' type; other types than int64 are refused there."""
    if tensor is None or tensor.dtype is not torch.int64:
        return tensor
    if tensor.is_cpu:  # the check of values there must not be passed by the low half of one
        tensor = tensor.clamp(_INT32.min, _INT32.max)
    return tensor.to(torch.int32)


def _four_dimensional(bias: Tensor) -> Tensor:
    """The bias with leading dimensions of 1, so that it has four."""
    refuse_causal_bias(bias)
    missing = BIAS_DIMENSIONS - bias.dim()
    return bias[(None,) * missing] if missing > 0 else bias


def _named(name: str, value: object, no: object, yes: object, other: str = "") -> bool:
    """Whether `value` is `yes`; False for `no`, None and tensors; raises for other values."""
    if value is None or isinstance(value, Tensor) or value == no:
        return False
    if value == yes:
        return True
    raise ValueError(f"{name} is {value!r}; needs {no!r} or {yes!r}{other}")


def _bounds(window: Window) -> tuple[int, int]:
    try:
        left, right = (-1 if bound is None else bound for bound in window)
    except (TypeError, ValueError) as error:
        raise TypeError(f"window is {text_of(window)}; needs {WINDOW}") from error
    if not (-1 <= left <= MAX_WINDOW and -1 <= right <= MAX_WINDOW):
        raise ValueError(f"window is {window}; needs {WINDOW}")
    return left, right


def autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's type. float64, FP8 and integer tensors are not cast."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [t.to(dtype) if t.dtype in AUTOCAST else t for t in tensors]


def _random_state(q: Tensor, given: Tensor | None, generator: torch.Generator | None) -> Tensor:
    if given is None:
        return new_rng_state(q.device, generator)
    if generator is not None:
        raise ValueError("generator is given with rng_state; needs one of the two")
    return given


def new_rng_state(device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
    """An int64 [2] {seed, offset} on `device`, drawn from `generator` or the default one.

    torch.randint draws it, so that each replay of a CUDA graph draws new values and an activation
    checkpoint draws the same values again.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)


def explain(q: Tensor, k: Tensor, v: Tensor, **options) -> str:
    """Text that names the engine for attention(q, k, v, **options) and the others' reasons.

    The first line is the problem in the form that `te-attn check` and bug reports take. Draws no
    random numbers. Raises as attention() does if an argument is invalid.
    """
    if q.device.type not in ("cpu", "cuda"):
        raise RuntimeError(
            f"q is on {q.device}; needs the CPU or a CUDA device, to ask its engines"
        )
    if options.pop("generator", None) is not None or options.get("rng_state") is None:
        options["rng_state"] = torch.empty(2, dtype=torch.int64, device=q.device)
    fp8 = options.pop("fp8", None)
    if fp8 is not None:
        options.pop("return_amax", None)
    try:
        arguments = describe(q, k, v, **options)
        if fp8 is not None:
            return _fp8.explain(fp8, arguments)
        return OPS.explain.default(*trimmed(arguments))
    except RuntimeError as error:
        every = {p.name: p.default for p in attention.__signature__.parameters.values()}
        raise_clearer(error, every | {"q": q, "k": k, "v": v} | options)
        raise


def describe(q: Tensor, k: Tensor, v: Tensor, **options) -> Arguments:
    """The options of attention() in the form that the operators take.

    attention() itself converts them, because passing thirty keywords to a helper would cost time in
    every call.
    """
    return attention(q, k, v, **options, _finish=lambda arguments, *_: Arguments(*arguments))


def dropout_mask(
    rng_state: Tensor,
    dropout: float,
    shape: tuple[int, int, int, int],
    *,
    origin: Tensor | None = None,
) -> Tensor:
    """The probabilities that attention() keeps: bool [batch, heads, rows, columns].

    Args:
        rng_state: int64 [2] {seed, offset}; the mask is made on its device.
        dropout: the probability of dropping.
        shape: batch, heads_q, rows and columns.
        origin: as in attention().
    """
    if len(shape) != BIAS_DIMENSIONS:
        raise ValueError(f"shape is {tuple(shape)}; needs batch, heads_q, rows and columns")
    return OPS.dropout_mask.default(rng_state, dropout, *shape, origin)
