"""Sequences that virtual ranks share in lock-step: random cases, dropout, moves, refusals."""

import os

import pytest
import torch

import cp_cases
import kit
from te_attention._alibi import published_slopes
from te_attention._cp_schedule import schedule
from te_attention.torch import _cp_ring_backward, attention
from te_attention.torch import context_parallel as cp
from te_attention.torch._cp_exchange import Exchange
from te_attention.torch._cp_halo import halo_plan
from te_attention.torch._cp_layout import Side, chunk_rows
from te_attention.torch._cp_problem import Distribution, make_problem, problem_of
from te_attention.torch._cp_run import backward, forward
from te_attention.torch._cp_transport import DeadlockError, LockStep
from te_attention.torch.functional import describe

DRAWS = int(os.environ.get("TE_ATTENTION_CP_DRAWS", "60"))
SHARE = 20  # draws of one test
HOW = [("ring", 1), ("all_gather", 1), ("a2a", 1), ("halo", 1), ("ring", 2), ("gather_q", 1)]


def check_random_cases(first: int, device: str, how: tuple[str, int] | None = None) -> None:
    ran, seed = 0, 7 * first
    while ran < SHARE:
        seed += 1
        wrong = cp_cases.run(kit.draw(seed), seed, device, how)
        if wrong is None:
            continue
        ran += 1
        assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("first", range(0, DRAWS, SHARE))
def test_random_cases_agree_with_the_oracle(first: int) -> None:
    check_random_cases(first, "cpu")


@pytest.mark.parametrize("first", range(0, DRAWS // 3, SHARE))
def test_random_cases_of_gathered_queries_agree_with_the_oracle(first: int) -> None:
    check_random_cases(first, "cpu", ("gather_q", 1))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 8 * SHARE, SHARE))
def test_random_cases_on_a_gpu_agree_with_the_oracle(first: int) -> None:
    check_random_cases(first, "cuda")


def test_a_slice_of_a_bias_in_fp32_has_the_alignment_of_fp64() -> None:
    assert not cp_cases.run(kit.draw(2690), 2690)


def test_a_window_at_the_bottom_right_of_padded_sequences_has_a_shift_for_each() -> None:
    assert not cp_cases.run(kit.draw(11349), 11349)


def test_rows_and_keys_of_a_window_in_two_formats() -> None:
    assert not cp_cases.run(kit.draw(5343), 5343)


@pytest.mark.parametrize("how", [("ring", 1), ("gather_q", 1)])
def test_the_gradient_of_a_bias_that_parts_share_is_rounded_once(how: tuple[str, int]) -> None:
    for seed in (638, 619):  # bf16, and fp64 with a bias in fp32
        assert not cp_cases.run(kit.draw(seed), seed, "cpu", how)


def test_keys_and_values_in_fp8_have_scales_of_their_own() -> None:
    assert not cp_cases.run(kit.draw(573), 573)


@pytest.mark.parametrize("how", [("ring", 1), ("gather_q", 1), ("a2a", 1)])
@pytest.mark.parametrize("seed", [160, 434, 2945])
def test_a_bias_of_ragged_sequences(seed: int, how: tuple[str, int]) -> None:
    """One for all sequences of keys, in bf16; of sequences without rows; of some without keys."""
    assert not cp_cases.run(kit.draw(seed), seed, "cpu", how)


@pytest.mark.parametrize("how", [("ring", 1), ("gather_q", 1)])
def test_a_bias_with_one_row_where_every_rank_has_one(how: tuple[str, int]) -> None:
    assert not cp_cases.run(kit.draw(613), 613, "cpu", how)


