"""context_parallel_attention() in processes over gloo: one start of 8 processes for all cases."""

import os
import pickle
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from processes import join, start
from te_attention.torch import _cp_agree, attention
from te_attention.torch import context_parallel as cp
from te_attention.torch._cp_transport import GroupTransport

WORLD = 8
LIMIT = 15.0  # seconds until a disagreement is an error


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


ORDERS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


class Problem:
    """A problem in fp64, on one device and shared by ranks."""

    def __init__(
        self, rows: int, rows_kv: int | None = None, form: str = "bhsd", heads=(4, 2), dim=16
    ):
        generator = torch.Generator().manual_seed(rows)
        rows_kv = rows if rows_kv is None else rows_kv
        shapes = [(2, heads[0], rows, dim), *[(2, heads[1], rows_kv, dim)] * 2]
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        self.form, self.axis = form, ORDERS[form].index(2)
        self.tensors = [t.permute(ORDERS[form]).contiguous().requires_grad_() for t in tensors]
        self.lengths = (rows, rows_kv)

    def check(self, group, strategy, mine=None, sharding="zigzag", **options) -> None:
        """`mine`: options of this rank that are others than on one device."""
        all_ranks = dist.group.WORLD if isinstance(group, tuple) else group

        def cut(t: torch.Tensor, axis: int) -> torch.Tensor:
            return cp.shard(t.detach(), all_ranks, axis, sharding=sharding)

        small = [n for n in ("bias", "sink") if isinstance(options.get(n), torch.Tensor)]
        o, lse = attention(*self.tensors, format=self.form, return_lse=True, **options)
        dout, dlse = torch.ones_like(o) + o.detach(), torch.sin(lse.detach()).nan_to_num(0)
        inputs = [*self.tensors, *(options[n] for n in small)]
        wanted = torch.autograd.grad([o, lse], inputs, [dout, dlse])
        q, k, v = (cut(t, self.axis).requires_grad_() for t in self.tensors)
        local = options | (mine or {})
        for name in small:
            t = options[name]
            local[name] = (cut(t, 2) if name == "bias" else t.detach().clone()).requires_grad_()
        got, got_lse = cp.context_parallel_attention(
            *(q, k, v), group=group, strategy=strategy, format=self.form, return_lse=True,
            seqlens=self.lengths, sharding=sharding, **local,
        )  # fmt: skip
        close(got, cut(o, self.axis))
        close(got_lse, cut(lse, 2))
        inputs = [q, k, v, *(local[n] for n in small)]
        found = torch.autograd.grad([got, got_lse], inputs, [cut(dout, self.axis), cut(dlse, 2)])
        for one, exact in zip(found[:3], wanted[:3], strict=True):
            close(one, cut(exact, self.axis))
        for name, one, exact in zip(small, found[3:], wanted[3:], strict=True):
            close(one, exact if name == "sink" else cut(exact, 2))


def every_strategy(group, **_) -> None:
    for strategy in ("ring", "all_gather", "a2a", "halo", "gather_q"):
        window = (20, None) if strategy == "halo" else None
        Problem(64).check(group, strategy, mask="causal", window=window)


def uneven_lengths(group, **_) -> None:
    for rows in (37, 1, 130):
        for strategy in ("ring", "all_gather", "a2a"):
            Problem(rows, form="bshd").check(group, strategy, mask="causal")


def cross_attention_at_the_bottom_right(group, **_) -> None:
    for strategy in ("ring", "all_gather", "gather_q"):
        Problem(48, 96, form="sbhd").check(group, strategy, mask="causal_bottom_right")


