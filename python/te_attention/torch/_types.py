"""Errors for arguments of a wrong type. These checks run only after a call has failed."""

import numbers

import torch
from torch import Tensor

_NUMBER = (numbers.Real, Tensor, torch.SymInt, torch.SymFloat)
_INTEGER = (numbers.Integral, Tensor, torch.SymInt)
_BOUND = (*_INTEGER, type(None))
_MASK = "None, 'causal', 'causal_bottom_right' or 'bottom_right'"
MASK_HINT = "; give a tensor as bias, a boolean one as torch.where(mask, 0.0, -torch.inf)"
WINDOW = "(left, right), each None or an integer, at least 0 and at most 2**62"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_TENSORS = (
    *("bias", "rng_state", "cu_seqlens_q", "cu_seqlens_kv", "offsets_q", "offsets_kv"),
    *("page_table", "page_table_v", "origin", "k_descale", "v_descale"),
)
_WANTED = {
    **dict.fromkeys(("q", "k", "v"), (Tensor, "a tensor")),
    **dict.fromkeys(_TENSORS, ((Tensor, type(None)), "a tensor or None")),
    "mask": ((str, type(None)), _MASK),
    **dict.fromkeys(("format", "engine"), (str, "a name")),
    **dict.fromkeys(("softcap", "dropout"), (_NUMBER, "a number")),
    "scale": ((*_NUMBER, type(None)), "a number or None"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "max_ctas"), (_BOUND, "an integer or None")),
    "generator": ((torch.Generator, type(None)), "a torch.Generator or None"),
    "deterministic": ((bool, type(None)), "True, False or None"),
    "batch_invariant": (bool, "True or False"),
}


def statistic_dtype(q: Tensor) -> torch.dtype:
    """The type of LSE, sinks and slopes next to q."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def as_statistic(tensor: Tensor, q: Tensor) -> Tensor:
    """A sink or slopes in the type that they have next to q; the operators refuse integers."""
    dtype = statistic_dtype(q)
    return tensor.to(dtype) if tensor.dtype is not dtype and tensor.dtype in FLOATS else tensor


def text_of(value: object) -> str:
    """The value in the form in which an error text shows it."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) < 50 and "\n" not in text else f"of type {type(value).__name__}"


def _is_window(value: object) -> bool:
    """Whether `value` is a valid window argument of attention()."""
    try:
        left, right = (None, None) if value is None else value
    except (TypeError, ValueError):
        return False
    return isinstance(left, _BOUND) and isinstance(right, _BOUND)


def check_number(name: str, value: object) -> None:
    """Raises if `value` is a tensor with a lost gradient or a read that would synchronise."""
    if not isinstance(value, Tensor):
        return
    if value.requires_grad and torch.is_grad_enabled():
        hint = ": multiply q by it and pass 1" if name == "scale" else ""
        raise ValueError(f"{name} requires a gradient; needs a number without one{hint}")
    if value.device.type != "cpu":
        raise ValueError(
            f"{name} is a tensor on {value.device}; needs a number: to read it is to wait for it"
        )
    if value.numel() != 1:
        raise ValueError(f"{name} is a tensor of shape {list(value.shape)}; needs a number")


def check_slopes(alibi: object) -> None:
    """Raises if the slopes require a gradient, which attention does not compute."""
    if isinstance(alibi, Tensor) and alibi.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "alibi requires a gradient; needs slopes without one: attention has none for them "
            "(learnable ones are a bias of slope * (column - row))"
        )


def refuse_causal_bias(bias: object) -> None:
    """Raises for PyTorch's causal biases, whose memory holds no values."""
    if type(bias) in (Tensor, torch.nn.Parameter):
        return
    # Imported here, because the module imports torch._dynamo, which takes most of a second.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if isinstance(bias, CausalBias):
        word = "causal" if bias.variant == CausalVariant.UPPER_LEFT else "causal_bottom_right"
        raise TypeError(f"bias is a CausalBias; needs numbers: use mask={word!r}")


def check_fp8(q: Tensor, fp8: object) -> None:
    """Raises if the fields of `fp8` are not those of Fp8, or if q is not an FP8 tensor."""
    fields = getattr(fp8, "_fields", ())
    if "o_dtype" not in fields:
        raise TypeError(f"fp8 is {text_of(fp8)}; needs an Fp8, 'current' or None")
    for name, value in zip(fields, fp8, strict=True):
        if name.endswith("dtype"):
            if not isinstance(value, torch.dtype):
                raise TypeError(f"fp8.{name} is {text_of(value)}; needs a torch.dtype")
        elif not isinstance(value, (Tensor, type(None))):
            raise TypeError(f"fp8.{name} is {text_of(value)}; needs a tensor or None")
    if q.dtype not in FP8:
        dtype = str(q.dtype).removeprefix("torch.")
        raise ValueError(f"q.dtype is {dtype}; needs float8_e4m3fn or float8_e5m2 with fp8")


def check_types(arguments: dict[str, object]) -> None:
    """Raises for the first argument of attention() that has a wrong type."""
    if not _is_window(arguments["window"]):
        raise TypeError(f"window is {text_of(arguments['window'])}; needs {WINDOW}")
    for name, (types, needed) in _WANTED.items():
        value = arguments[name]
        if isinstance(value, types):
            if type(value) is int and not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} is {value}; needs an integer of 64 bits")
            continue
        hint = MASK_HINT if name == "mask" and isinstance(value, Tensor) else ""
        raise TypeError(f"{name} is {text_of(value)}; needs {needed}{hint}")
