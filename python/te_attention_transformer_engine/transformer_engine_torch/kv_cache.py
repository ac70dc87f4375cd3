"""KV caches, and conversion between ragged and padded batches."""

import operator

from torch import Tensor

from te_attention.torch.operators import ops
from transformer_engine_torch.enums import NVTE_QKV_Format

_append, _to_bshd, _to_thd = (
    ops.kv_cache_append.default,
    ops.thd_to_bshd.default,
    ops.bshd_to_thd.default,
)

# Names of this module, because the lookup of an enum's member is slow.
_SBHD, _BSHD, _THD = (
    NVTE_QKV_Format.NVTE_SBHD,
    NVTE_QKV_Format.NVTE_BSHD,
    NVTE_QKV_Format.NVTE_THD,
)


def _of_batch(name: str, prefix_sums: Tensor, batch: int) -> Tensor:
    """The first batch + 1 entries. Buffers for CUDA graphs are as long as the largest batch."""
    (entries,) = prefix_sums.shape
    if entries == batch + 1:
        return prefix_sums
    if entries <= batch:
        raise ValueError(f"{name} has {entries} entries; needs batch + 1, {batch + 1}")
    return prefix_sums[: batch + 1]


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int, /) -> Tensor:
    """[b, max_seq_len, h, d], zero past each sequence."""
    cu_seqlens = _of_batch("cu_seqlens", cu_seqlens, b)
    return _to_bshd(tensor, cu_seqlens, None, operator.index(max_seq_len))


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int, /) -> Tensor:
    """[t, h, d], zero past the last sequence."""
    cu_seqlens = _of_batch("cu_seqlens", cu_seqlens, tensor.shape[0])
    return _to_thd(tensor, cu_seqlens, None, operator.index(t))


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: NVTE_QKV_Format,
    b: int,
    max_ctx_len: int,
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
    /,
) -> None:
    """Appends new tokens to caches whose lengths, cu_cached_lens, include them already.

    With is_non_paged, page_table lists the rows of the cache that contain the sequences; these rows
    are moved to rows 0, 1, ... first.
    """
    if qkv_format not in (_SBHD, _BSHD, _THD):
        raise ValueError(f"qkv_format is {qkv_format!r}; needs NVTE_SBHD, NVTE_BSHD or NVTE_THD")
    slots = k_cache.shape[1] * max_pages_per_seq
    if max_seq_len != slots:
        raise ValueError(
            f"max_seq_len is {max_seq_len}; needs {slots}: {max_pages_per_seq} pages of "
            f"{k_cache.shape[1]} slots"
        )
    if qkv_format == _SBHD:
        new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
    if qkv_format != _THD and new_k.shape[:2] != (b, max_ctx_len):
        raise ValueError(
            f"b and max_ctx_len are {b} and {max_ctx_len}; needs the sequences and tokens of "
            f"new_k, {tuple(new_k.shape[:2])}"
        )
    cu_new_lens = _of_batch("cu_new_lens", cu_new_lens, b)
    cu_cached_lens = _of_batch("cu_cached_lens", cu_cached_lens, b)
    lens = (page_table, cu_new_lens, cu_cached_lens)
    _append(new_k, new_v, k_cache, v_cache, *lens, bool(is_non_paged))
