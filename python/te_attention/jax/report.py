"""Which engine runs a call, and what it costs."""

import ctypes
from typing import Any, NamedTuple

import jax
import numpy as np

from te_attention import _library as core
from te_attention.jax import _call, _library
from te_attention.jax._arguments import refuse
from te_attention.jax.functional import DEFAULTS, NOT_OF_PROBLEM, Prepared, prepare

ERROR = 4096  # bytes of a text


class Cost(NamedTuple):
    """Exact counts of one execution; a multiply and an add are two operations."""

    visible: int  # (row, column) pairs that the masks allow, over batch and heads of query
    forward_flops: int
    backward_flops: int
    forward_bytes: int  # every input element read once, every output element written once
    backward_bytes: int


class _Cost(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in Cost._fields),
    )


def _prepare(query: Any, key: Any, value: Any, options: dict) -> Prepared:
    for name in NOT_OF_PROBLEM:
        options.pop(name, None)
    options = DEFAULTS | options
    static = {name: x for name, x in options.items() if not hasattr(x, "shape")}
    arrays = {name: x for name, x in options.items() if name not in static}
    found = []

    def trace(q: Any, k: Any, v: Any, more: dict) -> dict:
        found.append(prepare(q, k, v, **static, **more))
        return found[0].arrays

    shapes = jax.eval_shape(trace, query, key, value, arrays)
    return found[0]._replace(arrays=shapes)


def explain(query: Any, key: Any, value: Any, *, device: int | None = None, **options: Any) -> str:
    """Which engine would run attention(query, key, value, **options), and why the others would not.

    The first line is the problem, as `te-attn check` and bug reports take it. Reads shapes and
    types alone: arrays may be ``jax.ShapeDtypeStruct``.

    Args:
        query, key, value, options: as in :func:`attention`.
        device: index of a GPU, or -1 for the CPU. Default: JAX's default backend.
    """
    given = _prepare(query, key, value, options)
    needs = _call.describe(_call.request(given.options, given.arrays, training=True, lse=True))
    if device is None:
        device = core.HOST if jax.default_backend() == "cpu" else 0
    engines = core.explain(needs.problem, device)
    engine = given.options.engine
    if engine and f"\n{engine}:" not in f"\n{engines}":
        raise refuse("engine", repr(engine), f"one of those that explain:\n{engines}")
    return f"{needs.problem}\n{engines}"


def cost(query: Any, key: Any, value: Any, **options: Any) -> Cost:
    """Operations and bytes of attention(query, key, value, **options), forward and backward.

    XLA's own analysis cannot see into a custom call. Lengths and segment ids must be concrete
    arrays.

    Args:
        query, key, value, options: as in :func:`attention`; arrays may be ``jax.ShapeDtypeStruct``.
    """
    given = _prepare(query, key, value, dict(options))
    lengths = {}
    if any(name in given.arrays for name in ("cu_seqlens_q", "cu_seqlens_kv")):
        concrete = prepare(query, key, value, **(DEFAULTS | options)).arrays
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            if name in concrete:
                lengths[name] = np.ascontiguousarray(concrete[name], np.int32)
    text = _call.request(given.options, given.arrays, training=True, lse=True)
    pointers = [
        lengths[name].ctypes.data_as(ctypes.c_void_p) if name in lengths else None
        for name in ("cu_seqlens_q", "cu_seqlens_kv")
    ]
    out, error = _Cost(ctypes.sizeof(_Cost)), ctypes.create_string_buffer(ERROR)
    library = _library.library()
    if library.te_attention_jax_cost(
        text.encode(), *pointers, ctypes.byref(out), error, ctypes.c_size_t(ERROR)
    ):
        raise ValueError(_call.translated(error.value.decode()))
    return Cost(*(getattr(out, name) for name in Cost._fields))
