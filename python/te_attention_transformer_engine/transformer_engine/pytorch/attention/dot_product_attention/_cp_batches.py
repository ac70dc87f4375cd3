"""Ragged batches for context parallelism: padding, positions, and the share of a rank."""

import torch
from torch import Tensor

from transformer_engine.pytorch._refusal import require


def _lengths(cu_seqlens: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Lengths, and the same rounded up to multiples of `factor`."""
    require(factor > 0, "divisibility_factor", factor, "1 or more")
    lengths = cu_seqlens.diff()
    return lengths, (lengths + factor - 1) // factor * factor


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pads each sequence to a multiple of `divisibility_factor` tokens.

    Args:
        input_ids, labels: ``[tokens]`` or ``[1, tokens]``.
        cu_seqlens: ``[batch + 1]``: where each sequence starts; the last entry is `tokens`.
        divisibility_factor: with context parallelism 2 * ranks.
        padding_token_id, padding_label_id: what padding holds.

    Returns:
        Padded ids and labels, ``[padded tokens]``, and cu_seqlens of the padded sequences.
    """
    lengths, padded = _lengths(cu_seqlens, divisibility_factor)
    cu_padded = torch.zeros_like(cu_seqlens)
    cu_padded[1:] = padded.cumsum(0)
    ids, words = input_ids.reshape(-1), labels.reshape(-1)
    tokens = int(cu_seqlens[-1])
    for name, tensor in (("input_ids", ids), ("labels", words)):
        require(tensor.numel() == tokens, name, f"of {tensor.numel()} tokens", f"{tokens}")
    shifts = (cu_padded - cu_seqlens)[:-1].long().repeat_interleave(lengths.long())
    places = torch.arange(tokens, device=ids.device) + shifts
    total = int(cu_padded[-1])
    out = []
    for tensor, filler in ((ids, padding_token_id), (words, padding_label_id)):
        full = tensor.new_full((total,), filler)
        full[places] = tensor
        out.append(full)
    return *out, cu_padded


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Positions 0, 1, ... of each sequence with its padding, one sequence after the other."""
    _, padded = _lengths(cu_seqlens, divisibility_factor)
    padded = padded.long()
    starts = (padded.cumsum(0) - padded).repeat_interleave(padded)
    return (torch.arange(starts.numel(), device=cu_seqlens.device) - starts).to(dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: object = None,
    qvk_format: str = "thd",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The tokens of this rank: of each sequence chunks r and 2 * ranks - 1 - r, in that order.

    Tensors are ``[tokens]``, ``[1, tokens]`` or have the tokens along one of their first two
    dimensions; None stays None. All lengths of cu_seqlens_padded are multiples of 2 * ranks.
    Raises ValueError where a tensor does not have as many tokens, or the format is not "thd".
    """
    require(qvk_format == "thd", "qvk_format", repr(qvk_format), "'thd'")
    ranks = torch.distributed.get_world_size(group=cp_group)
    batch = (input_ids_padded, labels_padded, position_ids_padded)
    if ranks == 1:
        return batch
    rank = torch.distributed.get_rank(group=cp_group)
    starts = cu_seqlens_padded.long()
    lengths = starts.diff()
    require(
        bool((lengths % (2 * ranks) == 0).all()),
        "cu_seqlens_padded",
        f"of lengths {lengths.tolist()}",
        f"multiples of {2 * ranks}",
    )
    chunks = lengths // (2 * ranks)
    half = chunks.repeat_interleave(2)
    first = torch.stack(
        [starts[:-1] + rank * chunks, starts[:-1] + (2 * ranks - 1 - rank) * chunks], 1
    ).flatten()
    within = torch.arange(int(half.sum()), device=starts.device)
    within = within - (half.cumsum(0) - half).repeat_interleave(half)
    index = first.repeat_interleave(half) + within
    total = int(starts[-1])
    names = ("input_ids_padded", "labels_padded", "position_ids_padded")
    return tuple(
        None if t is None else t.index_select(_axis(name, t, total), index.to(t.device))
        for name, t in zip(names, batch, strict=True)
    )


def _axis(name: str, tensor: Tensor, tokens: int) -> int:
    """The dimension of tokens."""
    for axis in (1, 0):
        if axis < tensor.dim() and tensor.shape[axis] == tokens:
            return axis
    seen = f"of shape {list(tensor.shape)}"
    require(False, name, seen, f"{tokens} along one of its first two dimensions")
    raise AssertionError
