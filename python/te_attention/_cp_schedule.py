"""The schedule of context parallelism, for every front end: tea_cp_schedule() through ctypes."""

import ctypes
from functools import lru_cache

from te_attention import _library as core


class _Shape(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *(
            (name, ctypes.c_int32)
            for name in ("world", "rank", "inner", "strategy", "sharding", "positions")
        ),
        *((name, ctypes.c_int32) for name in ("causal", "bottom_right", "reserved")),
        *((n, ctypes.c_int64) for n in ("window_left", "window_right", "seqlen_q", "seqlen_kv")),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("step", "source", "masked", "launch")),
        *((n, ctypes.c_int64) for n in ("q_begin", "q_count", "kv_begin", "kv_count")),
        *((n, ctypes.c_int64) for n in ("origin_row", "origin_col", "shift", "visible")),
    )


class _Move(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("step", "sender", "receiver", "owner")),
        *((n, ctypes.c_int64) for n in ("begin", "count")),
    )


@lru_cache(maxsize=4096)
def schedule(**fields: int) -> tuple[tuple[_Part, ...], tuple[_Move, ...]]:
    """tea_cp_schedule() of the fields of tea_cp_shape."""
    shape = _Shape(struct_size=ctypes.sizeof(_Shape), **fields)
    counts = [ctypes.c_size_t(0), ctypes.c_size_t(0)]
    call = core.library().tea_cp_schedule

    def run(parts: object, moves: object) -> None:
        by_reference = [ctypes.byref(count) for count in counts]
        core.require(call(ctypes.byref(shape), parts, by_reference[0], moves, by_reference[1]))

    run(None, None)
    parts, moves = (_Part * counts[0].value)(), (_Move * counts[1].value)()
    run(parts, moves)
    return tuple(parts), tuple(moves)
