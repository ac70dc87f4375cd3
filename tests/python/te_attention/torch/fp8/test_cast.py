"""Which tensors are cast without a copy. Casts themselves: test_quantizer.py."""

import torch

from te_attention.torch.fp8.cast import dense, is_dense


def test_dense() -> None:
    x = torch.randn(2, 3, 4)
    for t in (x, x.transpose(0, 2), x[:1], x.permute(1, 2, 0)):
        assert is_dense(t)
        assert dense(t) is t
    for t in (x[..., :2], x[:, ::2], x[:1].expand(2, 3, 4)):
        assert not is_dense(t)
        assert torch.equal(dense(t), t)
