"""The plans a thread remembers: many problems through one small table, and changes of engine."""

import torch

from te_attention import torch as tea
from te_attention.torch._library import OPS


def test_more_problems_than_places() -> None:
    sizes = list(range(1, 200))
    for _ in range(2):
        for s in sizes:
            q = torch.full((1, 1, s, 8), 0.5)
            assert OPS.forward(q, q, q)[0].shape == (1, 1, s, 8)


def test_the_same_problem_on_another_engine() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    first = tea.attention(q, k, v)
    assert torch.equal(first, tea.attention(q, k, v))
    torch.testing.assert_close(tea.attention(q, k, v, engine="reference"), first)


def test_ragged_work_grows_within_one_problem() -> None:
    for tokens in (4, 4000, 8):
        q = torch.randn(tokens, 1, 8)
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        o = OPS.forward(q, q, q, "thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)[0]
        assert o.isfinite().all()
