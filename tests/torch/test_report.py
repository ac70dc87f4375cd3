"""Invalid lengths, pages and origins are refused on the CPU after the run."""

import os
import subprocess
import sys

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch._library import OPS

T = torch.randn(12, 2, 16)
CU = torch.tensor([0, 6, 12], dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS = {
    r"cu_seqlens_q\[2\] is 4; needs at least cu_seqlens_q\[1\], which is 8": {
        "cu_seqlens_q": ints(0, 8, 4)
    },
    r"cu_seqlens_kv\[2\] is 13; needs at most the 12 tokens of k": {
        "cu_seqlens_kv": ints(0, 6, 13)
    },
    "max_seqlen_kv is 4; needs at least 6, the length of sequence 0 in cu_seqlens_kv": {
        "max_seqlen_kv": 4
    },
    r"cu_seqlens_q\[0\] is -3; needs 0 or more": {"cu_seqlens_q": ints(-3, 6, 12)},
    r"offsets_q\[1\] is 9, for 6 tokens; needs at most the 12 tokens of q": {
        "offsets_q": ints(0, 9, 12),
        "offsets_kv": ints(0, 9, 12),
    },
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("text", LENGTHS)
def test_lengths_that_cannot_be_are_refused(text: str, differentiable: bool) -> None:
    t = T.clone().requires_grad_(differentiable)
    good = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}
    tea.attention(t, t, t, **good)
    with pytest.raises(RuntimeError, match=text):
        tea.attention(t, t, t, **{**good, **LENGTHS[text]})


def test_padded_lengths_beyond_the_rows_are_refused() -> None:
    q = torch.randn(2, 2, 6, 16)
    with pytest.raises(
        RuntimeError, match=r"q\[2\] is 13, a length of 7; needs at most the 6 rows"
    ):
        tea.attention(q, q, q, cu_seqlens_q=ints(0, 6, 13), cu_seqlens_kv=CU)


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    pool = torch.randn(3, 4, 2, 16)
    table = torch.tensor([[0, 1], [2, page]], dtype=torch.int32)
    options = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "page_table": table}
    with pytest.raises(RuntimeError, match=rf"page_table\[1, 1\] is {page}; needs a page of k, 0"):
        tea.attention(T, pool, pool, **options)


def test_an_origin_below_zero_is_refused() -> None:
    q = torch.randn(1, 2, 6, 16)
    with pytest.raises(RuntimeError, match=r"origin\[2\] is -1; needs from 0 to 2\^40"):
        tea.attention(q, q, q, origin=torch.tensor([0, 0, -1, 0]))


def test_supporting_operations_refuse_too() -> None:
    with pytest.raises(RuntimeError, match="cu_seqlens is out of range in part"):
        OPS.thd_to_bshd(T, ints(0, 8, 4), None, 6)
    with pytest.raises(RuntimeError, match="lengths is out of range in part"):
        OPS.cu_seqlens_from_lengths(ints(3, -1))


@pytest.mark.gpu
def test_on_a_gpu_it_is_clamped_without_a_wait() -> None:
    t, cu, bad = T.cuda(), CU.cuda(), ints(0, 8, 4).cuda()
    tea.attention(t, t, t, format="thd", cu_seqlens_q=bad, cu_seqlens_kv=cu)


PROGRAM = """
import torch
from te_attention import torch as tea

t = torch.randn(12, 2, 16, device="cuda", dtype=torch.bfloat16)
cu, bad = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 6, 12], [0, 8, 4]))
tea.attention(t, t, t, format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
try:
    tea.attention(t, t, t, format="thd", cu_seqlens_q=bad, cu_seqlens_kv=cu)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.gpu
def test_on_a_gpu_it_is_refused_where_that_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TE_ATTENTION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cu_seqlens_q[2] is 4; needs at least cu_seqlens_q[1], which is 8" in done.stdout