class Shared:
    """q, k and v of a bshd problem, cut for each of the ranks."""

    def __init__(self, world: int, rows: int, how: tuple[str, int], **options) -> None:
        generator = torch.Generator().manual_seed(rows)
        dtype, heads = options.pop("dtype", torch.float32), options.pop("heads", (4, 2))
        dim, device = options.pop("dim", 16), options.pop("device", "cpu")
        self.q, self.k, self.v = (
            torch.randn(2, rows, h, dim, generator=generator).to(device, dtype)
            for h in (*heads, heads[1])
        )
        zigzag = options.pop("zigzag", True)
        self.side = Side("bshd", world, zigzag, rows)
        self.calls = []
        for r in range(world):
            local = [self.local(t, r) for t in (self.q, self.k, self.v)]
            a = describe(*local, format="bshd", **options)._replace(training=True)
            self.calls.append(make_problem(a, Distribution(world, r, *how, zigzag, rows)))

    def local(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        pieces = self.side.shard(rank).pieces
        return torch.cat([tensor[:, p.begin : p.end] for p in pieces], 1)

    def forward(self) -> tuple[torch.Tensor, LockStep, list]:
        steps = LockStep([forward(p, x) for p, x in self.calls])
        results = steps.run()
        return self.side.join([o for (o, *_), _ in results], 0), steps, [s for _, s in results]

    def backward(self, saved: list, dout: torch.Tensor) -> list[torch.Tensor]:
        programs = [
            backward(p, x, s, self.local(dout, p.rank), None)
            for (p, x), s in zip(self.calls, saved, strict=True)
        ]
        found = LockStep(programs).run()
        return [self.side.join([g[i] for g in found], 0) for i in range(3)]


def test_keys_of_others_are_one_message_and_the_own_are_not_copied_into_one() -> None:
    _, steps, _ = Shared(4, 64, ("ring", 1), mask="causal").forward()
    sent = [sum(n for (a, _), n in steps.sent.items() if a == r) for r in range(4)]
    assert sent == [4] * 4  # two, one and one


class Watched(LockStep):
    """events: of each rank, its parts with some heads, and the messages of such sums."""

    def __init__(self, programs: list, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(programs)
        self.events: list[list] = [[] for _ in programs]
        differentiate = _cp_ring_backward._differentiate

        def watched(ring, grads, parts, keys, sums, incoming) -> None:
            heads = keys[0].shape[ring.p.kv.heads_axis]
            if heads < ring.p.heads_kv:
                self.events[ring.p.rank] += [(heads, "adds" if sums.written else "writes")]
                assert len(parts) == 1
            differentiate(ring, grads, parts, keys, sums, incoming)

        monkeypatch.setattr(_cp_ring_backward, "_differentiate", watched)

    def _post(self, rank: int, exchange: Exchange):
        sums = [t for _, t in exchange.sends if t.dtype == torch.float32]
        self.events[rank] += [(t.shape[3], "sent") for t in sums]
        return super()._post(rank, exchange)


@pytest.mark.parametrize(("heads", "halves"), [((4, 2), (1, 1)), ((6, 3), (1, 2))])
def test_sums_of_half_of_the_heads_travel_while_the_other_half_is_computed(
    heads: tuple[int, int], halves: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So every part of the second step and of later ones adds to sums that have come."""
    words = {"heads": heads, "dtype": torch.bfloat16, "mask": "causal"}
    shared = Shared(4, 64, ("ring", 1), **words)
    o, _, saved = shared.forward()
    dout = torch.randn_like(o)
    programs = [backward(p, x, s, shared.local(dout, p.rank), None)
                for (p, x), s in zip(shared.calls, saved, strict=True)]  # fmt: skip
    ranks = Watched(programs, monkeypatch)
    ranks.run()
    wanted = [(n, what) for how in ("writes", "adds", "adds") for n in halves
              for what in (how, "sent")]  # fmt: skip
    assert ranks.events == [wanted] * 4


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("heads", [(4, 1), (6, 3)])
def test_a_ring_of_few_heads(world: int, heads: tuple[int, int]) -> None:
    """One head of keys, or three, has no halves of equal size."""
    shared = Shared(world, 64, ("ring", 1), mask="causal", heads=heads)
    o, _, saved = shared.forward()
    dout = torch.randn_like(o)
    whole = [t.requires_grad_() for t in (shared.q, shared.k, shared.v)]
    wanted = torch.autograd.grad(attention(*whole, format="bshd", mask="causal"), whole, dout)
    for got, one in zip(shared.backward(saved, dout), wanted, strict=True):
        torch.testing.assert_close(got, one, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"mask": "causal", "alibi": True}])
@pytest.mark.parametrize("world", [2, 4])
def test_a_ring_merges_in_the_kernels_of_hopper(world: int, options: dict) -> None:
    words = {"dtype": torch.bfloat16, "dim": 64, "heads": (8, 4), "device": "cuda"}
    shared = Shared(world, 1024, ("ring", 1), **words, **options)
    o, _, saved = shared.forward()
    dout = torch.randn_like(o)
    got = [o, *shared.backward(saved, dout)]
    exact = [t.double().cpu().requires_grad_() for t in (shared.q, shared.k, shared.v)]
    wanted = attention(*exact, format="bshd", **options)
    for one, of_all in zip(
        got, (wanted, *torch.autograd.grad(wanted, exact, dout.double().cpu())), strict=True
    ):
        error = (one.double().cpu() - of_all).norm() / of_all.norm()
        assert error < 2**-7
    memo = shared.calls[0][0].memo
    merged = {word: value for (word, *_), value in memo.items() if word in ("merges", "adds")}
    # Backward with ALiBi is portable's, which does not add to what is there.
    assert merged == {"merges": True, "adds": "alibi" not in options}


@pytest.mark.parametrize("how", HOW)
def test_dropout_drops_what_one_device_drops(how: tuple[str, int]) -> None:
    rng, rows = torch.tensor([11, 12]), 64
    options = {"dropout": 0.4, "rng_state": rng, "mask": "causal"}
    if how[0] == "halo":
        options["window"] = (40, None)
    shared = Shared(4, rows, how, dim=rows, **options)
    shared.q.zero_()
    for _, x in shared.calls:
        x.q.zero_()
        x.k.zero_()
    for (p, x), _ in zip(shared.calls, range(4), strict=True):
        x.v.copy_(shared.local(torch.eye(rows).view(1, rows, 1, rows).expand(2, -1, 2, -1), p.rank))
    o, *_ = shared.forward()
    eye = torch.eye(rows).view(1, rows, 1, rows).expand(2, -1, 2, -1)
    zeros = torch.zeros(2, rows, 4, rows)
    wanted = attention(zeros, torch.zeros(2, rows, 2, rows), eye, format="bshd", **options)
    assert torch.equal(o != 0, wanted != 0)  # which probabilities are kept


def test_a_joined_part_adds_to_rows_of_which_some_have_no_sum_yet() -> None:
    """As with a bottom-right mask of unequal lengths over 4 ranks."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 48, 2, 16, generator=generator, requires_grad=True)
    k, v = (torch.randn(1, 96, 2, 16, generator=generator, requires_grad=True) for _ in range(2))
    options = {"format": "bshd", "mask": "causal_bottom_right"}
    o = attention(q, k, v, **options)
    wanted = torch.autograd.grad(o.sum(), [q, k, v])
    sides = [Side("bshd", 4, True, n) for n in (48, 96, 96)]
    calls, local = [], []
    for r in range(4):
        cut = [
            torch.cat([t[:, p.begin : p.end] for p in side.shard(r).pieces], 1).detach()
            for t, side in zip((q, k, v), sides, strict=True)
        ]
        a = describe(*cut, **options)._replace(training=True)
        calls.append(make_problem(a, Distribution(4, r, "ring", 1, True, (48, 96))))
        local.append(torch.ones_like(cut[0]))
    saved = [s for _, s in LockStep([forward(p, x) for p, x in calls]).run()]
    found = LockStep(
        [backward(p, x, s, d, None) for (p, x), s, d in zip(calls, saved, local, strict=True)]
    ).run()
    for i, side in enumerate(sides):
        torch.testing.assert_close(side.join([g[i] for g in found], 0), wanted[i])


WINDOW = {"mask": "causal", "window": (20, None)}
ALIBI = {"mask": "causal", "alibi": True}


@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, WINDOW, {"window": (20, 9)}, ALIBI])
def test_parts_with_the_own_keys_that_wait_for_the_end_add_to_the_others(options: dict) -> None:
    """With windows, gradients of other ranks arrive before a part that was left for the end."""
    shared = Shared(8, 256, ("ring", 1), dtype=torch.float64, **options)
    o, _, saved = shared.forward()
    leaves = [t.requires_grad_() for t in (shared.q, shared.k, shared.v)]
    wanted = torch.autograd.grad(attention(*leaves, format="bshd", **options), leaves, o.sin())
    for one, exact in zip(shared.backward(saved, o.sin()), wanted, strict=True):
        torch.testing.assert_close(one, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [64, 45])
def test_heads_for_rows_give_the_bits_of_one_device(dtype: torch.dtype, rows: int) -> None:
    shared = Shared(2, rows, ("a2a", 1), dtype=dtype, mask="causal", sink="off_by_one")
    o, *_ = shared.forward()
    wanted = attention(
        shared.q, shared.k, shared.v, format="bshd", mask="causal", sink="off_by_one"
    )
    assert torch.equal(o, wanted)


@pytest.mark.parametrize("how", HOW)
def test_results_have_the_same_bits_each_time(how: tuple[str, int]) -> None:
    found = []
    for _ in range(2):
        shared = Shared(4, 72, how, dtype=torch.bfloat16, mask="causal", window=(50, None))
        o, _, saved = shared.forward()
        found.append((o, *shared.backward(saved, torch.ones_like(o))))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_partial_results_are_rounded_once() -> None:
    shared = Shared(8, 256, ("ring", 1), dtype=torch.bfloat16)
    o, *_ = shared.forward()
    exact = attention(*(t.double() for t in (shared.q, shared.k, shared.v)), format="bshd")
    alone = attention(shared.q, shared.k, shared.v, format="bshd")
    error, of_one = ((x.double() - exact).abs().max() for x in (o, alone))
    assert error <= 1.05 * of_one


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_ring_receives_the_keys_of_all_others_once(world: int) -> None:
    shared = Shared(world, 128, ("ring", 1), mask="causal")
    _, steps, saved = shared.forward()
    one = shared.k.numel() // world * 4 * 2
    assert steps.received == [(world - 1) * one] * world
    assert len(set(steps.exchanges)) == 1  # the same sequence of transfers on every rank
    shared.backward(saved, torch.ones_like(shared.q))


def test_a_halo_receives_the_window_whatever_the_length() -> None:
    """A window of 1,024 rows on both sides of 128 Ki, 8 ranks: 1.1 of 2 * 1,024 rows at most."""
    rows = 1 << 17
    q = torch.empty(1, rows // 8, 1, 8)
    for rank in range(8):
        a = describe(q, q, q, format="bshd", window=(1024, 1024))
        p, _ = make_problem(a, Distribution(8, rank, "halo", 1, False, rows))
        plan = halo_plan(p)
        received = sum(n for r, n in enumerate(plan.sizes) if r != rank)
        assert received <= 1.1 * 2 * 1024
        assert received >= 1024


def test_a_causal_window_copies_only_the_rows_next_to_other_pieces() -> None:
    rows, window = 1 << 17, 1023
    q = torch.empty(1, rows // 8, 1, 8)
    for rank in range(8):
        a = describe(q, q, q, format="bshd", mask="causal", window=(window, None))
        p, _ = make_problem(a, Distribution(8, rank, "halo", 1, True, rows))
        assert sum(halo_plan(p).sizes) <= 2 * 2 * window  # of two pieces; from this rank, too


def test_a_plan_of_rows_is_that_of_one_format() -> None:
    rows, world = 64, 2
    for form, axis in (("bhsd", 2), ("bshd", 1)):
        q = torch.randn(2, *((4, rows) if axis == 2 else (rows, 4)), 8)
        options = {"format": form, "mask": "causal", "window": (20, None)}
        side, calls = Side(form, world, True, rows), []
        for r in range(world):
            mine = torch.cat([q.narrow(axis, x.begin, x.end - x.begin)
                              for x in side.shard(r).pieces], axis)  # fmt: skip
            a = describe(mine, mine, mine, **options)
            calls.append(make_problem(a, Distribution(world, r, "halo", 1, True, rows)))
        results = LockStep([forward(p, x) for p, x in calls]).run()
        o = side.join([outputs[0] for outputs, _ in results], 0)
        torch.testing.assert_close(o, attention(q, q, q, **options))


def test_a_problem_is_kept_for_equal_calls() -> None:
    q = torch.zeros(1, 16, 2, 8)
    calls = [describe(q, q, q, format="bshd", mask=mask) for mask in ("causal", "causal", None)]
    found = [problem_of(a, Distribution(2, 1, "ring", 1, True, None))[0] for a in calls]
    assert found[0] is found[1] and found[2] is not found[0]
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    a = describe(q, q, q, format="bshd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    found = [problem_of(a, Distribution(2, 1, "ring", 1, True, None))[0] for _ in range(2)]
    assert found[0] is not found[1]  # lengths may have changed in place


def test_the_chunks_of_python_are_those_of_the_schedule() -> None:
    for world in (1, 2, 3, 8):
        for zigzag in (True, False):
            for length in (0, 1, 16, 37, 64, 100, 333):
                chunks = world * (2 if zigzag else 1)
                tensor = chunk_rows(torch.tensor([length]), chunks)
                assert int(tensor) == chunk_rows(length, chunks)
                for rank in range(world):
                    parts, _ = schedule(
                        world=world, rank=rank, inner=0, strategy=0, positions=1,
                        sharding=0 if zigzag else 1, seqlen_q=length, seqlen_kv=length,
                    )  # fmt: skip
                    side = Side("bshd", world, zigzag, length)
                    seen = {(p.origin_row, p.q_count) for p in parts}
                    pieces = side.shard(rank).pieces
                    rows = {(p.begin, p.end - p.begin) for p in pieces if p.end > p.begin}
                    assert seen == rows


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 24])
def test_published_slopes_are_those_of_the_engines(heads: int) -> None:
    q = torch.randn(1, 5, heads, 8)
    options = {"format": "bshd", "mask": "causal"}
    given = attention(q, q, q, alibi=torch.tensor(published_slopes(heads)), **options)
    torch.testing.assert_close(given, attention(q, q, q, alibi=True, **options))


def test_ranks_that_do_not_fit_together_are_found_without_waiting() -> None:
    def silent():
        return None
        yield

    def waits(peer: int):
        yield (yield Exchange(receives=[(peer, torch.zeros(3))]))

    def sends(peer: int, n: int):
        yield (yield Exchange(sends=[(peer, torch.zeros(n))]))

    with pytest.raises(DeadlockError, match=r"no rank can go on.*\(1, 0, 0\)"):
        LockStep([waits(1), silent()]).run()
    with pytest.raises(DeadlockError, match=r"sent and not received: \[\(1, 0, 0\)\]"):
        LockStep([silent(), sends(0, 3)]).run()
    with pytest.raises(DeadlockError, match=r"is \(4,\) of torch.float32; needs \(3,\)"):
        LockStep([waits(1), sends(0, 4)]).run()


def problem(world: int = 2, rank: int = 0, strategy: str = "ring", seqlens=None, **options):
    rows = options.pop("rows", 32)
    q = torch.zeros(1, rows, 2, 8)
    if options.get("format", "bshd") == "thd":
        q = q[0]
    a = describe(q, q, q, **({"format": "bshd"} | options))
    return make_problem(a, Distribution(world, rank, strategy, 1, True, seqlens))


def test_refusals_name_the_argument() -> None:
    with pytest.raises(ValueError, match=r"q.shape\[1\] is 32; needs 24, the rows of rank 1 of 2"):
        problem(rank=1, seqlens=48)
    with pytest.raises(ValueError, match="page_table is given; needs None"):
        problem(page_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bias is of shape .*; needs 1 or 64 rows and 1 or 64 c"):
        cu = torch.tensor([0, 64], dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 64}
        problem(format="thd", bias=torch.zeros(1, 1, 32, 64), **lengths)
    with pytest.raises(ValueError, match=r"q.shape\[0\] is 32; needs 30 tokens, those of rank 0"):
        cu = torch.tensor([0, 60], dtype=torch.int32)
        problem(format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with pytest.raises(ValueError, match="cu_seqlens_q is None; needs the global"):
        problem(format="thd")
    with pytest.raises(ValueError, match=r"bias is of shape \[1, 1, 64, 64\]; needs"):
        problem(bias=torch.zeros(1, 1, 64, 64))
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="group is NoneType; needs a ProcessGroup"):
        cp.context_parallel_attention(q, q, q, group=None)
    with pytest.raises(ValueError, match="strategy is 'star'; needs one of auto, ring"):
        cp.context_parallel_attention(q, q, q, group=None, strategy="star")
    with pytest.raises(ValueError, match=r"group is NoneType; needs \(inner, outer\) groups"):
        cp.context_parallel_attention(q, q, q, group=None, strategy=("a2a", "ring"))
    with pytest.raises(ValueError, match="sharding is 'striped'; needs one of zigzag"):
        cp.context_parallel_attention(q, q, q, group=None, sharding="striped")


def test_explain_tells_the_choice_and_the_steps() -> None:
    q = torch.zeros(1, 4096, 8, 64)
    text = cp.explain(q, q, q, world=4, rank=1, format="bshd", mask="causal", strategy="ring")
    assert "rank 1 of 4: ring, zigzag shards" in text
    assert "halo: cannot run: no window on both sides" in text
    assert "step 0: queries (0, 1) x keys (0, 1) of 1 masked; sends and receives keys" in text
    assert "step 1: queries (0, 1) x keys (0,) of 0; sends and receives keys" in text
    window = {"window": (127, None), "mask": "causal", "format": "bshd"}
    text = cp.explain(q, q, q, world=4, sharding="contiguous", **window)
    assert "halo (chosen)" in text
    few = cp.explain(q, q, q, world=16, format="bshd")
    assert "a2a: cannot run: 8 heads of q are fewer than 16 ranks" in few


def test_explain_tells_whether_a_call_is_repeated() -> None:
    q = torch.zeros(1, 64, 8, 64)
    options = {"format": "bshd", "strategy": "ring", "world": 4}
    repeated = "equal calls after the second are repeated from a recording"
    assert repeated in cp.explain(q, q, q, **options)
    for more, why in (
        ({"dropout": 0.1}, "dropout"),
        ({"strategy": "a2a"}, "the strategy a2a"),
        ({"strategy": "ring", "world": 1}, "one rank has no transfers"),
        ({"sink": torch.zeros(8)}, "options that are tensors"),
    ):
        text = cp.explain(q, q, q, **(options | more))
        assert f"each call runs its program in Python: {why}" in text
        assert repeated not in text


def test_few_queries_go_to_the_keys() -> None:
    q, k = torch.zeros(1, 4, 32, 128), torch.zeros(1, 16384, 8, 128)
    options = {"world": 8, "format": "bshd", "mask": "causal_bottom_right"}
    text = cp.explain(q, k, k, **options, sharding="contiguous")
    assert "gather_q (chosen)" in text
    long = torch.zeros(1, 16384, 8, 128)
    assert "gather_q (chosen)" not in cp.explain(long, long, long, world=8, format="bshd")


def test_gathered_queries_receive_no_keys() -> None:
    """Decoding: 4 rows of queries of each rank, 1,024 rows of keys."""
    world, rows, heads, dim = 4, 16, 4, 16
    calls = []
    for r in range(world):
        q, k = torch.randn(1, rows // world, heads, dim), torch.randn(1, 1024, 2, dim)
        a = describe(q, k, k, format="bshd", mask="causal_bottom_right")
        calls.append(make_problem(a, Distribution(world, r, "gather_q", 1, False, (rows, 4096))))
    steps = LockStep([forward(p, x) for p, x in calls])
    steps.run()
    of_a_rank = rows // world * heads * 4  # bytes of a column of Q, or of LSE
    assert steps.received == [(world - 1) * of_a_rank * (2 * dim + 1)] * world


def test_slow_links_change_the_choice() -> None:
    q = torch.zeros(1, 512, 8, 64)
    slow = cp.Topology(gbps=0.001)
    text = cp.explain(q, q, q, world=2, format="bshd", topology=slow)
    assert "a2a (chosen)" in text
