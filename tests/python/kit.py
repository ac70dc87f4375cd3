"""The kit of tests/kit from Python: a case's hostile inputs as tensors, checked by its oracle."""

import ctypes
import os
from pathlib import Path

import torch

DTYPES = (
    *(torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
NAMES = (
    *("Q", "K", "V", "O", "LSE", "MAX", "SUM_EXP", "BIAS", "SINK", "SLOPES"),
    *("CU_SEQLENS_Q", "CU_SEQLENS_KV", "OFFSETS_Q", "OFFSETS_KV", "TABLE_K", "TABLE_V"),
    *("RNG_STATE", "DOUT", "DQ", "DK", "DV", "DBIAS", "DSINK", "DLSE"),
    *("Q_SCALE_INV", "K_SCALE_INV", "V_SCALE_INV", "S_SCALE", "S_SCALE_INV", "S_AMAX"),
    *("O_SCALE", "O_SCALE_INV", "O_AMAX", "DOUT_SCALE_INV", "DP_SCALE", "DP_SCALE_INV"),
    *("DP_AMAX", "DQ_SCALE", "DK_SCALE", "DV_SCALE", "DQ_AMAX", "DK_AMAX", "DV_AMAX"),
)
CAPACITY = 1 << 16


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("used", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        ("batch", ctypes.c_int64),
        ("max_q", ctypes.c_int64),
        ("max_kv", ctypes.c_int64),
        ("origin", ctypes.c_int64 * 4),
    )


def _library() -> ctypes.CDLL:
    out = ctypes.CDLL(str(Path(os.environ["TE_ATTENTION_KIT"])))
    out.kit_error.restype = ctypes.c_char_p
    return out


KIT = _library()


def _require(status: int) -> None:
    if status:
        raise RuntimeError(KIT.kit_error().decode())


def _text(function, *arguments) -> str:
    buffer = ctypes.create_string_buffer(CAPACITY)
    _require(function(*arguments, buffer, ctypes.c_size_t(CAPACITY)))
    return buffer.value.decode()


def draw(seed: int) -> str:
    """A random case as a line of text."""
    return _text(KIT.kit_draw, ctypes.c_uint64(seed))


class Case:
    """One case in memory. `fields`: its problem, with every stride, and the sizes of the run."""

    def __init__(self, line: str) -> None:
        self.line = line
        self._handle = ctypes.c_void_p()
        _require(KIT.kit_open(line.encode(), ctypes.byref(self._handle)))
        words = _text(KIT.kit_problem, self._handle).split()
        self.fields = dict(word.split("=") for word in words)
        sizes = _Sizes()
        KIT.kit_sizes_of(self._handle, ctypes.byref(sizes))
        self.batch, self.max_q, self.max_kv = sizes.batch, sizes.max_q, sizes.max_kv
        self.origin = list(sizes.origin)

    def __enter__(self) -> "Case":
        return self

    def __exit__(self, *_) -> None:
        KIT.kit_close(self._handle)

    def field(self, name: str, default: str = "0") -> str:
        return self.fields.get(name, default)

    def form(self, side: str) -> str:
        return self.field(f"{side}_form", "dense")

    def fill(self, large: bool) -> None:
        """Fills outputs, and memory that must not be read, with NaN or 1e30."""
        KIT.kit_fill(self._handle, int(large))

    def damage(self, backward: bool) -> str:
        return _text(KIT.kit_damage, self._handle, int(backward))

    def compare(self, engine: str) -> str:
        return _text(KIT.kit_compare, self._handle, engine.encode())

    def __getitem__(self, name: str) -> torch.Tensor | None:
        """A view of the case's own memory in the order of the C API; None: the case has none."""
        raw = _Tensor()
        KIT.kit_tensor_of(self._handle, NAMES.index(name), ctypes.byref(raw))
        if not raw.used:
            return None
        dtype = torch.int64 if name == "RNG_STATE" else DTYPES[raw.dtype]
        shape, stride = list(raw.shape), list(raw.stride)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if 0 in shape:
            view = torch.empty(shape, dtype=dtype)
        else:
            memory = (ctypes.c_uint8 * (span * dtype.itemsize)).from_address(raw.data)
            view = torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)
        return self._shaped(name, view)

    def _shaped(self, name: str, view: torch.Tensor) -> torch.Tensor:
        if name in ("BIAS", "DBIAS"):
            return view
        rows_q = name in ("Q", "O", "DOUT", "DQ")
        rows_kv = name in ("K", "V", "DK", "DV")
        if rows_q or rows_kv:
            ragged = self.form("q" if rows_q else "kv") == "ragged"
            return view[0] if ragged else view
        if name in ("LSE", "MAX", "SUM_EXP", "DLSE"):
            view = view[..., 0]
            return view[0] if self.form("q") == "ragged" else view.transpose(1, 2)
        return view.flatten()
