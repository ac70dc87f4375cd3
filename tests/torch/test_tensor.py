"""Devices, dtypes and memory that do not fit together are refused by name."""

import pytest
import torch

from te_attention.torch._library import OPS


def test_a_tensor_with_gaps_where_none_may_be() -> None:
    lengths = torch.zeros(8, dtype=torch.int32)[::2]
    with pytest.raises(RuntimeError, match="lengths is not contiguous; needs a contiguous tensor"):
        OPS.cu_seqlens_from_lengths(lengths)


def test_a_dtype_of_another_kind() -> None:
    with pytest.raises(RuntimeError, match=r"rng_state\.dtype is int32; needs int64"):
        OPS.rng_fill(torch.zeros(2, dtype=torch.int32), 1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_dtype_of_q(dtype: torch.dtype) -> None:
    q = torch.randn(1, 1, 2, 8, dtype=dtype)
    o, lse, _ = OPS.forward(q, q, q)
    statistic = torch.float64 if dtype == torch.float64 else torch.float32
    assert (o.dtype, lse.dtype) == (dtype, statistic)


def test_integers_are_no_queries() -> None:
    q = torch.zeros(1, 1, 2, 8, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"q\.dtype is int32; needs float16"):
        OPS.forward(q, q, q)
