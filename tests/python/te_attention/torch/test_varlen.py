"""varlen_attn() against sequences that are alone."""

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch.varlen import AuxRequest, varlen_attn

WINDOWS = {
    (-1, -1): {},
    (-1, 0): {"mask": "causal_bottom_right"},
    (2, 0): {"mask": "causal_bottom_right", "window": (2, None)},
    (2, 1): {"mask": "bottom_right", "window": (2, 1)},
}


@pytest.mark.parametrize("window", WINDOWS)
def test_sequences_of_their_own(window: tuple[int, int]) -> None:
    torch.manual_seed(0)
    lengths_q, lengths_k = (5, 7), (6, 11)
    q = torch.randn(12, 4, 16, requires_grad=True)
    k, v = (torch.randn(17, 4, 16, requires_grad=True) for _ in range(2))
    cu_q, cu_k = torch.tensor([0, 5, 12]), torch.tensor([0, 6, 17])
    o, lse = varlen_attn(
        q, k, v, cu_q, cu_k, 7, 11, return_aux=AuxRequest(lse=True), window_size=window, scale=0.3
    )
    assert lse.shape == (12, 4)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    want = [
        tea.attention(*(t[None] for t in part), format="bshd", scale=0.3, **WINDOWS[window])[0]
        for part in parts
    ]
    torch.testing.assert_close(o, torch.cat(want))
    assert varlen_attn(q, k, v, cu_q, cu_k, 7, 11, window_size=window, scale=0.3).equal(o)
    got = torch.autograd.grad(o.square().sum(), (q, k, v))
    expected = torch.autograd.grad(torch.cat(want).square().sum(), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
