"""What is said of an argument of a wrong type. Asked only where something has failed."""

import numbers

import torch
from torch import Tensor

_NUMBER = (numbers.Real, Tensor, torch.SymInt, torch.SymFloat)
_INTEGER = (numbers.Integral, Tensor, torch.SymInt)
_BOUND = (*_INTEGER, type(None))
_MASK = "None, 'causal', 'causal_bottom_right' or 'bottom_right'"
WINDOW = "(left, right), each None or an integer, at least 0"
_TENSORS = (
    *("bias", "rng_state", "cu_seqlens_q", "cu_seqlens_kv", "offsets_q", "offsets_kv"),
    *("page_table", "page_table_v", "origin"),
)
_WANTED = {
    **dict.fromkeys(("q", "k", "v"), (Tensor, "a tensor")),
    **dict.fromkeys(_TENSORS, ((Tensor, type(None)), "a tensor or None")),
    "mask": ((str, type(None)), _MASK),
    **dict.fromkeys(("format", "engine"), (str, "a name")),
    **dict.fromkeys(("softcap", "dropout"), (_NUMBER, "a number")),
    "scale": ((*_NUMBER, type(None)), "a number or None"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), (_BOUND, "an integer or None")),
    "generator": ((torch.Generator, type(None)), "a torch.Generator or None"),
    "deterministic": ((bool, type(None)), "True, False or None"),
}


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) < 50 and "\n" not in text else f"of type {type(value).__name__}"


def _check_window(window: object) -> None:
    fits = isinstance(window, tuple | list) and len(window) == 2
    if window is not None and not (fits and all(isinstance(w, _BOUND) for w in window)):
        raise TypeError(f"window is {_text(window)}; needs {WINDOW}") from None


def check_types(**arguments: object) -> None:
    """Raises for the first of attention()'s arguments that has a wrong type."""
    for name, value in arguments.items():
        if name == "window":
            _check_window(value)
            continue
        types, needed = _WANTED[name]
        if isinstance(value, types):
            continue
        if name == "mask" and isinstance(value, Tensor):
            needed += "; give a tensor as bias, a boolean one as torch.where(mask, 0.0, -torch.inf)"
        raise TypeError(f"{name} is {_text(value)}; needs {needed}") from None
