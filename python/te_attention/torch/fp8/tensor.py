"""Float8Tensor: a tensor whose elements are stored in FP8 with one scale; and its storage alone.

Element i stands for `code[i] * scale_inv`. Operations that only move data keep the class; every
other one computes with the dequantized tensor, and an in-place one quantizes its result again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_attention.torch._library import OPS
from te_attention.torch.fp8.cast import dense
from te_attention.torch.fp8.formats import codes_of, format_of

_dequantize = OPS.fp8_dequantize.default


def dequantized(tensor: object, dtype: torch.dtype) -> Tensor:
    """The values of an FP8 tensor of any class in `dtype`, in the same order of dimensions."""
    name = str(dtype).removeprefix("torch.")
    return _dequantize(dense(codes_of(tensor)), tensor._scale_inv, name)


class QuantizedTensorStorage:
    """Data and scales that are no tensor for autograd: what `internal` quantizers return."""

    _quantizer: Any

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Makes or drops the transposed copy."""
        raise NotImplementedError

    def prepare_for_saving(self) -> tuple[list[Tensor | None], QuantizedTensorStorage]:
        """Moves the tensors out of this object, for ctx.save_for_backward()."""
        raise NotImplementedError

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Takes them back from the front of a list; returns the rest."""
        raise NotImplementedError


class QuantizedTensor(torch.Tensor):
    """A tensor that is stored with less precision than its dtype says."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor."""
        raise NotImplementedError

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> QuantizedTensor:
        """Replaces the values by those of `tensor`, with the quantizer that made this one."""
        if self._quantizer is None:
            raise ValueError("_quantizer is None; needs the quantizer that makes the new values")
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self


class Float8TensorStorage(QuantizedTensorStorage):
    """FP8 data with one scale. `data`: uint8; `fp8_scale_inv`: float32 [1]; `fp8_dtype`: DType."""

    def __new__(cls, *args: object, **fields: object) -> Float8TensorStorage:
        """Holds the fields; Float8Tensor makes a tensor of them."""
        if cls is not Float8TensorStorage:
            return super().__new__(cls, *args, **fields)
        self = object.__new__(cls)
        self._hold(**fields)
        return self

    def _hold(
        self,
        data: Tensor | None,
        fp8_scale_inv: Tensor | None,
        fp8_dtype: object,
        data_transpose: Tensor | None = None,
        quantizer: object = None,
    ) -> None:
        format_of(fp8_dtype)
        self._data, self._scale_inv, self._fp8_dtype = data, fp8_scale_inv, fp8_dtype
        self._transpose, self._transpose_invalid = data_transpose, data_transpose is None
        self._quantizer = None if quantizer is None else quantizer.copy()

    def get_metadata(self) -> dict[str, object]:
        """The fields, as the constructors take them."""
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "data_transpose": self._transpose,
            "quantizer": self._quantizer,
        }

    def get_data_tensors(
        self, rowwise_data: bool = True, columnwise_data: bool = True
    ) -> Tensor | tuple[Tensor | None, ...] | None:
        """The data, the transposed copy, or both."""
        if rowwise_data and columnwise_data:
            return self._data, self._transpose
        return self._data if rowwise_data else self._transpose

    def size(self, *dims: int) -> torch.Size | int:
        """That of the data."""
        return self._data.size(*dims)

    @property
    def device(self) -> torch.device:
        """That of the data."""
        return self._data.device

    def view(self, *shape: int | torch.Size) -> Float8TensorStorage:
        """The same data in another shape."""
        fields = self.get_metadata() | {"data": self._data.view(*shape), "data_transpose": None}
        return Float8TensorStorage(**fields)

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values as a plain tensor."""
        return dequantized(self, dtype)

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Float8TensorStorage]:
        """Moves data, transposed copy and scale_inv out of this object."""
        tensors = [self._data, self._transpose, self._scale_inv]
        self._data = self._transpose = self._scale_inv = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Takes the three back from the front of a list; returns the rest."""
        self._data, self._transpose, self._scale_inv, *rest = tensors
        return rest

    def _create_transpose(self) -> None:
        """Keeps a transposed copy: [last dimension, all others], for matrix products."""
        self._transpose = self._data.reshape(-1, self._data.shape[-1]).t().contiguous()
        self._transpose_invalid = False

    def remove_caches(self) -> None:
        """Drops the transposed copy."""
        self._transpose, self._transpose_invalid = None, True

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Makes or drops the transposed copy; the data itself always stays."""
        if rowwise_usage is False:
            raise ValueError("rowwise_usage is False; needs True or None: attention reads the rows")
        if columnwise_usage and self._transpose_invalid:
            self._create_transpose()
        if columnwise_usage is False:
            self.remove_caches()

    def __repr__(self) -> str:
        """Shape, format and scale; reading the scale waits for the device."""
        scale = self._scale_inv.item() if self._scale_inv is not None else None
        name, shape = format_of(self._fp8_dtype).name, list(self._data.shape)
        return f"{type(self).__name__}({shape}, {name}, scale_inv={scale})"


class Float8Tensor(Float8TensorStorage, QuantizedTensor):
    """The same as a tensor. `dtype` is nominal: that of what dequantize() returns by default.

    Its strides are those of a contiguous tensor, whatever those of `_data` are.
    """

    def __new__(
        cls,
        shape: torch.Size | list[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: torch.device | None = None,
        **fields: object,
    ) -> Float8Tensor:
        """`fields` are those of Float8TensorStorage."""
        device = fields["data"].device if device is None else device
        self = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        self._hold(**fields)
        return self

    size, device, view = torch.Tensor.size, torch.Tensor.device, torch.Tensor.view

    @classmethod
    def make_like(
        cls,
        tensor: Float8TensorStorage,
        *,
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
    ) -> Float8Tensor:
        """A tensor with the scale, format and quantizer of `tensor`, and its data unless given."""
        fields = tensor.get_metadata()
        if data is not None:
            fields |= {"data": data, "data_transpose": data_transpose}
        shape = fields["data"].shape if shape is None else shape
        dtype = getattr(tensor, "dtype", torch.float32) if dtype is None else dtype
        return cls(shape, dtype, requires_grad=requires_grad, **fields)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype`, by default the nominal one. Differentiable."""
        dtype = self.dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return dequantized(self, dtype)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """With contiguous data."""
        if self._data.is_contiguous(memory_format=memory_format):
            return self
        return self.clone()

    def view_as(self, other: Tensor) -> Tensor:
        """In the shape of another tensor."""
        return self.view(other.shape)

    def expand_as(self, other: Tensor) -> Tensor:
        """Itself, where the shapes are equal; else a plain tensor."""
        return self if other is self else super().expand_as(other)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Pickles data and scale, without the quantizer."""
        fields = self.get_metadata() | {"quantizer": None, "data_transpose": None}
        return _rebuilt, (type(self), self.shape, self.dtype, self.requires_grad, fields)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """See the comment at the top."""
        from te_attention.torch.fp8._dispatch import dispatched

        return dispatched(func, args, kwargs or {})


def _rebuilt(
    cls: type, shape: torch.Size, dtype: torch.dtype, requires_grad: bool, fields: dict
) -> Float8Tensor:
    return cls(shape, dtype, requires_grad=requires_grad, **fields)


class _Dequantize(torch.autograd.Function):
    """The gradient passes as it is."""

    @staticmethod
    def forward(ctx, tensor: Float8Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return dequantized(tensor, dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
