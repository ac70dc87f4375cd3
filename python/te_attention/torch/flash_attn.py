"""The functions of the package flash-attn with its arguments and conventions.

    from te_attention.torch.flash_attn import flash_attn_func, flash_attn_varlen_func

Tensors are [batch, seqlen, heads, dim], causal masks, windows and ALiBi count from the last query
and the last key, and rows that attend to no key are 0. On the CPU and on GPUs, in every dtype and
head dim that attention() takes. What differs: return_attn_probs returns None in place of the
probabilities, which are never in memory.
"""

import torch
from torch import Tensor

from te_attention.torch._library import OPS
from te_attention.torch.functional import attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)
Output = Tensor | tuple[Tensor, Tensor, None]


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, object]:
    """The arguments of attention() for these."""
    left, right = (None if bound < 0 else bound for bound in window_size)
    return {
        "mask": "causal_bottom_right" if causal else "bottom_right",
        "window": None if left is right is None else (left, None if causal else right),
        "softcap": softcap,
        "scale": softmax_scale,
        "alibi": False if alibi_slopes is None else alibi_slopes,
    }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """O [b, sq, heads, d] of q [b, sq, heads, d] and k, v [b, sk, heads_kv, d].

    With return_attn_probs also LSE float32 [b, heads, sq], and None.
    """
    output = attention(
        *(q, k, v),
        **_options(softmax_scale, causal, window_size, softcap, alibi_slopes),
        dropout=dropout_p,
        format="bshd",
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
    )
    return (*output, None) if return_attn_probs else output


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments, **options) -> Output:
    """flash_attn_func() of kv [b, sk, 2, heads_kv, d]."""
    return flash_attn_func(q, *kv.unbind(-3), *arguments, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments, **options) -> Output:
    """flash_attn_func() of qkv [b, s, 3, heads, d]; the gradient is one tensor, without a copy."""
    return flash_attn_func(*qkv.unbind(-3), *arguments, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """O [tokens, heads, d] of ragged q [tokens, heads, d] and k, v [tokens, heads_kv, d].

    With block_table int32 [b, pages], k and v are pools [pages, page_size, heads_kv, d], of any
    page size. With return_attn_probs also LSE float32 [heads, tokens], and None.
    """
    output = attention(
        *(q, k, v),
        **_options(softmax_scale, causal, window_size, softcap, alibi_slopes),
        dropout=dropout_p,
        format="thd",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k,
        page_table=block_table,
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
    )
    return (output[0], output[1].mT, None) if return_attn_probs else output


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments, **options) -> Output:
    """flash_attn_varlen_func() of kv [tokens, 2, heads_kv, d]."""
    return flash_attn_varlen_func(q, *kv.unbind(-3), *arguments, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *arguments, **options
) -> Output:
    """flash_attn_varlen_func() of qkv [tokens, 3, heads, d]."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(*qkv.unbind(-3), *lengths, *arguments, **options)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """x [b, s, heads, d] with rotary embeddings for the positions `at` [b, s]."""
    half = cos.shape[-1]
    cos, sin = (table[at].unsqueeze(2).to(torch.float32) for table in (cos, sin))
    turned, rest = x[..., : 2 * half].to(torch.float32), x[..., 2 * half :]
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2)
    return torch.cat((both.flatten(-2).to(x.dtype), rest), -1)


def _with_rotary(
    q: Tensor,
    k: Tensor | None,
    tables: tuple[Tensor, Tensor],
    lengths: Tensor,
    is_local: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor | None]:
    """q and the new k with rotary embeddings; all queries are at one position without a mask."""
    steps = torch.arange(q.shape[1], device=q.device)
    at = lengths[:, None] + (steps if is_local else steps * 0)
    q = _rotated(q, *tables, at, interleaved)
    if k is not None:
        steps = torch.arange(k.shape[1], device=q.device)
        k = _rotated(k, *tables, lengths[:, None] + steps, interleaved)
    return q, k


def _require_both(**pair: Tensor | None) -> None:
    given = [name for name, value in pair.items() if value is not None]
    if len(given) == 1:
        raise ValueError(f"{given[0]} is given without the other of {', '.join(pair)}")


def _table(q: Tensor, block_table: Tensor | None, rows: Tensor | None) -> Tensor:
    """A page table; without one the rows of the cache are pages of one sequence each."""
    if block_table is not None:
        if rows is not None:
            raise ValueError("cache_batch_idx is given with block_table; needs one of the two")
        return block_table.to(torch.int32)
    if rows is None:
        rows = torch.arange(q.shape[0], device=q.device)
    return rows.to(torch.int32)[:, None].contiguous()


def _raise_for_length(
    error: RuntimeError, lengths: Tensor, new: int, table: Tensor, cache: Tensor
) -> None:
    """Raises for the first length of the cache that leaves no place for the new tokens."""
    if "out of range" not in str(error):
        return
    most = table.shape[1] * cache.shape[1] - new
    for i, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise RuntimeError(
                f"cache_seqlens[{i}] is {length}, before {new} new tokens; needs from 0 to {most}"
            ) from None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """O [b, sq, heads, d] of q with a cache [b_cache, s_cache, heads_kv, d], or pages of it.

    New k and v [b, s_new, heads_kv, d] are written to the cache first, behind cache_seqlens tokens.
    Inference only. cache_batch_idx int32 [b] chooses the rows of the cache without a copy.
    num_splits is accepted for every value: the engines split as they need.

    Raises:
        ValueError: cache_leftpad is given, or only one of k and v, or of the rotary tables, or k
            without cache_seqlens.
    """
    if cache_leftpad is not None:
        raise ValueError("cache_leftpad is given; needs None: pages begin at the first token")
    if num_splits < 0:
        raise ValueError(f"num_splits is {num_splits}; needs 0 or more")
    _require_both(k=k, v=v)
    _require_both(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    batch, table = q.shape[0], _table(q, block_table, cache_batch_idx)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens is None; needs the tokens before those of k")
        cache_seqlens = table.shape[1] * k_cache.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    lengths = cache_seqlens.to(torch.int32)
    with torch.no_grad():
        if rotary_cos is not None:
            local, tables = causal or window_size != NO_WINDOW, (rotary_cos, rotary_sin)
            q, k = _with_rotary(q, k, tables, lengths, local, rotary_interleaved)
        if k is not None:
            steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
            lengths = lengths + k.shape[1]
            cu_new, cu_cached = steps * k.shape[1], OPS.cu_seqlens_from_lengths.default(lengths)
            try:
                OPS.kv_cache_append.default(k, v, k_cache, v_cache, table, cu_new, cu_cached)
            except RuntimeError as error:
                _raise_for_length(error, lengths - k.shape[1], k.shape[1], table, k_cache)
                raise
        return attention(
            *(q, k_cache, v_cache),
            **_options(softmax_scale, causal, window_size, softcap, alibi_slopes),
            format="bshd",
            cu_seqlens_kv=OPS.cu_seqlens_from_lengths.default(lengths),
            page_table=table,
            return_lse=return_softmax_lse,
        )
