"""PyTorch's operations on Float8Tensors. See tensor.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from te_attention.torch.fp8.tensor import Float8Tensor

_aten = torch.ops.aten


def _like(tensor: Float8Tensor, data: Tensor, dtype: torch.dtype | None = None) -> Float8Tensor:
    return Float8Tensor.make_like(tensor, data=data, shape=data.shape, dtype=dtype)


def _by_data(func: Callable, tensor: Float8Tensor, *args: object, **kwargs: object) -> object:
    """The operation on the data alone."""
    out = func(tensor._data, *args, **kwargs)
    return _like(tensor, out) if isinstance(out, Tensor) else [_like(tensor, t) for t in out]


def _as_strided(func: Callable, tensor: Float8Tensor, *args: object) -> Float8Tensor:
    return _like(tensor, func(tensor._data.contiguous(), *args))  # strides are of a contiguous one


def _detach(_func: Callable, tensor: Float8Tensor) -> Float8Tensor:
    return Float8Tensor.make_like(tensor)


def _clone(
    func: Callable, tensor: Float8Tensor, memory_format: torch.memory_format | None = None
) -> Float8Tensor:
    out = _like(tensor, func(tensor._data, memory_format=memory_format or torch.contiguous_format))
    out._scale_inv = tensor._scale_inv.clone()
    return out


def _empty_like(
    func: Callable, tensor: Float8Tensor, *, dtype: torch.dtype | None = None, **kwargs: object
) -> Float8Tensor:
    kwargs.pop("memory_format", None)
    out = _like(tensor, func(tensor._data, **kwargs), dtype)
    out._scale_inv = torch.empty_like(tensor._scale_inv, device=out._data.device)
    return out


def _new_zeros(
    func: Callable, tensor: Float8Tensor, size: list[int], *, dtype: torch.dtype | None = None,
    **kwargs: object,
) -> Float8Tensor:  # fmt: skip
    return _like(tensor, func(tensor._data, size, **kwargs), dtype)


def _copy(func: Callable, target: Tensor, source: Tensor, *args: object) -> Tensor:
    if not isinstance(target, Float8Tensor):
        return func(target, source.dequantize(dtype=target.dtype), *args)
    if not isinstance(source, Float8Tensor) or source._fp8_dtype != target._fp8_dtype:
        plain = source.dequantize() if isinstance(source, Float8Tensor) else source
        return target.quantize_(plain.expand(target.shape))
    func(target._data, source._data, *args)
    target._scale_inv.copy_(source._scale_inv)
    target.remove_caches()
    return target


_KEEPING = {
    **dict.fromkeys(
        (
            _aten.view.default,
            _aten._unsafe_view.default,
            _aten._reshape_alias.default,
            _aten.slice.Tensor,
            _aten.select.int,
            _aten.split.Tensor,
            _aten.split_with_sizes.default,
        ),
        _by_data,
    ),
    _aten.as_strided.default: _as_strided,
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten.empty_like.default: _empty_like,
    _aten.new_zeros.default: _new_zeros,
    _aten.copy_.default: _copy,
}


def _expands(func: Callable, args: tuple) -> bool:
    """Whether it expands a tensor to the shape that it has."""
    return func is _aten.expand.default and list(args[1]) == list(args[0].shape)


def dispatched(func: Callable, args: tuple, kwargs: dict) -> object:
    """The operation `func` on arguments of which some are Float8Tensors."""
    keeping = _KEEPING.get(func)
    if keeping is not None:
        return keeping(func, *args, **kwargs)
    if _expands(func, args):
        return _detach(func, args[0])
    plain: dict[int, tuple[Float8Tensor, Tensor]] = {}

    def dequantize(value: object) -> object:
        if not isinstance(value, Float8Tensor):
            return value
        if id(value) not in plain:
            plain[id(value)] = value, value.dequantize()
        return plain[id(value)][1]

    out = func(*tree_map(dequantize, args), **tree_map(dequantize, kwargs))
    if func._schema.is_mutable:
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for value in written:
            if id(value) in plain:
                value.quantize_(plain[id(value)][1])
        if written and isinstance(out, Tensor) and isinstance(written[0], Float8Tensor):
            return written[0]
    return out
