"""Helpers of TransformerEngine's context parallelism: lengths, orders of chunks, transfers.

Of N ranks, rank r has the chunks r and 2 N - 1 - r of each sequence. "Natural" is the order of the
sequence; "rank after rank" has the two chunks of rank 0, then those of rank 1, and so on.
"""

from functools import lru_cache

import torch
from torch import Tensor


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: Tensor,
    cu_seqlens_padded_on_cp_rank: Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> Tensor:
    """Prefix sums of the tokens without padding that a rank has of each sequence.

    cu_seqlens is global; cu_seqlens_padded_on_cp_rank has the rank's two chunks of each sequence,
    with padding. first_half, second_half: which of the two chunks count.
    """
    lengths = cu_seqlens.diff()
    chunk = cu_seqlens_padded_on_cp_rank.diff() // 2
    total = torch.zeros_like(lengths)
    for counts, index in ((first_half, cp_rank), (second_half, 2 * cp_size - 1 - cp_rank)):
        if counts:
            total += torch.minimum((lengths - index * chunk).clamp(min=0), chunk)
    sums = torch.zeros_like(cu_seqlens)
    sums[1:] = total.cumsum(0)
    return sums


@lru_cache(maxsize=64)
def get_seq_chunk_ids_for_reordering_before_attn(cp_size: int, device: torch.device) -> Tensor:
    """int32 [2 N]: where each chunk of the natural order is among those of rank after rank."""
    own = 2 * torch.arange(cp_size, dtype=torch.int32, device=device)
    return torch.cat([own, own.flip(0) + 1])


@lru_cache(maxsize=64)
def get_seq_chunk_ids_for_reordering_after_attn(cp_size: int, device: torch.device) -> Tensor:
    """int32 [2 N]: the chunks of the natural order, rank after rank."""
    rank = torch.arange(cp_size, dtype=torch.int32, device=device)
    return torch.stack([rank, 2 * cp_size - 1 - rank], 1).flatten()


def reorder_seq_chunks_for_a2a_before_attn(
    x: Tensor, chunk_ids_for_a2a: Tensor, seq_dim: int, cp_size: int
) -> Tensor:
    """[N, ..., 2, rows of a chunk, ...], 2 at seq_dim + 1, as [..., 2 N, rows, ...] natural."""
    x = x.movedim(0, seq_dim).contiguous()
    x = x.view(*x.shape[:seq_dim], 2 * cp_size, *x.shape[seq_dim + 2 :])
    return x.index_select(seq_dim, chunk_ids_for_a2a)


def reorder_seq_chunks_for_a2a_after_attn(
    x: Tensor, chunk_ids_for_a2a: Tensor, seq_dim: int, cp_size: int
) -> Tensor:
    """[..., 2 N, rows of a chunk, ...] natural as [N, ..., 2, rows, ...]: the inverse."""
    x = x.index_select(seq_dim, chunk_ids_for_a2a)
    x = x.view(*x.shape[:seq_dim], cp_size, 2, *x.shape[seq_dim + 1 :])
    return x.movedim(seq_dim, 0).contiguous()


def _places(cu_seqlens: Tensor, cp_size: int, tokens: int) -> Tensor:
    """int64 [tokens]: for each token, rank after rank, its place in the natural order."""
    starts = cu_seqlens.long()
    chunk = starts.diff() // (2 * cp_size)
    order = get_seq_chunk_ids_for_reordering_after_attn(cp_size, cu_seqlens.device).long()
    # The chunks in the order in which they follow each other: rank, sequence, half.
    ids = order.view(cp_size, 1, 2)
    first = (starts[:-1, None] + ids * chunk[:, None]).flatten()
    rows = chunk[None, :, None].expand(cp_size, -1, 2).flatten()
    ends = rows.cumsum(0)
    token = torch.arange(tokens, device=starts.device)
    run = torch.searchsorted(ends, token, right=True).clamp_(max=max(rows.numel() - 1, 0))
    return first[run] + token - (ends - rows)[run]


def reorder_seq_chunks_before_a2a_after_attn_thd(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Tokens of ragged sequences from the natural order to rank after rank."""
    return x.index_select(seq_dim, _places(cu_seqlens, cp_size, x.shape[seq_dim]))


def reorder_seq_chunks_after_a2a_before_attn_thd(
    x: Tensor, cu_seqlens: Tensor, seq_chunk_ids: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Tokens of ragged sequences from rank after rank to the natural order: the inverse.

    seq_chunk_ids, those of get_seq_chunk_ids_for_reordering_before_attn(), follow from cp_size.
    """
    del seq_chunk_ids
    places = _places(cu_seqlens, cp_size, x.shape[seq_dim])
    return x.index_select(seq_dim, places.argsort())


def get_kv_seq_info_after_all_gather(
    local_chunk_id: int,
    cp_size: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    window_size: tuple[int, int] | None,
    causal: bool,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The keys that a chunk of queries attends to, [begin, end), and the window among them.

    max_seqlen_q and max_seqlen_kv are those of a chunk; the window is aligned bottom right.
    """
    left, right = window_size if window_size is not None else (-1, 0 if causal else -1)
    chunk_end, all_keys = (local_chunk_id + 1) * max_seqlen_kv, 2 * cp_size * max_seqlen_kv
    end = all_keys if right < 0 else min(all_keys, chunk_end + right)
    begin = 0 if left < 0 else max(0, chunk_end - max_seqlen_q - left)
    inside = (
        left if left < 0 else left + end - chunk_end,
        right if right < 0 else chunk_end + right - end,
    )
    return (begin, end), inside


def flash_attn_p2p_communicate(
    rank: int,
    send_tensor: Tensor,
    send_dst: int,
    recv_tensor: Tensor,
    recv_src: int,
    cp_group: torch.distributed.ProcessGroup,
    batch_p2p_comm: bool,
) -> list:
    """Starts to send and to receive, and returns what to wait for.

    Even ranks send first, so that unbatched transfers of a ring meet. send_dst, recv_src: ranks of
    the whole job, as in TransformerEngine.
    """
    send = torch.distributed.P2POp(torch.distributed.isend, send_tensor, send_dst, cp_group)
    receive = torch.distributed.P2POp(torch.distributed.irecv, recv_tensor, recv_src, cp_group)
    both = [send, receive] if rank % 2 == 0 else [receive, send]
    if batch_p2p_comm:
        return torch.distributed.batch_isend_irecv(both)
    return [one.op(one.tensor, one.peer, one.group) for one in both]