def bias_and_sink(group, **_) -> None:
    torch.manual_seed(5)
    bias = torch.randn(2, 4, 64, 64, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for strategy in ("ring", "a2a", "gather_q"):
        Problem(64).check(group, strategy, mask="causal", bias=bias, sink=sink)


def dropout_and_alibi(group, **_) -> None:
    options = {"dropout": 0.3, "rng_state": torch.tensor([3, 4]), "alibi": True, "mask": "causal"}
    mine = {} if dist.get_rank(group) == 0 else {"rng_state": torch.tensor([9, 9])}
    for strategy in ("ring", "a2a"):
        Problem(64).check(group, strategy, mine, **options)


def padding(group, **_) -> None:
    cu = torch.tensor([0, 50, 50 + 17], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    for strategy in ("ring", "all_gather", "a2a", "gather_q"):
        Problem(64).check(group, strategy, mask="causal", **lengths)


def fp8(group, **_) -> None:
    """With the gradients of one device in fp64, up to the rounding of FP8."""
    problem = Problem(64, form="bshd")
    o = attention(*problem.tensors, format="bshd", mask="causal")
    wanted = [o, *torch.autograd.grad(o, problem.tensors, torch.cos(o.detach()))]
    wanted = [cp.shard(t.detach(), group) for t in wanted]
    for strategy in ("ring", "all_gather", "a2a"):
        mine = [cp.shard(t.detach(), group).bfloat16().requires_grad_() for t in problem.tensors]
        got = cp.context_parallel_attention(
            *mine, group=group, strategy=strategy, format="bshd", mask="causal", fp8="current"
        )
        found = [got, *torch.autograd.grad(got, mine, cp.shard(torch.cos(o), group).bfloat16())]
        for one, exact in zip(found, wanted, strict=True):
            assert one.dtype == torch.bfloat16
            error = (one.double() - exact).norm() / exact.norm()
            assert 1e-3 < error < 0.15, error


def cache_in_fp8(group, **_) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 64, h, 16, generator=generator).bfloat16() for h in (4, 2, 2))
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    options = {"format": "bshd", "mask": "causal", "window": (20, None)}
    options |= {"k_descale": torch.tensor([0.5, 2.0]), "v_descale": torch.tensor([3.0, 1.0])}
    mine = [cp.shard(t.view(torch.uint8), group, 1).view(t.dtype) for t in (k, v)]
    for strategy in ("ring", "all_gather", "a2a", "halo", "gather_q"):
        got = cp.context_parallel_attention(
            cp.shard(q, group, 1), *mine, group=group, strategy=strategy, **options
        )
        wanted = cp.shard(attention(q, k, v, **options), group, 1)
        torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)


def more_ranks_than_heads(group, **_) -> None:
    Problem(64, heads=(3, 1)).check(group, "a2a", mask="causal")


def head_dims_that_are_padded(group, **_) -> None:
    Problem(32, dim=12).check(group, "ring", mask="causal")


def contiguous_shards(group, **_) -> None:
    for strategy in ("ring", "halo"):
        Problem(90).check(group, strategy, sharding="contiguous", window=(9, 3))


def hierarchical(groups, **_) -> None:
    Problem(64).check(groups, ("a2a", "ring"), mask="causal")
    Problem(101).check(groups, ("a2a", "ring"), mask="causal", sink="off_by_one")


def ragged(group, **_) -> None:
    """Empty and uneven sequences, with padding between them."""
    world = dist.get_world_size(group)
    for multiple in (2 * world, 1):
        valid = torch.tensor([33, 0, 1, 70])
        room = (valid + multiple - 1) // multiple * multiple + (multiple if multiple > 1 else 3)
        cu, starts = (torch.zeros(5, dtype=torch.int32) for _ in range(2))
        cu[1:], starts[1:] = valid.cumsum(0), room.cumsum(0)
        torch.manual_seed(3)
        whole = [torch.randn(int(starts[-1]), h, 16, dtype=torch.float64) for h in (4, 2, 2)]
        whole = [t.requires_grad_() for t in whole]
        options = {"format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "mask": "causal",
                   "offsets_q": starts, "offsets_kv": starts}  # fmt: skip
        o = attention(*whole, max_seqlen_q=80, max_seqlen_kv=80, **options)
        wanted = torch.autograd.grad(o, whole, torch.cos(o.detach()))
        cut = {"axis": 0, "cu_seqlens": starts}
        for strategy in ("ring", "all_gather", "a2a"):
            mine = [cp.shard(t.detach(), group, **cut).requires_grad_() for t in whole]
            got = cp.context_parallel_attention(*mine, group=group, strategy=strategy, **options)
            close(got, cp.shard(o.detach(), group, **cut))
            found = torch.autograd.grad(got, mine, torch.cos(got.detach()))
            for one, exact in zip(found, wanted, strict=True):
                close(one, cp.shard(exact, group, **cut))


