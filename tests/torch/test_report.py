"""Nonsense in lengths, pages and origins is refused on the CPU, where it is known after the run."""

import os
import subprocess
import sys

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch._library import OPS

T = torch.randn(12, 2, 16)
CU = torch.tensor([0, 6, 12], dtype=torch.int32)
NAMES = "cu_seqlens_q, cu_seqlens_kv or their offsets is out of range in part; needs lengths"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


LENGTHS = {
    "decreasing": {"cu_seqlens_q": ints(0, 8, 4)},
    "beyond the tokens": {"cu_seqlens_kv": ints(0, 6, 13)},
    "beyond max_seqlen": {"max_seqlen_kv": 4},
    "negative": {"cu_seqlens_q": ints(-3, 6, 12)},
    "offsets": {"offsets_q": ints(0, 9, 12), "offsets_kv": ints(0, 9, 12)},
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_cannot_be_are_refused(name: str, differentiable: bool) -> None:
    t = T.clone().requires_grad_(differentiable)
    good = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}
    tea.attention(t, t, t, **good)
    with pytest.raises(RuntimeError, match=NAMES):
        tea.attention(t, t, t, **{**good, **LENGTHS[name]})


def test_padded_lengths_beyond_the_rows_are_refused() -> None:
    q = torch.randn(2, 2, 6, 16)
    with pytest.raises(RuntimeError, match=NAMES):
        tea.attention(q, q, q, cu_seqlens_q=ints(0, 6, 13), cu_seqlens_kv=CU)


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    pool = torch.randn(3, 4, 2, 16)
    table = torch.tensor([[0, 1], [2, page]], dtype=torch.int32)
    options = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "page_table": table}
    with pytest.raises(RuntimeError, match="page_table is out of range in part; needs numbers of"):
        tea.attention(T, pool, pool, **options)


def test_an_origin_below_zero_is_refused() -> None:
    q = torch.randn(1, 2, 6, 16)
    with pytest.raises(RuntimeError, match="origin is out of range in part; needs numbers from 0"):
        tea.attention(q, q, q, origin=torch.tensor([0, 0, -1, 0]))


def test_neighbours_refuse_too() -> None:
    with pytest.raises(RuntimeError, match="cu_seqlens is out of range in part"):
        OPS.thd_to_bshd(T, ints(0, 8, 4), None, 6)
    with pytest.raises(RuntimeError, match="lengths is out of range in part"):
        OPS.cu_seqlens_from_lengths(ints(3, -1))


@pytest.mark.gpu
def test_on_a_gpu_it_is_clamped_and_nobody_waits() -> None:
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
    assert NAMES in done.stdout
