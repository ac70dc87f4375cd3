"""KV caches, and ragged against padded batches."""

import pytest
import torch

from te_attention.torch._library import OPS

LENGTHS = [3, 0, 5]
CU = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


def test_thd_to_bshd_and_back() -> None:
    thd = torch.randn(8, 2, 16)
    bshd = OPS.thd_to_bshd(thd, CU, None, 6)
    assert bshd.shape == (3, 6, 2, 16)
    for i, n in enumerate(LENGTHS):
        assert torch.equal(bshd[i, :n], thd[CU[i] : CU[i] + n])
        assert not bshd[i, n:].any()
    assert torch.equal(OPS.bshd_to_thd(bshd, CU, None, 8), thd)


def test_thd_with_gaps_reads_from_the_offsets() -> None:
    thd = torch.randn(12, 2, 8)
    offsets = torch.tensor([1, 5, 7, 12], dtype=torch.int32)
    bshd = OPS.thd_to_bshd(thd, CU, offsets, 5)
    assert torch.equal(bshd[2, :5], thd[7:12])


def test_cu_seqlens_from_lengths_and_from_a_mask() -> None:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    assert torch.equal(OPS.cu_seqlens_from_lengths(lengths), CU)
    tokens = torch.arange(6)[None] < lengths[:, None]
    assert torch.equal(OPS.cu_seqlens_from_mask(tokens, True), CU)
    assert torch.equal(OPS.cu_seqlens_from_mask(~tokens, False), CU)


def test_append_writes_the_pages_of_the_table() -> None:
    k_cache, v_cache = torch.zeros(4, 2, 1, 8), torch.zeros(4, 2, 1, 16)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    new_k, new_v = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 16)
    cu_new = torch.tensor([0, 2, 3], dtype=torch.int32)
    cu_cached = torch.tensor([0, 3, 4], dtype=torch.int32)  # lengths 3 and 1, the new included
    OPS.kv_cache_append(new_k, new_v, k_cache, v_cache, table, cu_new, cu_cached)
    assert torch.equal(k_cache[3, 1], new_k[0, 0])  # position 1 of sequence 0
    assert torch.equal(k_cache[1, 0], new_k[0, 1])  # position 2
    assert torch.equal(v_cache[0, 0], new_v[1, 0])  # position 0 of sequence 1
    assert int((k_cache != 0).any(-1).sum()) == 3


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"thd is of shape \[8, 2\]; needs 3 dimensions"):
        OPS.thd_to_bshd(torch.zeros(8, 2), CU, None, 6)
    with pytest.raises(RuntimeError, match=r"lengths.dtype is int64; needs int32"):
        OPS.cu_seqlens_from_lengths(torch.tensor(LENGTHS))


def test_new_tokens_that_do_not_fit_the_caches_are_named() -> None:
    cache, table = torch.zeros(4, 2, 1, 8), torch.zeros(1, 2, dtype=torch.int32)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    half, wide = torch.zeros(1, 1, 1, 8, dtype=torch.float16), torch.zeros(1, 1, 2, 8)
    with pytest.raises(
        RuntimeError, match=r"new_k.dtype is float16; needs that of k_cache, float3"
    ):
        OPS.kv_cache_append(half, half, cache, cache, table, cu, cu)
    with pytest.raises(RuntimeError, match=r"needs heads and dims of the caches, \[4, 2, 1, 8\]"):
        OPS.kv_cache_append(wide, wide, cache, cache, table, cu, cu)


@pytest.mark.parametrize("name", ["append", "to bshd", "to thd"])
def test_tensors_expanded_in_every_dimension_are_refused(name: str) -> None:
    """Strides that are all zero mean contiguous memory in the C API, which is not there."""
    row = torch.randn(8)
    cache = torch.zeros(4, 2, 2, 8)
    table, two = torch.arange(2, dtype=torch.int32).view(2, 1), torch.tensor([0, 2, 4]).int()
    calls = {
        "append": lambda: OPS.kv_cache_append(
            *[row.expand(2, 2, 2, 8)] * 2, cache, cache.clone(), table, two, two
        ),
        "to bshd": lambda: OPS.thd_to_bshd(row.expand(8, 2, 8), CU, None, 6),
        "to thd": lambda: OPS.bshd_to_thd(row.expand(3, 6, 2, 8), CU, None, 8),
    }
    with pytest.raises(RuntimeError, match="is expanded in every dimension; needs memory"):
        calls[name]()


@pytest.mark.parametrize("shape", [(2, 0), (1, 1), (2, 1, 1), ()])
def test_a_page_table_without_a_row_of_pages_for_each_sequence_is_refused(shape: tuple) -> None:
    new, cache = torch.randn(2, 2, 2, 8), torch.zeros(4, 2, 2, 8)
    two = torch.tensor([0, 2, 4]).int()
    table = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"page_table is of shape .*; needs a row of pages"):
        OPS.kv_cache_append(new, new, cache, cache.clone(), table, two, two)


@pytest.mark.parametrize("to_bshd", [False, True])
def test_offsets_of_fewer_sequences_are_refused(to_bshd: bool) -> None:
    with pytest.raises(RuntimeError, match=r"offsets is of shape \[2\]; needs the first token"):
        if to_bshd:
            OPS.thd_to_bshd(torch.randn(8, 2, 8), CU, CU[:2], 6)
        else:
            OPS.bshd_to_thd(torch.randn(3, 6, 2, 8), CU, CU[:2], 8)
