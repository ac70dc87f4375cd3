"""Merging by LSE, and the helpers of context parallelism on ragged batches."""

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch._library import OPS

CU = torch.tensor([0, 8, 12], dtype=torch.int32)
SECOND = [4, 5, 6, 7, 10, 11]  # the second halves of the two sequences
FIRST = [0, 1, 2, 3, 8, 9]


def test_merge_of_split_keys_is_the_whole() -> None:
    q, k, v = (torch.randn(2, 9, 3, 16) for _ in range(3))
    whole, lse = tea.attention(q, k, v, format="bshd", return_lse=True)
    parts = [
        tea.attention(q, k[:, i], v[:, i], format="bshd", return_lse=True)
        for i in (slice(0, 4), slice(4, 9))
    ]
    o, merged = OPS.merge([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(o, whole)
    torch.testing.assert_close(merged, lse)


def test_halves() -> None:
    x = torch.randn(12, 2, 8)
    assert torch.equal(OPS.cp_read_half(x, CU, False), x[FIRST])
    assert torch.equal(OPS.cp_read_half(x, CU, True), x[SECOND])
    two = torch.randn(2, 12, 2, 8)
    assert torch.equal(OPS.cp_read_half(two, CU, True, True), two[:, SECOND])


def test_lse_of_second_halves() -> None:
    lse = torch.randn(3, 12)
    half = OPS.cp_lse_read(lse, CU, True, 6)
    assert torch.equal(half, lse[:, SECOND])
    step = torch.randn(3, 6)
    want = lse.clone()
    want[:, SECOND] = torch.logaddexp(lse[:, SECOND], step)
    OPS.cp_lse_correct(lse, step, CU, True)
    torch.testing.assert_close(lse, want)


def test_corrections_of_outputs_and_gradients() -> None:
    out, step = torch.randn(12, 2, 8), torch.randn(6, 2, 8)
    lse, step_lse = torch.randn(2, 12), torch.randn(2, 6)
    want = out.clone()
    want[SECOND] += step * (step_lse - lse[:, SECOND]).exp().T[..., None]
    OPS.cp_out_correct(out, step, lse, step_lse, CU, True, True)
    torch.testing.assert_close(out, want)

    grad, both = torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    want = grad.clone()
    want[FIRST] += both[FIRST]
    want[SECOND] = both[SECOND]
    OPS.cp_grad_correct(grad, both, CU, "add", "copy")
    torch.testing.assert_close(grad, want)


def test_partition_and_both_orders() -> None:
    world = 2
    parts = [OPS.cp_partition_indices(CU, 12, world, rank) for rank in range(world)]
    assert parts[0].tolist() == [0, 1, 6, 7, 8, 11]
    assert sorted(torch.cat(parts).tolist()) == list(range(12))
    x = torch.randn(12, 3)
    ranks = OPS.cp_to_rank_order(x, CU, world)
    assert torch.equal(ranks, x[torch.cat(parts)])
    assert torch.equal(OPS.cp_to_sequence_order(ranks, CU, world), x)


def test_copy_of_valid_tokens() -> None:
    x, out = torch.randn(12, 3), torch.zeros(12, 3)
    OPS.cp_copy_valid(x, out, CU, torch.tensor([0, 5, 6], dtype=torch.int32))
    want = torch.zeros(12, 3)
    want[:5], want[8] = x[:5], x[8]
    assert torch.equal(out, want)


def test_parts_that_differ_are_named() -> None:
    o, lse = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 2)
    with pytest.raises(RuntimeError, match="o, lse is of different shapes"):
        OPS.merge([o, o[:, :1]], [lse, lse])
