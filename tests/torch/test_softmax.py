"""Softmax over scores that are kept, and interleaved QKV."""

import pytest
import torch

from te_attention.torch._library import OPS

SCALE = 0.5


def expected(x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    scores = x.double() * SCALE
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0)


@pytest.mark.parametrize("kind", ["none", "given", "causal", "causal_bottom_right"])
def test_forward_and_backward(kind: str) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    rows, cols = torch.arange(5)[:, None], torch.arange(7)[None]
    mask = torch.rand(2, 1, 5, 7) < 0.3 if kind == "given" else None
    hidden = {
        "none": None,
        "given": mask,
        "causal": cols > rows,
        "causal_bottom_right": cols > rows + 2,
    }[kind]
    y = OPS.scaled_softmax_forward(x, mask, SCALE, kind)
    want = expected(x, hidden)
    torch.testing.assert_close(y.double(), want, atol=1e-6, rtol=1e-5)
    dx = OPS.scaled_softmax_backward(dy, y, SCALE, kind)
    want_dx = SCALE * want * (dy.double() - (want * dy.double()).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), want_dx, atol=1e-6, rtol=1e-5)


def test_prepare_and_back() -> None:
    qkv = torch.randn(4, 2, 3, 24)
    out = OPS.flash_prepare_forward(qkv)
    want = torch.stack([part.transpose(0, 1) for part in qkv.chunk(3, dim=-1)])
    assert torch.equal(out, want)
    assert torch.equal(OPS.flash_prepare_backward(*out), qkv)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(RuntimeError, match='kind is "odd"; needs none, given, causal'):
        OPS.scaled_softmax_forward(torch.zeros(1, 1, 2, 2), None, SCALE, "odd")
