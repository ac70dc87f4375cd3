"""Every member of Float8Tensor, one by one, and what operations do with it."""

import copy
import io

import pytest
import torch

from te_attention.torch import fp8
from te_attention.torch.fp8 import DType, Float8Tensor, Float8TensorStorage


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> Float8Tensor:
    quantizer = fp8.Float8Quantizer(
        torch.tensor([64.0]), torch.zeros(1), DType.kFloat8E4M3, columnwise=False
    )
    torch.manual_seed(1)
    return quantizer.quantize(torch.randn(*shape, **options), dtype=dtype)


def values(tensor: Float8Tensor) -> torch.Tensor:
    return tensor._data.view(torch.float8_e4m3fn).double() * tensor._scale_inv.double()


def test_attributes() -> None:
    t = made(2, 3, 8)
    assert isinstance(t, (fp8.QuantizedTensor, Float8TensorStorage, torch.Tensor))
    assert (t.dtype, t.shape, t._data.dtype) == (torch.bfloat16, (2, 3, 8), torch.uint8)
    assert t._scale_inv.item() == 1 / 64
    assert (t._fp8_dtype, t._transpose, t._transpose_invalid) == (DType.kFloat8E4M3, None, True)
    assert t._quantizer.scale.item() == 64
    assert t.stride() == (24, 8, 1)
    assert "float8_e4m3fn, scale_inv=0.015625" in repr(t)


def test_the_quantizer_is_a_copy() -> None:
    quantizer = fp8.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)
    t = quantizer(torch.ones(2))
    assert t._quantizer is not quantizer
    assert t._quantizer.scale is quantizer.scale


def test_strides_are_those_of_a_contiguous_tensor() -> None:
    t = made(4, 6, 8)
    part = t[:, ::2]
    assert part._data.stride() == (48, 16, 1)
    assert part.stride() == (24, 8, 1)
    assert torch.equal(part.dequantize().double(), values(t)[:, ::2])
    assert part.contiguous()._data.is_contiguous()
    assert t.contiguous() is t


def test_make_like() -> None:
    t = made(4, 6)
    other = t.make_like(tensor=t, data=t._data[:2], shape=t._data[:2].shape)
    assert other._scale_inv is t._scale_inv
    assert torch.equal(values(other), values(t)[:2])
    assert t.make_like(t, data=t._data.view(24)).shape == (24,)
    assert Float8Tensor.make_like(t, dtype=torch.float32, requires_grad=True).requires_grad
    fields = {"data": t._data, "fp8_scale_inv": t._scale_inv, "fp8_dtype": t._fp8_dtype}
    storage = Float8TensorStorage(**fields)
    assert Float8Tensor.make_like(storage, dtype=torch.half, data=t._data).dtype == torch.half


def test_dequantize() -> None:
    t = made(3, 8)
    assert t.dequantize().dtype == torch.bfloat16
    assert torch.equal(t.dequantize(dtype=torch.float32).double(), values(t))
    with pytest.raises(TypeError):
        t.dequantize(torch.float32)
    x = torch.randn(3, 8, requires_grad=True)
    fp8.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)(x).dequantize().mul(
        torch.arange(8.0)
    ).sum().backward()
    assert torch.equal(x.grad, torch.arange(8.0).expand(3, 8))


KEEPING = {
    "view": lambda t: t.view(6, 8),
    "reshape": lambda t: t.reshape(-1),
    "slice": lambda t: t[1:],
    "select": lambda t: t[0],
    "split": lambda t: t.split(1)[1],
    "split_with_sizes": lambda t: t.split([1, 1], dim=0)[1],
    "as_strided": lambda t: t.as_strided((2, 2), (24, 8)),
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t[:, 1:].contiguous(),
    "view_as": lambda t: t.view_as(torch.empty(6, 8)),
    "expand_as": lambda t: t.expand_as(t),
}


@pytest.mark.parametrize("name", KEEPING)
def test_operations_that_keep_the_class(name: str) -> None:
    t = made(2, 3, 8)
    out = KEEPING[name](t)
    assert isinstance(out, Float8Tensor)
    plain = KEEPING[name](values(t))
    assert out.shape == plain.shape
    assert torch.equal(values(out), plain)
    assert out._fp8_dtype == t._fp8_dtype


def test_gradients_pass_through_views() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    t = fp8.Float8Quantizer(torch.ones(1), torch.zeros(1), DType.kFloat8E4M3)(x)
    t.view(6, 8)[1:3].dequantize().sum().backward()
    assert x.grad.sum() == 16


def test_clone_has_memory_of_its_own() -> None:
    t = made(8)
    other = t.clone()
    other._data.zero_()
    other._scale_inv.zero_()
    assert t._data.any()
    assert t._scale_inv.item() == 1 / 64


