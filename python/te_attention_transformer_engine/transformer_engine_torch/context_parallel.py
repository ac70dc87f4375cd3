"""Context parallelism for ragged batches: halves of sequences, and corrections by LSE."""

from torch import Tensor

from te_attention.torch.operators import ops

SLABS = 4  # dimensions of [2, t, h, d], K and V in one tensor; [t, h, d] has one less


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int, /) -> Tensor:
    """The first (0) or second (1) half of every sequence, packed."""
    if half_idx not in (0, 1):
        raise ValueError(f"half_idx is {half_idx}; needs 0 or 1")
    return ops.cp_read_half.default(tensor, cu_seqlens, half_idx == 1, tensor.dim() == SLABS)


def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool, /
) -> None:
    """Merges lse_per_step into the second halves of lse, in place (logaddexp)."""
    ops.cp_lse_correct.default(lse, lse_per_step, cu_seqlens, lse_packed)


def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int, /
) -> Tensor:
    """The LSE of the second halves, packed, followed by zeros."""
    return ops.cp_lse_read.default(lse, cu_seqlens, lse_packed, second_half_lse_seqlen)


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
    /,
) -> None:
    """Adds out_per_step * exp(lse_per_step - lse) to out in place."""
    ops.cp_out_correct.default(
        out, out_per_step, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed
    )


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str, /
) -> None:
    """Adds or copies grad_per_step to each half of grad, or leaves it ("none"), in place."""
    ops.cp_grad_correct.default(
        grad, grad_per_step, cu_seqlens, first_half, second_half, grad.dim() == SLABS
    )


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int, /
) -> Tensor:
    """The indices of this rank's tokens: int32 [total_tokens / world_size]."""
    return ops.cp_partition_indices.default(cu_seqlens, total_tokens, world_size, rank)