def shard_and_unshard(group, **_) -> None:
    x = torch.arange(2.0 * 37 * 3).view(2, 37, 3).requires_grad_()
    mine = cp.shard(x, group)
    whole = cp.unshard(mine, group, seqlen=37)
    assert torch.equal(whole, x)
    (gradient,) = torch.autograd.grad(whole.sum(), x)
    mine = cp.shard(torch.arange(37)[None], group)[0]  # rows of this rank
    wanted = torch.zeros(2, 37, 3)
    wanted[:, mine] = float(dist.get_world_size(group))
    assert torch.equal(gradient, wanted)


def compiled(group, **_) -> None:
    """A graph break around the call, which is not traced."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))

    def scaled(q, k, v):
        return 2 * cp.context_parallel_attention(q * 3, k, v, group=group, mask="causal")

    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.compile(scaled, backend=backend)(q, k, v)
    assert torch.equal(got, scaled(q, k, v))
    assert len(graphs) == 2  # the products before and after the call
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(scaled, backend=backend, fullgraph=True)(q, k, v)


def transforms_are_refused(group, **_) -> None:
    q = torch.randn(1, 4, 16, 8)
    call = lambda q: cp.context_parallel_attention(q, q, q, group=group).sum()  # noqa: E731
    transforms = {"grad": lambda: torch.func.grad(call)(q),
                  "vmap": lambda: torch.func.vmap(call)(q[None]),
                  "jvp": lambda: torch.func.jvp(call, (q,), (q,))}  # fmt: skip
    for name, run in transforms.items():
        with pytest.raises(ValueError, match="forward_ad is active"):
            print(name, run())


def topology(group, **_) -> None:
    found = cp.Topology.measure(group)
    seen = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, found, group=group)
    assert all(one == found for one in seen)
    assert found.tflops_forward > 0 and found.gbps > 0


AGREEING = (every_strategy, uneven_lengths, cross_attention_at_the_bottom_right, bias_and_sink,
            dropout_and_alibi, padding, fp8, cache_in_fp8, more_ranks_than_heads, contiguous_shards,
            head_dims_that_are_padded, ragged,
            shard_and_unshard)  # fmt: skip


def call(group, **changes) -> object:
    rank = dist.get_rank(group)
    q = torch.zeros(1, 2, 16, 8, dtype=changes.pop("dtype", torch.float32))
    options = {"mask": "causal", "strategy": "ring"} | changes
    if rows := options.pop("rows_of_bias", None):  # of one sequence of 32 rows, with thd
        q, cu = q[0].transpose(0, 1), torch.tensor([0, 32], dtype=torch.int32)
        options |= {"format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu,
                    "bias": torch.zeros(1, 2, rows, 32)}  # fmt: skip
        return cp.context_parallel_attention(q, q, q, group=group, **options)
    if rank == 1 and options.pop("raises", False):
        options["window"] = (-5, 0)
    k, v = q, q[:, :, : options.pop("rows", 16)]
    return cp.context_parallel_attention(q, k, v, group=group, **options)


# The deviation of rank 1, the error that every rank raises, and the options of both ranks.
DISAGREEMENTS = {
    "options": ({"mask": None}, "rank 1 called with mask=none; needs causal as rank 0"),
    "strategy": ({"strategy": "a2a"}, "rank 1 called with strategy=a2a; needs ring as rank 0"),
    "dtype": ({"dtype": torch.bfloat16}, "rank 1 called with dtype=torch.bfloat16; needs"),
    "FP8": ({"fp8": "current"}, "rank 1 called with fp8=current; needs None as rank 0"),
    "lengths": ({"seqlens": 34}, "rank 1 raised: ValueError: q.shape"),
    "training": ({"window": (3, None)}, "rank 1 called with window=(3, -1); needs (-1, -1)"),
    "rows of a bias": (
        {"rows_of_bias": 1},
        "rank 1 called with bias=torch.float32 [1, 2, 1, 32]",
        {"rows_of_bias": 32},
    ),
    "raised before": ({"raises": True}, "rank 1 raised: ValueError: window"),
    "absent": (None, "rank 1 has not called within 10 s; needs the call of rank 0"),
}


def disagree(group, change: dict | None, _: str, both: dict | None = None) -> tuple[str, float]:
    begin = time.monotonic()
    mine = dist.get_rank(group) == 1
    if mine and change is None:
        return "", 0.0
    try:
        call(group, **(both or {}) | (change if mine else {}))
    except (RuntimeError, ValueError) as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


def work(rank: int, folder: str, port: int) -> None:
    join(rank, WORLD, port)
    results: dict[str, object] = {}
    pairs = [dist.new_group([2 * i, 2 * i + 1]) for i in range(WORLD // 2)]
    strided = [dist.new_group(list(range(i, WORLD, 2))) for i in range(2)]
    groups = {2: dist.new_group([0, 1]), 4: dist.new_group([0, 1, 2, 3]), 8: dist.group.WORLD}

    def attempt(name: str, body, *arguments) -> None:
        try:
            results[name] = body(*arguments)
        except Exception:
            results[name] = traceback.format_exc()

    for world, group in groups.items():
        if rank < world:
            for body in AGREEING:
                attempt(f"{body.__name__} {world}", body, group)
        dist.barrier()  # ranks wait for each other no longer than a call may
    attempt("hierarchical 8", hierarchical, (pairs[rank // 2], strided[rank % 2]))
    if rank < 2:
        for body in (topology, compiled, transforms_are_refused):
            attempt(f"{body.__name__} 2", body, groups[2])
        for name, case in DISAGREEMENTS.items():
            dist.barrier(group=groups[2])
            attempt(f"disagree {name}", disagree, groups[2], *case)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("processes")
    start(work, WORLD, str(folder))
    return [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(WORLD)]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("body", AGREEING)
def test_ranks_compute_what_one_device_computes(results: list[dict], body, world: int) -> None:
    for rank in range(world):
        assert results[rank][f"{body.__name__} {world}"] is None


def test_groups_of_groups(results: list[dict]) -> None:
    for rank in range(WORLD):
        assert results[rank]["hierarchical 8"] is None


def test_a_topology_is_the_same_on_every_rank(results: list[dict]) -> None:
    assert results[0]["topology 2"] is None and results[1]["topology 2"] is None


@pytest.mark.parametrize("body", [compiled, transforms_are_refused])
def test_what_traces_a_call(results: list[dict], body) -> None:
    for rank in range(2):
        assert results[rank][f"{body.__name__} 2"] is None


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_disagreement_is_an_error_on_every_rank(results: list[dict], name: str) -> None:
    change, needed, *_ = DISAGREEMENTS[name]
    for rank in range(2):
        text, seconds = results[rank][f"disagree {name}"]
        assert seconds < LIMIT
        if rank == 0:
            assert needed in text
        elif change is not None:
            assert text != "no error"


def dies(rank: int, folder: str, port: int) -> None:
    join(rank, 2, port)
    if rank == 1:
        GroupTransport.post = lambda *_: os._exit(0)  # in the middle of the call
    begin = time.monotonic()
    try:
        call(dist.group.WORLD)
    except RuntimeError as error:
        Path(folder, "error").write_text(f"{time.monotonic() - begin} {error}")
    os._exit(0)


def test_a_rank_that_dies_in_a_call_is_an_error_of_the_others(tmp_path: Path) -> None:
    start(dies, 2, str(tmp_path))
    seconds, text = (tmp_path / "error").read_text().split(" ", 1)
    assert float(seconds) < LIMIT
    assert text


def test_patience_is_below_the_limit() -> None:
    assert _cp_agree.PATIENCE < LIMIT
