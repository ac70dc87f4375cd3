"""Context parallelism by TransformerEngine's names: helpers, and two ranks over gloo."""

import os
import pickle
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch.attention.dot_product_attention.context_parallel as te_cp
from processes import join, start
from te_attention.torch import attention
from te_attention.torch import context_parallel as cp
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.distributed import (
    gather_along_first_dim,
    get_distributed_rank,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
)

SEQUENCES = torch.tensor([0, 24, 24, 40], dtype=torch.int32)  # multiples of twice four ranks
RANKS = 4
CPU = torch.device("cpu")


def shares(x: torch.Tensor) -> torch.Tensor:
    """Tokens of SEQUENCES, rank after rank."""
    return torch.cat([x[rank_index(r)] for r in range(RANKS)])


def rank_index(rank: int) -> list[int]:
    out = []
    for begin, end in zip(SEQUENCES[:-1].tolist(), SEQUENCES[1:].tolist(), strict=True):
        chunk = (end - begin) // (2 * RANKS)
        for i in (rank, 2 * RANKS - 1 - rank):
            out += range(begin + i * chunk, begin + (i + 1) * chunk)
    return out


def test_the_orders_of_chunks() -> None:
    before = te_cp.get_seq_chunk_ids_for_reordering_before_attn(RANKS, CPU)
    after = te_cp.get_seq_chunk_ids_for_reordering_after_attn(RANKS, CPU)
    assert before.tolist() == [0, 2, 4, 6, 7, 5, 3, 1] and before.dtype == torch.int32
    assert after.tolist() == [0, 7, 1, 6, 2, 5, 3, 4] and after.dtype == torch.int32


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_chunks_are_put_in_natural_order_and_back(seq_dim: int) -> None:
    natural = torch.arange(2 * RANKS).view(-1, 1).expand(-1, 3)  # of chunks, rows of a chunk
    after = te_cp.get_seq_chunk_ids_for_reordering_after_attn(RANKS, CPU).long()
    gathered = natural[after].view(RANKS, 2, 3)
    if seq_dim:
        natural, gathered = natural.expand(5, -1, -1), gathered[:, None].expand(-1, 5, -1, -1)
    before = te_cp.get_seq_chunk_ids_for_reordering_before_attn(RANKS, CPU)
    x = te_cp.reorder_seq_chunks_for_a2a_before_attn(gathered, before, seq_dim, RANKS)
    assert torch.equal(x, natural)
    ids = te_cp.get_seq_chunk_ids_for_reordering_after_attn(RANKS, CPU)
    y = te_cp.reorder_seq_chunks_for_a2a_after_attn(x, ids, seq_dim, RANKS)
    assert torch.equal(y, gathered)


def test_tokens_of_ragged_sequences_are_put_in_natural_order_and_back() -> None:
    x = torch.arange(2 * int(SEQUENCES[-1])).view(-1, 2)
    ranks = te_cp.reorder_seq_chunks_before_a2a_after_attn_thd(x, SEQUENCES, RANKS)
    assert torch.equal(ranks, shares(x))
    ids = te_cp.get_seq_chunk_ids_for_reordering_before_attn(RANKS, CPU)
    back = te_cp.reorder_seq_chunks_after_a2a_before_attn_thd(ranks, SEQUENCES, ids, RANKS)
    assert torch.equal(back, x)


