"""FP8 casts, the largest magnitude, fills: against torch's own casts."""

import pytest
import torch

from te_attention.torch._library import OPS

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@pytest.mark.parametrize("dtype", LARGEST)
def test_quantize_with_a_known_scale(dtype: str) -> None:
    x = torch.randn(3, 50)
    scale, amax = torch.tensor([2.0]), torch.tensor([0.5])
    y, scale_inv = OPS.fp8_quantize(x, scale, amax, dtype)
    assert torch.equal(y.float(), (x * 2).to(getattr(torch, dtype)).float())
    assert scale_inv.item() == 0.5
    assert amax.item() == x.abs().max()
    back = OPS.fp8_dequantize(y, scale_inv, "float32")
    assert torch.equal(back, y.float() * 0.5)


@pytest.mark.parametrize("dtype", LARGEST)
def test_quantize_by_what_is_there(dtype: str) -> None:
    x = torch.randn(100)
    y, scale, scale_inv, amax = OPS.fp8_quantize_current(x, dtype)
    assert amax.item() == x.abs().max()
    torch.testing.assert_close(scale, torch.tensor([LARGEST[dtype]]) / amax)
    torch.testing.assert_close(scale_inv, 1 / scale)
    assert y.float().abs().max() == LARGEST[dtype]


def test_amax_and_fills() -> None:
    x, largest = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([2.5])
    OPS.amax(x, largest)
    assert largest.item() == 3
    OPS.fill(x, 1.5)
    assert x.tolist() == [1.5] * 3
    OPS.fill_bytes(x, 0)
    assert x.tolist() == [0] * 3


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(RuntimeError, match='dtype is "int4"; needs a floating-point dtype'):
        OPS.fp8_quantize(torch.zeros(2), None, None, "int4")
