"""Quantizers: from a tensor to FP8, with a scale that is known (delayed) or found (current)."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from te_attention.torch._library import OPS
from te_attention.torch.fp8.cast import dense, find_scale, largest_into
from te_attention.torch.fp8.formats import Fp8Format, format_of
from te_attention.torch.fp8.tensor import Float8Tensor, Float8TensorStorage

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_quantize = OPS.fp8_quantize.default
_quantize_current = OPS.fp8_quantize_current.default


class Quantizer:
    """Base class of the quantizers.

    `internal` ones return a Float8TensorStorage, which autograd does not know; the others a
    Float8Tensor, whose gradient passes to the input as it is. `rowwise_usage` and
    `columnwise_usage` say which copies a matrix product would need; `optimize_for_gemm` is kept
    for such code and has no effect here.
    """

    dtype: object

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        """Which copies are needed."""
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = self.optimize_for_gemm = False

    @property
    def _format(self) -> Fp8Format:
        return format_of(self.dtype)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Changes which copies are needed; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Which copies are needed, by the keywords of set_usage()."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Quantizer:
        """A shallow copy, which shares scale and amax."""
        return copy.copy(self)

    def _cast(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Codes in the order of dimensions of a dense tensor, and the scale's inverse."""
        raise NotImplementedError

    def __call__(self, tensor: Tensor) -> Float8TensorStorage:
        """As quantize()."""
        return self.quantize(tensor)

    def quantize(
        self, tensor: Tensor, *, out: Float8TensorStorage | None = None,
        dtype: torch.dtype | None = None,
    ) -> Float8TensorStorage:  # fmt: skip
        """The tensor in FP8. `out`: what is overwritten. `dtype`: nominal, by default the same."""
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.is_grad_enabled() and tensor.requires_grad and not self.internal:
            return _Quantize.apply(tensor, self, dtype)
        return self._quantized(tensor, dtype)

    def _quantized(self, tensor: Tensor, dtype: torch.dtype | None) -> Float8TensorStorage:
        if tensor.dtype not in _REAL:
            seen = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"tensor.dtype is {seen}; needs float16, bfloat16, float32 or float64")
        codes, scale_inv = self._cast(dense(tensor.detach()))
        return self._wrapped(codes.view(torch.uint8), scale_inv, dtype or tensor.dtype)

    def _wrapped(
        self, data: Tensor, scale_inv: Tensor, dtype: torch.dtype, requires_grad: bool = False
    ) -> Float8TensorStorage:
        fields = {"data": data, "fp8_scale_inv": scale_inv, "fp8_dtype": self.dtype}
        if self.internal:
            out = Float8TensorStorage(**fields, quantizer=self)
        else:
            options = {"requires_grad": requires_grad, "quantizer": self}
            out = Float8Tensor(data.shape, dtype, **fields, **options)
        if self.columnwise_usage and data.dim():
            out._create_transpose()
        return out

    def update_quantized(
        self, src: Tensor, dst: Float8TensorStorage, *, noop_flag: Tensor | None = None
    ) -> Float8TensorStorage:
        """Overwrites `dst` by `src` in FP8. A noop_flag is refused: to read it waits."""
        if noop_flag is not None:
            raise ValueError("noop_flag is a tensor; needs None")
        codes, scale_inv = self._cast(dense(src.detach()))
        dst._data.copy_(codes.view(torch.uint8).view(dst._data.shape))
        dst._scale_inv.copy_(scale_inv.view(dst._scale_inv.shape))
        dst._fp8_dtype = self.dtype
        had_transpose = not dst._transpose_invalid
        dst.remove_caches()
        if had_transpose:
            dst._create_transpose()
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Float8TensorStorage:
        """Uninitialised data of a shape; its scale_inv is uninitialised too."""
        device = self._device() if device is None else device
        data = torch.empty(tuple(shape), dtype=torch.uint8, device=device, pin_memory=pin_memory)
        scale_inv = torch.empty(1, dtype=torch.float32, device=device, pin_memory=pin_memory)
        return self._wrapped(data, scale_inv, dtype, requires_grad)

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Float8TensorStorage:
        """FP8 codes (uint8, or of the FP8 dtype) under this quantizer's scale."""
        maker = self if internal == self.internal else self.copy()
        maker.internal = internal
        data = data if data.dtype == torch.uint8 else data.view(torch.uint8)
        scale_inv = torch.reciprocal(self.scale).view(1)
        return maker._wrapped(data, scale_inv, fake_dtype, requires_grad)

    def _device(self) -> torch.device:
        return self.scale.device

    def calibrate(self, tensor: Tensor) -> None:
        """Records what quantize() would, without a result."""
        raise NotImplementedError

    def onnx_quantize(self, tensor: Tensor) -> Float8TensorStorage:
        """As quantize(): there is no form of its own for ONNX."""
        return self.quantize(tensor)

    def onnx_dequantize(self, tensor: Float8TensorStorage) -> Tensor:
        """As tensor.dequantize()."""
        return tensor.dequantize()


class Float8Quantizer(Quantizer):
    """Delayed scaling: the scale is known, and the amax of every tensor is recorded.

    Args:
        scale, amax: float32 of one element, on the device of the tensors. A recipe's state owns
            both: amax is the current row of its history.
        fp8_dtype: DType.kFloat8E4M3 or kFloat8E5M2.
    """

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: object,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        """See the class."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        format_of(fp8_dtype)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def copy(self) -> Float8Quantizer:
        """A shallow copy, which shares scale and amax; optimize_for_gemm is not kept."""
        out = super().copy()
        out.optimize_for_gemm = False
        return out

    def _cast(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return _quantize(tensor, self.scale, self.amax, self._format.name)

    def calibrate(self, tensor: Tensor) -> None:
        """Records the amax."""
        largest_into(tensor, self.amax)


class Float8CurrentScalingQuantizer(Quantizer):
    """Current scaling: the scale follows from the amax of the tensor itself.

    Args:
        fp8_dtype: DType.kFloat8E4M3 or kFloat8E5M2.
        device: of the tensors.
        use_existing_amax: takes `amax` as it is instead of finding it.
        with_amax_reduction, amax_reduction_group: the amax is the largest of all ranks.
        force_pow_2_scales: rounds scales down to powers of two.
        amax_epsilon: the least amax.
        scale, amax: float32 [1], where the latest values are kept.
    """

    def __init__(
        self,
        fp8_dtype: object,
        device: torch.device | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: object = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        """See the class."""
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        format_of(fp8_dtype)
        options = {"dtype": torch.float32, "device": device}
        self.scale = torch.ones(1, **options) if scale is None else scale
        self.amax = torch.zeros(1, **options) if amax is None else amax
        self.dtype, self.use_existing_amax = fp8_dtype, use_existing_amax
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales, self.amax_epsilon = force_pow_2_scales, amax_epsilon

    def _cast(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        name = self._format.name
        if self.use_existing_amax or self.with_amax_reduction:
            find_scale([tensor], self)
            return _quantize(tensor, self.scale, None, name)
        codes, self.scale, scale_inv, self.amax = _quantize_current(
            tensor, name, self.force_pow_2_scales, self.amax_epsilon
        )
        return codes, scale_inv

    def calibrate(self, tensor: Tensor) -> None:
        """Has nothing to record: every cast finds its own amax."""


class _Quantize(torch.autograd.Function):
    """The gradient passes as it is."""

    @staticmethod
    def forward(_ctx, tensor: Tensor, quantizer: Quantizer, dtype: torch.dtype | None) -> Tensor:
        return quantizer._quantized(tensor, dtype)

    @staticmethod
    def backward(_ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None
