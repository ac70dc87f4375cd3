"""Fake implementations for torch.compile and export: shape, strides and dtype of each result."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from te_attention.torch._arguments import FORMATS, NUM_INPUTS, Arguments, formats_of
from te_attention.torch._library import LIBRARY, OPS
from te_attention.torch._types import FP8, HALVES, statistic_dtype


def _check_devices(names: list[str], values: tuple, options: dict) -> None:
    """Refuses tensors on two devices, as the kernels do.

    PyTorch calls the fake in eager code too, as soon as one argument is on the meta device. Where
    another argument determines the device of the results, they would stay uninitialised.
    """
    first = None
    for name, value in (*zip(names, values, strict=False), *options.items()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            first = first or (name, tensor.device)
            if tensor.device != first[1]:
                raise RuntimeError(f"{name} is on {tensor.device}; needs {first[1]} as {first[0]}")


def _register(name: str, function: Callable) -> None:
    arguments = getattr(OPS, name).default._schema.arguments
    names = ["alibi" if a.name == "slopes" else a.name for a in arguments]

    @wraps(function)
    def checked(*values, **options):
        _check_devices(names, values, options)
        return function(*values, **options)

    torch.library.register_fake(f"te_attention::{name}", checked, lib=LIBRARY)


def _fake(function):
    _register(function.__name__.lstrip("_"), function)
    return function


def _empty(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


def _per_row(q: Tensor, form: str) -> Tensor:
    batch, row, head = FORMATS[form]
    shape = (q.shape[row], q.shape[head])
    if batch is not None:
        shape = (q.shape[batch], q.shape[head], q.shape[row])
    return q.new_empty(shape, dtype=statistic_dtype(q))


def _text(value: object) -> str:
    return str(list(value) if isinstance(value, torch.Size) else value).removeprefix("torch.")


def _check(a: Arguments) -> None:
    """Refuses the arguments that the operators refuse, as far as types and shapes determine it."""
    forms = formats_of(a)
    for form in forms:
        if form not in FORMATS:
            raise RuntimeError(
                f"format is {a.format!r}; needs bhsd, bshd, sbhd, thd or two of them"
            )
    if not a.q.dtype.is_floating_point:
        needed = "float16, bfloat16, float32 or float64"
        raise RuntimeError(f"q.dtype is {_text(a.q.dtype)}; needs {needed}")
    for name, tensor, form in zip(
        "qkv", a[:NUM_INPUTS], (forms[0], forms[1], forms[1]), strict=True
    ):
        is_cache = name != "q" and a.q.dtype in HALVES and tensor.dtype in FP8
        if tensor.dtype != (a.k.dtype if is_cache else a.q.dtype):
            raise RuntimeError(
                f"{name}.dtype is {_text(tensor.dtype)}; needs {_text(a.q.dtype)} as q"
            )
        rank = 3 if FORMATS[form][0] is None else 4
        if tensor.dim() != rank:
            shape = _text(tensor.shape)
            raise RuntimeError(
                f"{name} is of shape {shape}; needs {rank} dimensions for format {a.format}"
            )
    _check_sizes(a, *forms)


def _check_sizes(a: Arguments, form_q: str, form_kv: str) -> None:
    q, k, v = (t.shape for t in a[:NUM_INPUTS])
    batch_q, _, head_q = FORMATS[form_q]
    batch_kv, row_kv, head_kv = FORMATS[form_kv]
    if batch_q is not None and batch_kv is not None and a.page_table is None:
        torch._check(
            k[batch_kv] == q[batch_q],
            lambda: f"k is of shape {_text(k)}; needs a batch of {q[batch_q]}",
        )
    torch._check(
        k[-1] == q[-1], lambda: f"k is of shape {_text(k)}; needs the head dim of q {_text(q)}"
    )
    for dim in (head_kv, row_kv):
        torch._check(
            v[dim] == k[dim],
            lambda: f"v is of shape {_text(v)}; needs the heads and rows of k {_text(k)}",
        )
    torch._check(k[head_kv] > 0, lambda: f"k is of shape {_text(k)} with 0 heads; needs some")
    torch._check(
        q[head_q] % k[head_kv] == 0,
        lambda: (
            f"k is of shape {_text(k)} with {k[head_kv]} heads; needs a number of heads that "
            f"divides the {q[head_q]} of q"
        ),
    )
    for name, dim in (("dim_qk", q[-1]), ("dim_v", v[-1])):
        torch._check(
            dim % 8 == 0,  # bound now, because the text is built after the loop
            lambda name=name, dim=dim: f"{name} is {dim}; needs a multiple of 8",
        )


def _forward(*arguments):
    a = Arguments(*arguments)
    _check(a)
    form, _ = formats_of(a)
    dim = a.v.shape[-1]
    if form == "bhsd":  # stored as [b, s, h, d]
        b, h, s, _ = a.q.shape
        o = a.q.new_empty((b, s, h, dim)).transpose(1, 2)
    else:
        o = a.q.new_empty((*a.q.shape[:-1], dim))
    return o, _per_row(a.q, form), _per_row(a.q, form) if a.max_logit else _empty(a.q)


for _name in ("attention", "forward"):
    _register(_name, _forward)


@_fake
def _forward_minimal(*arguments):
    return _forward(*arguments)[:2]


@_fake
def _inference(*arguments):
    return _forward(*arguments)[0]


@_fake
def _inference_plain(q, k, v, causal=False):  # noqa: ARG001
    return _inference(q, k, v)


def _small_gradients(wants_dbias: bool, wants_dsink: bool, a: Arguments) -> tuple[Tensor, Tensor]:
    bias, sink = a.bias if wants_dbias else None, a.sink if wants_dsink else None
    dbias = _empty(a.q) if bias is None else bias.new_empty(bias.shape)
    dsink = _empty(a.q) if sink is None else sink.new_empty(sink.shape)
    return dbias, dsink


@_fake
def _backward(dout, dlse, o, lse, wants_dbias, wants_dsink, *arguments):  # noqa: ARG001
    a = Arguments(*arguments)
    gradients = [torch.empty_like(t) for t in (a.q, a.k, a.v)]
    return (*gradients, *_small_gradients(wants_dbias, wants_dsink, a))


@_fake
def _backward_minimal(dout, o, lse, q, k, v, *_options):  # noqa: ARG001
    return tuple(torch.empty_like(t) for t in (q, k, v))


@_fake
def _backward_out(dq, dk, dv, dout, dlse, o, lse, dbias, dsink, *arguments):  # noqa: ARG001
    return _small_gradients(dbias, dsink, Arguments(*arguments))


FP8_FORWARD, FP8_BACKWARD = 7, 13  # arguments of the FP8 operators before the common ones


@_fake
def _fp8_forward(*arguments):
    o, lse, max_logit = _forward(*arguments[FP8_FORWARD:])
    amax = lse.new_empty((2,))
    return (
        torch.empty_like(o, dtype=getattr(torch, arguments[FP8_FORWARD - 1])),
        lse,
        max_logit,
        amax,
    )


@_fake
def _fp8_backward(dout, dlse, o, lse, wants_dbias, wants_dsink, *arguments):  # noqa: ARG001
    a = Arguments(*arguments[FP8_BACKWARD:])
    dtype = getattr(torch, arguments[FP8_BACKWARD - 1])
    gradients = [t.new_empty(t.shape, dtype=dtype) for t in (a.q, a.k, a.v)]
    return (*gradients, *_small_gradients(wants_dbias, wants_dsink, a), lse.new_empty((4,)))


@_fake
def _fp8_forward_amax(s_amax, o_amax, *arguments):  # noqa: ARG001
    return _fp8_forward(*arguments)[:3]


# dq, dk, dv, dp_amax, dqkv_amax, dout, dlse, o, lse; then the two flags and the scales.
_BEFORE_FLAGS = 9


@_fake
def _fp8_backward_out(*arguments):
    wants, first = arguments[_BEFORE_FLAGS : _BEFORE_FLAGS + 2], _BEFORE_FLAGS + 1 + FP8_BACKWARD
    return _small_gradients(*wants, Arguments(*arguments[first:]))


# The arguments of the operators with casts before the common ones; that of the place of O's scale.
FP8_ATTENTION_FORWARD, FP8_ATTENTION_BACKWARD, PLACE_OF_O = 10, 14, 6
_PLACE, _NUMBERS, _MAXIMA = 256, 20, 2048  # of memory for several arrays, in bytes


@_fake
def _fp8_attention_forward(*arguments):
    q, k, v = arguments[FP8_ATTENTION_FORWARD : FP8_ATTENTION_FORWARD + 3]
    rows = q.numel() // q.shape[-1]
    of_o = 0 if arguments[PLACE_OF_O] < 0 else rows * v.shape[-1]
    parts = (_NUMBERS, _MAXIMA, q.numel(), k.numel(), v.numel(), of_o, 4 * rows)
    places = sum((n + _PLACE - 1) // _PLACE * _PLACE for n in parts)
    o = q.new_empty((*q.shape[:-2], q.shape[-2] * v.shape[-1]))
    return o, q.new_empty((places,), dtype=torch.uint8)


@_fake
def _fp8_attention_forward_minimal(*arguments):
    return _fp8_attention_forward(*arguments)


@_fake
def _fp8_attention_backward(*arguments):
    qkv = arguments[FP8_ATTENTION_BACKWARD : FP8_ATTENTION_BACKWARD + 3]
    return tuple(t.new_empty(t.shape) for t in qkv)


@_fake
def _fp8_attention_backward_minimal(*arguments):
    return _fp8_attention_backward(*arguments)


@_fake
def _thd_to_bshd(thd, cu_seqlens, offsets, max_seqlen):  # noqa: ARG001
    return thd.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *thd.shape[1:]))


@_fake
def _bshd_to_thd(bshd, cu_seqlens, offsets, tokens):  # noqa: ARG001
    return bshd.new_empty((tokens, *bshd.shape[2:]))


@_fake
def _cu_seqlens_from_lengths(lengths):
    return lengths.new_empty((lengths.shape[0] + 1,))


@_fake
def _cu_seqlens_from_mask(mask, marks_tokens=True):  # noqa: ARG001
    return mask.new_empty((mask.shape[0] + 1,), dtype=torch.int32)


@_fake
def _dropout_mask(rng_state, dropout, batch, heads, rows, cols, origin=None):  # noqa: ARG001
    return rng_state.new_empty((batch, heads, rows, cols), dtype=torch.bool)


@_fake
def _part_forward(o, lse, max_logit, accumulate, *arguments):  # noqa: ARG001
    return not accumulate


@_fake
def _part_backward(dq, dk, dv, dout, dlse, o, lse, dbias, dsink, adds, *arguments):  # noqa: ARG001
    return *_small_gradients(dbias, dsink, Arguments(*arguments)), not adds


@_fake
def _fp8_part_forward(*_arguments):
    return None


@_fake
def _fp8_part_backward(dq, dk, dv, dout, dlse, o, lse, dbias, dsink, *arguments):  # noqa: ARG001
    return _small_gradients(dbias, dsink, Arguments(*arguments[FP8_BACKWARD - 1 :]))


@_fake
def _merge_into(o, lse, part_o, part_lse):  # noqa: ARG001
    return None


@_fake
def _round_o(o, sums, lse):  # noqa: ARG001
    return None


@_fake
def _merge(o, lse):
    return o[0].new_empty(o[0].shape), lse[0].new_empty(lse[0].shape)


@_fake
def _cp_read_half(tensor, cu_seqlens, second, slabs=False):  # noqa: ARG001
    shape = list(tensor.shape)
    shape[int(slabs)] //= 2
    return tensor.new_empty(shape)


@_fake
def _cp_lse_read(lse, cu_seqlens, packed, half_len):  # noqa: ARG001
    return lse.new_empty((*lse.shape[:-1], half_len))


@_fake
def _cp_partition_indices(cu_seqlens, tokens, world_size, rank):  # noqa: ARG001
    return cu_seqlens.new_empty((tokens // world_size,))


@_fake
def _cp_to_rank_order(tensor, cu_seqlens, world_size):  # noqa: ARG001
    return tensor.new_empty(tensor.shape)


@_fake
def _cp_to_sequence_order(tensor, cu_seqlens, world_size):  # noqa: ARG001
    return tensor.new_empty(tensor.shape)


@_fake
def _scaled_softmax_forward(tensor, mask, scale, kind):  # noqa: ARG001
    return tensor.new_empty(tensor.shape)


@_fake
def _scaled_softmax_backward(dout, output, scale, kind):  # noqa: ARG001
    return output.new_empty(output.shape)


@_fake
def _flash_prepare_forward(qkv):
    s, b, h, d = qkv.shape
    return qkv.new_empty((3, b, s, h, d // 3))


@_fake
def _flash_prepare_backward(dq, dk, dv):  # noqa: ARG001
    b, s, h, d = dq.shape
    return dq.new_empty((s, b, h, 3 * d))


def _scalar(like: Tensor) -> Tensor:
    return like.new_empty((1,), dtype=torch.float32)


def _cast(tensor: Tensor, dtype: str) -> Tensor:
    return torch.empty_like(tensor, dtype=getattr(torch, dtype))


@_fake
def _fp8_quantize(tensor, scale, amax, dtype):  # noqa: ARG001
    return _cast(tensor, dtype), _scalar(tensor)


@_fake
def _fp8_quantize_joint(tensors, scale, amax, dtype):  # noqa: ARG001
    return [_cast(t, dtype) for t in tensors], _scalar(tensors[0])


@_fake
def _fp8_quantize_current(tensor, dtype, power_of_two=False, amax_floor=0.0):  # noqa: ARG001
    return _cast(tensor, dtype), _scalar(tensor), _scalar(tensor), _scalar(tensor)


@_fake
def _fp8_quantize_joint_current(tensors, dtype, power_of_two=False, amax_floor=0.0):  # noqa: ARG001
    return [_cast(t, dtype) for t in tensors], *(_scalar(tensors[0]) for _ in range(3))


@_fake
def _fp8_scale(amax, dtype, power_of_two=False, amax_floor=0.0):  # noqa: ARG001
    return _scalar(amax), _scalar(amax)


@_fake
def _fp8_dequantize(tensor, scale_inv, dtype):  # noqa: ARG001
    return _cast(tensor, dtype)


def _writes_in_place(*arguments, **options):  # noqa: ARG001
    return None


for _name in (
    "backward_minimal_out",
    "kv_cache_append",
    "rng_fill",
    "rng_fill_captured",
    "rng_advance",
    "cp_lse_correct",
    "cp_out_correct",
    "cp_grad_correct",
    "cp_copy_valid",
    "fp8_update_scales",
    "amax",
    "fill",
    "fill_bytes",
):
    _register(_name, _writes_in_place)
