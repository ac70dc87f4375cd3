"""xformers' memory_efficient_attention with its arguments and its classes of masks.

    import te_attention.torch.xformers as xops
    y = xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask())

`fmha` is this module, for programs that import it from xformers.ops. Tensors are
[batch, seqlen, heads, dim], [batch, seqlen, dim], or [batch, seqlen, groups, heads, dim]: keys and
values that are expanded over the heads of a group are read once. Block-diagonal masks make ragged
batches; no mask is a tensor in memory but one that the caller gives.
"""

import sys

import torch
from torch import Tensor

from te_attention.torch._xformers_masks import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from te_attention.torch.functional import attention

fmha = attn_bias = sys.modules[__name__]

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "attn_bias",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]


def _four_dimensional(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, s, heads, d] each, of any of xformers' three forms."""
    if not 3 <= q.dim() <= 5 or not q.dim() == k.dim() == v.dim():
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        raise ValueError(f"query, key, value are of shape {shapes}; needs 3 to 5 dimensions alike")
    if q.dim() == 3:
        return q[:, :, None], k[:, :, None], v[:, :, None]
    if q.dim() == 4:
        return q, k, v
    if all(t.shape[3] == 1 or t.stride(3) == 0 for t in (k, v)):
        return q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


def _run(query, key, value, bias, p, scale, return_lse) -> Tensor | tuple[Tensor, ...]:
    q, k, v = _four_dimensional(query, key, value)
    if bias is None:
        options = {}
    elif isinstance(bias, AttentionBias):
        options = bias.options(q)
    elif isinstance(bias, Tensor):
        full = bias.flatten(1, 2) if bias.dim() == 5 else bias
        options = {"bias": full[:, None] if query.dim() == 3 and full.dim() == 3 else full}
    else:
        raise TypeError(
            f"attn_bias is of type {type(bias).__name__}; needs a tensor or a mask of "
            "te_attention.torch.xformers"
        )
    ragged = "cu_seqlens_q" in options
    if ragged and not q.shape[0] == k.shape[0] == v.shape[0] == 1:
        raise ValueError(
            f"query is of shape {list(query.shape)}; needs [1, tokens, ...] with "
            f"{type(bias).__name__}"
        )
    tensors = [t[0] for t in (q, k, v)] if ragged else [q, k, v]
    out = attention(
        *tensors,
        **options,
        dropout=p,
        scale=scale,
        format="thd" if ragged else "bshd",
        return_lse=return_lse,
    )
    o, lse = out if return_lse else (out, None)
    if ragged:
        o, lse = o[None], None if lse is None else lse.mT[None]
    o = o.reshape(*query.shape[:-1], o.shape[-1])
    return (o, lse) if return_lse else o


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """O in the shape of query with the head dim of value, with gradients.

    attn_bias: a tensor that is added to the scores, with a gradient, or a mask. `op` must be None:
    te_attention chooses the engine.
    """
    if op is not None:
        raise ValueError("op is given; needs None: te_attention chooses the engine")
    o = _run(query, key, value, attn_bias, p, scale, False)
    return o if output_dtype is None else o.to(output_dtype)


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """memory_efficient_attention() without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(
            *(query, key, value, attn_bias, p, scale), op=op, output_dtype=output_dtype
        )


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
) -> tuple[Tensor, Tensor]:
    """O and LSE float32 [batch, heads, rows], without gradients."""
    if op is not None:
        raise ValueError("op is given; needs None: te_attention chooses the engine")
    with torch.no_grad():
        return _run(query, key, value, attn_bias, p, scale, True)
