"""The softmax functions and FusedScaleMaskSoftmax."""

import pytest
import torch

from transformer_engine.pytorch.attention.dot_product_attention import softmax
from transformer_engine.pytorch.utils import attention_mask_func

SCALE = 0.5
FUNCTIONS = {
    softmax.ScaledSoftmax: None,
    softmax.ScaledMaskedSoftmax: "given",
    softmax.ScaledUpperTriangMaskedSoftmax: 0,
    softmax.ScaledAlignedCausalMaskedSoftmax: 4,
}


def expected(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    scores = (x * SCALE).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden, 0.0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_forward_and_backward(function: type[torch.autograd.Function]) -> None:
    kind = FUNCTIONS[function]
    shape = (3, 8, 8) if kind == 0 else (2, 3, 4, 8)
    x = torch.randn(*shape, requires_grad=True)
    rows, cols = torch.arange(shape[-2])[:, None], torch.arange(8)[None]
    hidden = torch.zeros(shape[-2], 8, dtype=torch.bool)
    inputs: tuple = (x, SCALE)
    if kind == "given":
        mask = torch.rand(2, 1, 4, 8) < 0.4
        hidden, inputs = mask, (x, mask, SCALE)
    elif kind is not None:
        hidden = cols > rows + kind
    got, want = function.apply(*inputs), expected(x, hidden)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    dy = torch.randn_like(got)
    a, b = (torch.autograd.grad(y, x, dy.clone())[0] for y in (got, want))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right", "arbitrary"])
@pytest.mark.parametrize("fusion", ["0", "1"])
def test_module(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mask_type: str, fusion: str
) -> None:
    monkeypatch.setenv("NVTE_MASKED_SOFTMAX_FUSION", fusion)
    x = torch.randn(2, 3, 4, 8).to(dtype).requires_grad_()
    rows, cols = torch.arange(4)[:, None], torch.arange(8)[None]
    mask = torch.rand(2, 3, 4, 8) < 0.4 if mask_type == "arbitrary" else None
    hidden = torch.zeros(4, 8, dtype=torch.bool) if mask is None else mask
    if "causal" in mask_type:
        hidden = cols > rows + (4 if "bottom" in mask_type else 0)
    got = softmax.FusedScaleMaskSoftmax(attention_mask_func)(x, mask, mask_type, SCALE)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected(x.float(), hidden), atol=5e-3, rtol=1e-2)
    assert got.float()[hidden.expand_as(got)].abs().sum() == 0


def test_a_row_that_attends_to_no_key_is_zero() -> None:
    mask = torch.zeros(1, 1, 2, 8, dtype=torch.bool)
    mask[..., 0, :] = True
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(1, 1, 2, 8).to(dtype).requires_grad_()
        got = softmax.FusedScaleMaskSoftmax(attention_mask_func)(x, mask, "arbitrary", None)
        (dx,) = torch.autograd.grad(got.float().square().sum(), x)
        assert got[..., 0, :].abs().max() == 0
        assert dx[..., 0, :].abs().max() == 0
        assert dx.isfinite().all()
