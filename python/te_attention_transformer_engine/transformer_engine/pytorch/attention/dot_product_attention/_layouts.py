"""Layouts of q, k and v in memory, derived from their strides and addresses."""

from functools import cache, lru_cache
from itertools import pairwise

from torch import Tensor

from transformer_engine.pytorch._refusal import refuse

FORMATS = ("sbhd", "bshd", "thd")
_SEPARATE = {form: f"{form}_{form}_{form}" for form in FORMATS}


@lru_cache(maxsize=1024)
def formats_of(qkv_layout: str) -> tuple[str, str]:
    """The formats of q, and of k and v."""
    parts = qkv_layout.removeprefix("paged_kv_").split("_")
    q, kv = ("".join(c for c in part if c.isalpha()) for part in (parts[0], parts[-1]))
    return q, kv


def first(tensor: Tensor, count: int) -> Tensor:
    """tensor[:count], or the tensor itself if it has that length: a view takes two microseconds."""
    return tensor if tensor.shape[0] == count else tensor[:count]


def pages_of(inference_params: object, cu_seqlens: Tensor) -> Tensor | None:
    """The rows of a paged KV cache's page table for the sequences of a call, or None."""
    if inference_params is None or not inference_params.is_paged:
        return None
    return first(inference_params.cache_manager.page_table, cu_seqlens.shape[0] - 1)


def is_packed(qkv_layout: str) -> bool:
    """Whether the layout interleaves tensors in one buffer."""
    return "2" in qkv_layout or "3" in qkv_layout


def get_qkv_format(qkv_layout: str, inference_params: object = None) -> tuple[str, str, str]:
    """The format of a layout: (of all tensors, of q, of k and v)."""
    q, kv = formats_of(qkv_layout)
    if inference_params is None:
        return q, q, q
    return q if q == kv else f"{q}_2{kv}", q, kv


def _has_strides(tensor: Tensor, row: int, head: int) -> bool:
    """Whether the strides of rows and heads are `row` and `head` elements."""
    *rows, heads, dim = tensor.shape
    if (heads > 1 and tensor.stride(-2) != head) or (dim > 1 and tensor.stride(-1) != 1):
        return False
    for i in range(len(rows) - 1, -1, -1):
        if rows[i] > 1 and tensor.stride(i) != row:
            return False
        row *= rows[i]
    return True


def _step(a: Tensor, b: Tensor) -> int | None:
    """The elements from the start of a to the start of b, or None for different storages."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    return b.storage_offset() - a.storage_offset()


def _packing(count: int, *tensors: Tensor) -> str | None:
    """ "3hd" or "h3d" (or with 2) if the tensors are interleaved in one buffer, else None."""
    first = tensors[0]
    if any(t.shape != first.shape for t in tensors):
        return None
    steps = {_step(a, b) for a, b in pairwise(tensors)}
    heads, dim = first.shape[-2:]
    for name, step, head in ((f"{count}hd", heads * dim, dim), (f"h{count}d", dim, count * dim)):
        if steps == {step} and all(_has_strides(t, count * heads * dim, head) for t in tensors):
            return name
    return None


def _layout(q: Tensor, k: Tensor, v: Tensor, form: str) -> str:
    rows = form[:-2]
    if packing := _packing(3, q, k, v):
        return rows + packing
    if packing := _packing(2, k, v):
        return f"{form}_{rows}{packing}"
    return _SEPARATE[form]


def maybe_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, copied only if its last stride is not 1."""
    dense = tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return tensor if dense else tensor.contiguous()


@cache
def _cache_layout(qkv_format: str, paged: bool) -> tuple[str, str, str]:
    """The layout with a KV cache, and the formats of q and of the cache."""
    q_format, _, kv_format = qkv_format.partition("_2")
    kv_format = kv_format or q_format
    if q_format not in FORMATS or kv_format not in FORMATS:
        refuse("qkv_format", repr(qkv_format), "sbhd, bshd or thd, or two of them as in thd_2bshd")
    layout = f"{q_format}_{kv_format}_{kv_format}"
    return f"paged_kv_{layout}" if paged else layout, q_format, kv_format


def get_qkv_layout(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str = "sbhd", inference_params: object = None
) -> tuple[str, Tensor, Tensor, Tensor, str, str]:
    """(layout, q, k, v, format of q, format of k and v).

    Tensors are returned unchanged, because the kernels take strides; a tensor is copied only if its
    last stride is not 1. The layout of tensors that are not interleaved is "sbhd_sbhd_sbhd".
    """
    if inference_params is None:
        separate = _SEPARATE.get(qkv_format)
        if separate and q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
            return separate, q, k, v, qkv_format, qkv_format
    q, k, v = maybe_contiguous(q), maybe_contiguous(k), maybe_contiguous(v)
    if inference_params is None:
        if qkv_format not in FORMATS:
            refuse("qkv_format", repr(qkv_format), "sbhd, bshd or thd")
        return _layout(q, k, v, qkv_format), q, k, v, qkv_format, qkv_format
    layout, *formats = _cache_layout(qkv_format, getattr(inference_params, "is_paged", False))
    return layout, q, k, v, *formats