def test_new_zeros_and_empty_like() -> None:
    t = made(2, 8)
    zeros = t.new_zeros(3, 4)
    assert isinstance(zeros, Float8Tensor)
    assert torch.equal(values(zeros), torch.zeros(3, 4).double())
    empty = torch.empty_like(t)
    assert isinstance(empty, Float8Tensor)
    assert empty._data.data_ptr() != t._data.data_ptr()
    assert empty._scale_inv is not t._scale_inv


def test_copy_between_tensors() -> None:
    a, b = made(2, 8), made(2, 8).mul(0)
    b = a._quantizer.make_empty((2, 8), dtype=torch.bfloat16)
    b.copy_(a)
    assert torch.equal(b._data, a._data)
    assert b._scale_inv.item() == a._scale_inv.item()
    plain = torch.empty(2, 8)
    plain.copy_(a)
    assert torch.equal(plain.double(), values(a))
    a.copy_(torch.full((2, 8), 3.0))
    assert torch.equal(values(a), torch.full((2, 8), 3.0).double())


def test_any_other_operation_dequantizes() -> None:
    t = made(4, 8)
    out = t + 1
    assert type(out) is torch.Tensor
    assert torch.equal(out, t.dequantize() + 1)
    assert torch.equal(torch.cat([t, t]), torch.cat([t.dequantize()] * 2))
    assert type(t.transpose(0, 1)) is torch.Tensor
    assert t.float().dtype == torch.float32
    assert torch.equal(torch.stack([t, t])[1], t.dequantize())


def test_in_place_operations_quantize_again() -> None:
    t = made(4, 8, dtype=torch.float32)
    before = values(t)
    assert t.add_(1.0) is t
    step = (before + 1).abs() / 16 + 1 / 64 / 512
    assert ((values(t) - before - 1).abs() <= step).all()
    assert t.fill_(2.0) is t
    assert torch.equal(values(t), torch.full((4, 8), 2.0).double())


def test_transposed_copy() -> None:
    t = made(2, 3, 8)
    t._create_transpose()
    assert torch.equal(t._transpose, t._data.view(6, 8).t())
    assert not t._transpose_invalid
    t.remove_caches()
    assert t._transpose is None
    t.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert t._transpose.shape == (8, 6)
    t.update_usage(columnwise_usage=False)
    assert t._transpose_invalid
    with pytest.raises(ValueError, match="rowwise_usage is False; needs True or None"):
        t.update_usage(rowwise_usage=False)


def test_quantize_in_place() -> None:
    t = made(2, 8)
    assert t.quantize_(torch.full((2, 8), 1.5)) is t
    assert torch.equal(values(t), torch.full((2, 8), 1.5).double())
    t._quantizer = None
    with pytest.raises(ValueError, match="_quantizer is None; needs the quantizer"):
        t.quantize_(torch.ones(2, 8))


def test_metadata_and_data() -> None:
    t = made(2, 8)
    assert t.get_metadata()["fp8_scale_inv"] is t._scale_inv
    assert Float8Tensor(t.shape, t.dtype, **t.get_metadata())._data is t._data
    assert t.get_data_tensors() == (t._data, None)
    assert t.get_data_tensors(columnwise_data=False) is t._data


def test_storage() -> None:
    t = made(2, 3, 8)
    storage = Float8TensorStorage(
        data=t._data, fp8_scale_inv=t._scale_inv, fp8_dtype=t._fp8_dtype, quantizer=t._quantizer
    )
    assert not isinstance(storage, torch.Tensor)
    assert storage.size() == (2, 3, 8)
    assert storage.size(1) == 3
    assert storage.view(6, 8).size() == storage.view(torch.Size((6, 8))).size() == (6, 8)
    assert storage.dequantize().dtype == torch.float32
    tensors, same = storage.prepare_for_saving()
    assert same is storage
    assert storage._data is None
    assert storage.restore_from_saved([*tensors, "rest"]) == ["rest"]
    assert storage._data is t._data
    with pytest.raises(ValueError, match=r"fp8_dtype is .*kByte.*; needs kFloat8E4M3"):
        Float8TensorStorage(data=t._data, fp8_scale_inv=t._scale_inv, fp8_dtype=DType.kByte)


def test_pickle_and_deepcopy() -> None:
    t, file = made(2, 8), io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (loaded, copy.deepcopy(t)):
        assert isinstance(other, Float8Tensor)
        assert torch.equal(values(other), values(t))
        assert other.dtype == t.dtype


def test_autograd_saves_it() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor, t: Float8Tensor) -> torch.Tensor:
            ctx.save_for_backward(t)
            return x * 2

        @staticmethod
        def backward(ctx, gradient: torch.Tensor) -> tuple:
            (t,) = ctx.saved_tensors
            assert isinstance(t, Float8Tensor)
            return gradient * t.dequantize(dtype=torch.float32), None

    x, t = torch.ones(8, requires_grad=True), made(8)
    Saves.apply(x, t).sum().backward()
    assert torch.equal(x.grad.double(), values(t))