def test_lengths_on_a_rank_are_those_of_its_tokens() -> None:
    valid = torch.tensor([0, 21, 21, 30], dtype=torch.int32)
    lengths = valid.diff().tolist()
    position = torch.cat([torch.arange(n) for n in SEQUENCES.diff()])
    sequence = torch.cat([torch.full((int(n),), i) for i, n in enumerate(SEQUENCES.diff())])
    own = torch.zeros_like(SEQUENCES)
    own[1:] = (SEQUENCES.diff() // RANKS).cumsum(0)
    for rank in range(RANKS):
        index = torch.tensor(rank_index(rank))
        counts = []
        for first, second in ((True, True), (True, False), (False, True)):
            got = te_cp.get_cu_seqlens_on_cp_rank(valid, own, RANKS, rank, first, second)
            assert got.dtype == torch.int32 and got[0] == 0
            counts.append(got.diff())
        wanted = [sum(int(position[i]) < n for i in index if sequence[i] == s)
                  for s, n in enumerate(lengths)]  # fmt: skip
        assert counts[0].tolist() == wanted
        assert torch.equal(counts[1] + counts[2], counts[0])


def visible(keys: int, diagonal: int, window: tuple[int, int]) -> list[int]:
    left, right = window
    first = 0 if left < 0 else max(0, diagonal - left)
    last = keys - 1 if right < 0 else min(keys - 1, diagonal + right)
    return list(range(first, last + 1))


@pytest.mark.parametrize("window", [None, (-1, 0), (5, 0), (3, 2), (100, 100)])
@pytest.mark.parametrize("causal", [True, False])
def test_the_keys_of_a_chunk(window: tuple | None, causal: bool) -> None:
    rows, cols = 4, 6
    left, right = window if window else (-1, 0 if causal else -1)
    for chunk in range(2 * RANKS):
        (begin, end), (near, far) = te_cp.get_kv_seq_info_after_all_gather(
            chunk, RANKS, rows, cols, window, causal
        )
        for row in range(rows):
            last = (chunk + 1) * cols - rows + row  # the key at the bottom-right diagonal
            wanted = visible(2 * RANKS * cols, last, (left, right))
            inside = visible(end - begin, end - begin - rows + row, (near, far))
            assert [begin + k for k in inside] == wanted


def test_without_a_group_there_is_one_rank() -> None:
    assert not dist.is_initialized()
    assert get_distributed_world_size() == 1
    with pytest.raises(RuntimeError, match="not initialised"):
        get_distributed_rank()
    x = torch.ones(3)
    for function in (gather_along_first_dim, reduce_scatter_along_first_dim):
        assert function(x, None) == (x, None)
        out, handle = function(x, None, async_op=True)
        handle.wait()
        assert out is x
    with pytest.raises(ValueError, match="quantizer is given; needs None"):
        gather_along_first_dim(x, None, quantizer=object())


# ------------------------------------------------------------------------------------ two ranks

WORLD, ROWS, HEADS, DIM = 2, 32, 4, 16


def collectives(group) -> None:
    rank = get_distributed_rank(group)
    assert get_distributed_world_size(group) == WORLD
    mine = torch.full((2, 3), float(rank))
    whole = torch.arange(WORLD).float().repeat_interleave(2)[:, None].expand(-1, 3)
    for is_async in (False, True):
        out, handle = gather_along_first_dim(mine.t().contiguous().t(), group, is_async)
        if is_async:
            handle.wait()
        assert torch.equal(out, whole)
        out, handle = reduce_scatter_along_first_dim(whole * (rank + 1), group, is_async)
        if is_async:
            handle.wait()
        assert torch.equal(out, 3 * mine)
    with pytest.raises(ValueError, match=r"inp.shape\[0\] is 3; needs a multiple of 2"):
        reduce_scatter_along_first_dim(torch.ones(3), group)


def point_to_point(group) -> None:
    rank = dist.get_rank(group)
    for batched in (False, True):
        mine, theirs = torch.tensor([float(rank)]), torch.empty(1)
        other = 1 - rank
        for one in te_cp.flash_attn_p2p_communicate(
            rank, mine, other, theirs, other, group, batched
        ):
            one.wait()
        assert theirs.item() == other


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, ROWS, HEADS, DIM, generator=generator, dtype=torch.float64)
            for _ in range(4)]  # fmt: skip


