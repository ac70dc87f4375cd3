"""Objects as NVIDIA's package has them: the same attributes, and no class in common with ours."""

import enum

import torch
from torch import Tensor


class Type:
    """A member of an enum of pybind11: no integer, but int() takes it."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __int__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Type) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


E4M3, E5M2 = Type("kFloat8E4M3", 7), Type("kFloat8E5M2", 8)
assert not isinstance(E4M3, enum.Enum)
_TORCH = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}


class Storage:
    """Float8TensorStorage."""

    def __init__(self, data: Tensor, scale_inv: Tensor, dtype: Type, quantizer: object) -> None:
        self._data, self._scale_inv, self._fp8_dtype = data, scale_inv, dtype
        self._quantizer, self._transpose, self._transpose_invalid = quantizer, None, True

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = self._data.view(_TORCH[int(self._fp8_dtype)])
        return (codes.float() * self._scale_inv).to(dtype)


class Tensor8(torch.Tensor):
    """Float8Tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, dtype: Type, quantizer: object,
                nominal: torch.dtype = torch.bfloat16) -> "Tensor8":  # fmt: skip
        self = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=nominal)
        self._data, self._scale_inv, self._fp8_dtype = data, scale_inv, dtype
        self._quantizer, self._transpose, self._transpose_invalid = quantizer, None, True
        return self

    dequantize = Storage.dequantize

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called on a foreign tensor")


class Quantizer:
    """Float8Quantizer."""

    def __init__(self, scale: Tensor, amax: Tensor, dtype: Type) -> None:
        self.scale, self.amax, self.dtype = scale, amax, dtype
        self.internal = self.rowwise_usage = self.columnwise_usage = False

    def copy(self) -> "Quantizer":
        out = type(self)(self.scale, self.amax, self.dtype)
        out.internal = self.internal
        return out

    def create_tensor_from_data(
        self, data: Tensor, fake_dtype: torch.dtype = torch.float32, requires_grad: bool = False,
        internal: bool = False,
    ) -> object:  # fmt: skip
        assert data.dtype == torch.uint8
        assert not requires_grad
        fields = data, self.scale.reciprocal().view(1), self.dtype, self
        return Storage(*fields) if internal else Tensor8(*fields, fake_dtype)


class CurrentQuantizer(Quantizer):
    """Float8CurrentScalingQuantizer."""

    def __init__(self, dtype: Type) -> None:
        super().__init__(torch.ones(1), torch.zeros(1), dtype)
        self.use_existing_amax = self.with_amax_reduction = self.force_pow_2_scales = False
        self.amax_reduction_group, self.amax_epsilon = None, 0.0

    def copy(self) -> "CurrentQuantizer":
        return CurrentQuantizer(self.dtype)
