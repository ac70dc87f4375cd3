"""The plans a thread remembers: many problems through one small table, and changes of engine."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from te_attention import torch as tea
from te_attention.torch._library import OPS


def test_more_problems_than_places() -> None:
    sizes = list(range(1, 200))
    for _ in range(2):
        for s in sizes:
            q, k, v = (torch.randn(1, 2, s, 8) for _ in range(3))
            got = OPS.forward(q, k, v, "bhsd", "causal" if s % 2 else "none")[0]
            want = scaled_dot_product_attention(q, k, v, is_causal=s % 2 == 1)
            torch.testing.assert_close(got, want)


def test_the_same_problem_on_another_engine() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float64) for _ in range(3))
    first = tea.attention(q, k, v)
    assert torch.equal(first, tea.attention(q, k, v))
    torch.testing.assert_close(tea.attention(q, k, v, engine="reference"), first)
    with pytest.raises(RuntimeError, match='engine is "fast"; needs one of'):
        tea.attention(q, k, v, engine="fast")  # not the plan of the same problem
    assert torch.equal(first, tea.attention(q, k, v))


def test_ragged_work_grows_within_one_problem() -> None:
    for tokens in (4, 4000, 8):
        q, k, v = (torch.randn(tokens, 1, 8) for _ in range(3))
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        got = OPS.forward(q, k, v, "thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)[0]
        want = scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)))
        torch.testing.assert_close(got, want.transpose(0, 1))