def classes(group) -> None:
    """The autograd functions, with their own positions of arguments."""
    q, k, v, dout = tensors()
    sink = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
    for cls in (te_cp.AttnFuncWithCPAndKVP2P, te_cp.AttnFuncWithCPAndKVAllGather,
                te_cp.AttnFuncWithCPAndQKVOA2A):  # fmt: skip
        values = {"is_training": True, "dropout_p": 0.0, "qkv_format": "bshd"}
        values |= {"attn_mask_type": "causal", "attn_bias_type": "no_bias", "cp_group": group}
        values |= {"return_max_logit": True, "fp8": False, "fp8_output": False}
        values |= {"softmax_type": "vanilla"}
        whole = [t.requires_grad_() for t in (q, k, v)]
        options = {"format": "bshd", "mask": "causal", "return_max_logit": True}
        if "softmax_offset" in cls.names:
            values |= {"softmax_type": "learnable", "softmax_offset": sink.requires_grad_()}
            options["sink"] = sink
            whole.append(sink)
        o, largest = attention(*whole[:3], **options)
        wanted = torch.autograd.grad(o, whole, dout)
        mine = [cp.shard(t.detach(), group).requires_grad_() for t in (q, k, v)]
        values |= dict(zip(("q", "k", "v"), mine, strict=True))
        got, got_largest = cls.apply(*(values.get(name) for name in cls.names))
        torch.testing.assert_close(got, cp.shard(o.detach(), group))
        torch.testing.assert_close(got_largest, largest.amax((0, 2)))
        leaves = [*mine, *whole[3:]]
        found = torch.autograd.grad(got, leaves, cp.shard(dout, group))
        for one, exact in zip(found[:3], wanted[:3], strict=True):
            torch.testing.assert_close(one, cp.shard(exact, group))
        for one, exact in zip(found[3:], wanted[3:], strict=True):
            torch.testing.assert_close(one, exact)
        with pytest.raises(ValueError, match=f"arguments is 1; needs {len(cls.names)}"):
            cls.apply(True)


def bias_and_window(group) -> None:
    """Options that TransformerEngine's p2p refuses: a window, and a gradient of the bias."""
    q, k, v, dout = tensors()
    bias = torch.randn(1, HEADS, ROWS, ROWS, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(4))  # fmt: skip
    whole = [t.requires_grad_() for t in (q, k, v, bias)]
    o = attention(q, k, v, format="bshd", mask="causal", window=(9, None), bias=bias)
    wanted = torch.autograd.grad(o, whole, dout)
    mine = [cp.shard(t.detach(), group).requires_grad_() for t in (q, k, v)]
    rows = cp.shard(bias.detach(), group, 2).requires_grad_()
    arguments = (True, *mine, *[None] * 6, 0.0, group, [0, 1], None, "p2p")
    got = te_cp.attn_forward_func_with_cp(
        *arguments, window_size=(9, 0), attn_bias_type="post_scale_bias", attn_bias=rows
    )
    torch.testing.assert_close(got, cp.shard(o.detach(), group))
    found = torch.autograd.grad(got, [*mine, rows], cp.shard(dout, group))
    for one, exact, axis in zip(found, wanted, (1, 1, 1, 2), strict=True):
        torch.testing.assert_close(one, cp.shard(exact, group, axis))
    with pytest.raises(ValueError, match="fp8 is True; needs False with context parallelism"):
        te_cp.attn_forward_func_with_cp(*arguments, fp8=True)
    for comm, needed in (("ring", "cp_comm_type is 'ring'; needs p2p, all_gather"),
                         ("a2a+p2p", "needs a list of two process groups")):  # fmt: skip
        with pytest.raises(ValueError, match=needed):
            te_cp.attn_forward_func_with_cp(*arguments[:-1], comm)


def padding_masks(group) -> None:
    """Dense sequences with padding, by lengths of all rows; a mask of the local ones is refused."""
    q, k, v, _ = tensors()
    q, k, v = (t.float() for t in (q, k, v))
    cu = torch.tensor([0, 32, 32 + 11], dtype=torch.int32)
    dpa = DotProductAttention(HEADS, DIM, qkv_format="bshd", attn_mask_type="padding_causal")
    wanted = dpa(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    dpa.set_context_parallel_group(group, [0, 1], None, "all_gather")
    mine = [cp.shard(t, group) for t in (q, k, v)]
    got = dpa(*mine, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    torch.testing.assert_close(got, cp.shard(wanted, group))
    mask = torch.zeros(2, 1, 1, ROWS // WORLD, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask is given; needs None with cp_group"):
        dpa(*mine, attention_mask=mask)


BODIES = (collectives, point_to_point, classes, bias_and_window, padding_masks)


def work(rank: int, folder: str, port: int) -> None:
    join(rank, WORLD, port)
    results: dict[str, str] = {}
    for body in BODIES:
        try:
            body(dist.group.WORLD)
            results[body.__name__] = ""
        except Exception:
            results[body.__name__] = traceback.format_exc()
        dist.barrier()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    start(work, WORLD, str(folder))
    return [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(WORLD)]


@pytest.mark.parametrize("body", BODIES)
def test_two_ranks(results: list[dict], body) -> None:
    for of_rank in results:
        assert of_rank[body.__name__] == "", of_rank[body.__name__]
