"""Packed projections: the same numbers as apart, and one gradient without a copy."""

import pytest
import torch

from te_attention import torch as tea

CU = torch.tensor([0, 5, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("shape", "heads_kv", "options"),
    [
        ((2, 9, 12, 16), None, {"mask": "causal"}),
        ((2, 9, 8, 16), 2, {"mask": "causal", "window": (3, None)}),
        ((9, 2, 12, 16), None, {"format": "sbhd"}),
        ((9, 12, 16), None, {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}),
    ],
)
def test_heads_side_by_side(shape: tuple, heads_kv: int | None, options: dict) -> None:
    qkv = torch.randn(shape, requires_grad=True)
    o, lse = tea.attention_packed(qkv, heads_kv=heads_kv, return_lse=True, **options)
    kv = heads_kv or shape[-2] // 3
    parts = qkv.split((shape[-2] - 2 * kv, kv, kv), dim=-2)
    want, want_lse = tea.attention(*parts, return_lse=True, **{"format": "bshd", **options})
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)
    dout = torch.randn_like(o)
    (got,) = torch.autograd.grad([o, lse], qkv, [dout, lse.detach()])
    (expected,) = torch.autograd.grad([want, want_lse], qkv, [dout, lse.detach()])
    torch.testing.assert_close(got, expected)


def test_interleaved() -> None:
    qkv = torch.randn(2, 9, 4, 48, requires_grad=True)
    o = tea.attention_packed(qkv, interleaved=True)
    want = tea.attention(*qkv.unflatten(-1, (3, 16)).unbind(-2), format="bshd")
    assert torch.equal(o, want)
    got, expected = (torch.autograd.grad(t.square().sum(), qkv)[0] for t in (o, want))
    torch.testing.assert_close(got, expected)


def test_what_has_no_gradient_here_is_refused() -> None:
    qkv = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match="sink requires a gradient"):
        tea.attention_packed(qkv, sink=torch.zeros(2, requires_grad=True))
    with pytest.raises(ValueError, match="qkv has 5 heads; needs a multiple of 3"):
        tea.attention_packed(qkv[:, :, :5])
