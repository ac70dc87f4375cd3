"""torch.nn.attention.varlen.varlen_attn with its arguments, on the CPU and on GPUs.

from te_attention.torch.varlen import varlen_attn
"""

from typing import NamedTuple

from torch import Tensor

from te_attention.torch.functional import attention


class AuxRequest(NamedTuple):
    """The additional results of varlen_attn()."""

    lse: bool = False


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor | tuple[Tensor, Tensor]:
    """O [tokens, heads, d] of ragged query, key and value [tokens, heads, d].

    window_size: (left, right) columns around the diagonal that ends at the last key; -1: no bound;
    (-1, 0) is causal. Keys and values may have fewer heads than queries. With return_aux.lse also
    LSE float32 [tokens, heads].
    """
    left, right = (None if bound < 0 else bound for bound in window_size)
    wants_lse = return_aux is not None and return_aux.lse
    return attention(
        *(query, key, value),
        mask="causal_bottom_right" if right == 0 else "bottom_right",
        window=None if left is right is None else (left, None if right == 0 else right),
        scale=scale,
        format="thd",
        cu_seqlens_q=cu_seq_q,
        cu_seqlens_kv=cu_seq_k,
        max_seqlen_q=max_q,
        max_seqlen_kv=max_k,
        return_lse=wants_lse,
    )
