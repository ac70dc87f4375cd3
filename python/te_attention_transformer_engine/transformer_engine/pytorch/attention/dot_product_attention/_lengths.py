"""Lengths of sequences: prefix sums, padding masks, and conversion between thd and bshd."""

import torch
from torch import Tensor

from te_attention.torch.operators import ops
from transformer_engine.pytorch.graph import is_graph_capturing

_full: dict[tuple, Tensor] = {}
_MOST_FULL = 256


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device) -> Tensor:
    """Prefix sums of full sequences: one cached tensor for each size and device."""
    key = (batch_size, max_seqlen, device)
    found = _full.get(key)
    if found is None:
        with torch.inference_mode(False):  # otherwise no later backward pass could use it
            found = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen
        if not is_graph_capturing():  # memory allocated during capture belongs to the graph
            if len(_full) >= _MOST_FULL:
                _full.clear()
            _full[key] = found
    return found


def get_cu_seqlens(mask: Tensor) -> Tensor:
    """Prefix sums of the lengths that a padding mask [b, 1, 1, s] leaves (True: padding)."""
    return ops.cu_seqlens_from_mask(mask.flatten(1).contiguous(), False)


def get_cu_seqlens_and_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """get_cu_seqlens(), and the positions of the tokens in [b * s], as get_indices()."""
    cu_seqlens = get_cu_seqlens(mask)
    return cu_seqlens, get_indices(mask.shape[-1], cu_seqlens)


def get_indices(max_seqlen: int, cu_seqlens: Tensor) -> Tensor:
    """Positions of the tokens in [b * max_seqlen], padded with b * max_seqlen.

    Returns [b * max_seqlen, 1, 1].
    """
    hidden = _hidden(cu_seqlens, max_seqlen).flatten()
    places = torch.arange(hidden.numel(), device=cu_seqlens.device)
    # Sorting, unlike selecting, does not need the number of tokens on the host.
    return places.masked_fill(hidden, hidden.numel()).sort().values.view(-1, 1, 1)


def _hidden(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """bool [b, 1, 1, max_seqlen]: True past the length."""
    row = torch.arange(max_seqlen, dtype=torch.int32, device=cu_seqlens.device)
    return row.view(1, 1, 1, -1) >= cu_seqlens.diff().view(-1, 1, 1, 1)


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attention_type: str = "self",
) -> Tensor | tuple[Tensor, Tensor]:
    """bool [b, 1, 1, s], True for padding; for cross attention a pair, for q and for k."""
    q = _hidden(cu_seqlens_q[: batch_size + 1], max_seqlen_q)
    if attention_type == "self":
        return q
    return q, _hidden(cu_seqlens_kv[: batch_size + 1], max_seqlen_kv)


class PackTensors(torch.autograd.Function):
    """Packs tensors [b * s, h, d] by get_indices(): the tokens, followed by zeros."""

    @staticmethod
    def forward(ctx, indices: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.indices, ctx.rows = indices, tensors[0].shape[0]
        packed = tuple(_gather(t, indices) for t in tensors)
        return packed[0] if len(packed) == 1 else packed

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_scatter(g, ctx.indices, ctx.rows) for g in gradients)


class UnpackTensor(torch.autograd.Function):
    """The inverse of PackTensors: a tensor of dim0 rows, with zeros for padding."""

    @staticmethod
    def forward(ctx, indices: Tensor, dim0: int, tensor: Tensor) -> Tensor:
        ctx.indices = indices
        return _scatter(tensor, indices, dim0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, _gather(gradient, ctx.indices)


def _gather(tensor: Tensor, indices: Tensor) -> Tensor:
    padded = torch.cat([tensor, tensor.new_zeros((1, *tensor.shape[1:]))])
    return padded[indices.flatten()]


def _scatter(tensor: Tensor, indices: Tensor, rows: int) -> Tensor:
    out = tensor.new_zeros((rows + 1, *tensor.shape[1:]))
    out[indices.flatten()] = tensor  # all padding is written to the last row
    return out[:rows]


class ConvertTHDtoBSHD(torch.autograd.Function):
    """[t, h, d] to [b, max_seqlen, h, d], zeros past the lengths."""

    @staticmethod
    def forward(
        ctx, thd: Tensor, cu_seqlens: Tensor, max_seqlen: int, offsets: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(cu_seqlens, offsets)
        ctx.tokens = thd.shape[0]
        return ops.thd_to_bshd(thd, cu_seqlens, offsets, max_seqlen)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cu_seqlens, offsets = ctx.saved_tensors
        thd = ops.bshd_to_thd(gradient.contiguous(), cu_seqlens, offsets, ctx.tokens)
        return thd, None, None, None


class ConvertBSHDtoTHD(torch.autograd.Function):
    """The inverse. If `tokens` is None, their number is read from the device."""

    @staticmethod
    def forward(
        ctx,
        bshd: Tensor,
        cu_seqlens: Tensor,
        tokens: int | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(cu_seqlens, offsets)
        ctx.rows = bshd.shape[1]
        tokens = int(cu_seqlens[-1]) if tokens is None else tokens
        return ops.bshd_to_thd(bshd, cu_seqlens, offsets, tokens)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cu_seqlens, offsets = ctx.saved_tensors
        bshd = ops.thd_to_bshd(gradient.contiguous(), cu_seqlens, offsets, ctx.rows)
        return bshd, None, None, None
