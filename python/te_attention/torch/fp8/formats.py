"""The FP8 formats by the names of PyTorch, of the operators and of TransformerEngine's enum.

Objects of NVIDIA's package are accepted as they are, so nothing here or in the other files of this
folder asks for a class: an FP8 tensor is an object with `_data`, `_scale_inv` and `_fp8_dtype`, a
quantizer one with `scale`, `amax` and `dtype`.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

# TransformerEngine's enum of element types, with its values.
DType = IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    module=__name__,
)


class Fp8Format(NamedTuple):
    """One of the two formats; `name` is that of the operators."""

    name: str
    torch: torch.dtype
    largest: float


E4M3 = Fp8Format("float8_e4m3fn", torch.float8_e4m3fn, 448.0)
E5M2 = Fp8Format("float8_e5m2", torch.float8_e5m2, 57344.0)
_FORMATS = {int(DType.kFloat8E4M3): E4M3, int(DType.kFloat8E5M2): E5M2}


def format_of(dtype: object) -> Fp8Format:
    """The format of an FP8 member of DType, or of the enum of NVIDIA's package.

    Raises ValueError for any other value.
    """
    found = _FORMATS.get(int(dtype))
    if found is None:
        raise ValueError(f"fp8_dtype is {dtype!r}; needs kFloat8E4M3 or kFloat8E5M2")
    return found


def is_fp8_tensor(value: object) -> bool:
    """Whether it holds FP8 data with one scale, of whichever class."""
    return hasattr(value, "_fp8_dtype") and hasattr(value, "_scale_inv") and hasattr(value, "_data")


def is_current(quantizer: object) -> bool:
    """Whether a quantizer takes the scale from the tensor itself (current scaling)."""
    return hasattr(quantizer, "with_amax_reduction")


def codes_of(tensor: object) -> Tensor:
    """The data of an FP8 tensor as a plain tensor of float8_e4m3fn or float8_e5m2, not copied."""
    return tensor._data.view(format_of(tensor._fp8_dtype).torch)
