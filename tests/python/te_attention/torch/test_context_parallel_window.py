"""Windows whose rows ranks compute as if they were one sequence, against one device."""

import pytest
import torch

from te_attention.torch import _cp_window, attention
from te_attention.torch._cp_halo import halo_plan
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_problem import Distribution, make_problem
from te_attention.torch._cp_run import backward, forward
from te_attention.torch._cp_transport import LockStep
from te_attention.torch.functional import describe

AXIS = {"bhsd": 2, "bshd": 1, "sbhd": 0}


class Case:
    """Tensors of one device, and the calls of ranks."""

    def __init__(
        self, world: int, rows: int, form: str, zigzag: bool, heads=(4, 2), dims=(16, 16),
        dtype=torch.float64, device="cpu", **options,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(rows + world)
        self.options = {"format": form, "mask": "causal"} | options
        (q, kv), (qk, v) = heads, dims
        counts = ((q, qk), (kv, qk), (kv, v), (q, v))
        self.tensors = []
        for head, dim in counts:
            shape = {"bhsd": (2, head, rows, dim), "bshd": (2, rows, head, dim),
                     "sbhd": (rows, 2, head, dim)}[form]  # fmt: skip
            self.tensors.append(torch.randn(shape, generator=generator, dtype=dtype).to(device))
        self.side, self.axis = Side(form, world, zigzag, rows), AXIS[form]
        self.calls = []
        for rank in range(world):
            local = [self.local(t, rank) for t in self.tensors[:3]]
            a = describe(*local, **self.options)._replace(training=True)
            self.calls.append(make_problem(a, Distribution(world, rank, "halo", 1, zigzag, rows)))

    def local(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        pieces = self.side.shard(rank).pieces
        return torch.cat([tensor.narrow(self.axis, p.begin, p.end - p.begin) for p in pieces],
                         self.axis)  # fmt: skip

    def shared(self) -> list[torch.Tensor]:
        """O and the gradients, of all ranks."""
        results = LockStep([forward(p, x) for p, x in self.calls]).run()
        programs = [
            backward(p, x, saved, self.local(self.tensors[3], p.rank), None)
            for (p, x), (_, saved) in zip(self.calls, results, strict=True)
        ]
        found = LockStep(programs).run()
        o = self.side.join([outputs[0] for outputs, _ in results], 0)
        return [o, *(self.side.join([g[i] for g in found], 0) for i in range(3))]

    def alone(self) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in self.tensors[:3]]
        o = attention(*leaves, **self.options)
        return [o.detach(), *torch.autograd.grad(o, leaves, self.tensors[3])]


@pytest.mark.parametrize("form", AXIS)
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_windows_agree_with_one_device(form: str, zigzag: bool, world: int) -> None:
    # Windows shorter than a chunk, of a chunk, and of several; chunks of unequal sizes.
    for rows, window in ((96, 3), (96, 96 // (2 * world)), (96, 50), (100, 17)):
        case = Case(world, rows, form, zigzag, window=(window, None))
        for got, wanted in zip(case.shared(), case.alone(), strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_a_window_with_other_options() -> None:
    options = {"window": (20, None), "softcap": 5.0, "scale": 0.3}
    case = Case(2, 128, "bshd", True, heads=(6, 2), dims=(24, 16), **options)
    for got, wanted in zip(case.shared(), case.alone(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_gradients_of_16_bits_are_rounded_as_often_as_said() -> None:
    """Once, and twice where two launches have the same keys."""
    case = Case(2, 256, "bshd", True, dtype=torch.bfloat16, window=(40, None))
    wide = Case(2, 256, "bshd", True, dtype=torch.bfloat16, window=(40, None))
    wide.tensors = [t.double() for t in case.tensors]
    for got, wanted in zip(case.shared(), wide.alone(), strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 4), (4, 1)])
@pytest.mark.parametrize("world", [2, 4])
def test_windows_on_a_gpu(world: int, heads: tuple[int, int]) -> None:
    words = {"dtype": torch.bfloat16, "dims": (64, 64), "heads": heads, "window": (70, None)}
    case = Case(world, 2048, "bshd", True, **words)
    shared = Case(world, 2048, "bshd", True, **words, device="cuda")
    case.tensors = [t.double() for t in case.tensors]
    for got, wanted in zip(shared.shared(), case.alone(), strict=True):
        error = (got.cpu().double() - wanted).norm() / wanted.norm()
        assert error < 2**-7


def plans(world: int, zigzag: bool) -> list:
    q = torch.empty(1, (1 << 17) // world, 1, 8)
    out = []
    for rank in range(world):
        a = describe(q, q, q, format="bshd", mask="causal", window=(1023, None))
        p, _ = make_problem(a, Distribution(world, rank, "halo", 1, zigzag, 1 << 17))
        out.append(halo_plan(p, local=True))
    return out


@pytest.mark.parametrize("zigzag", [True, False])
def test_two_launches_at_most_with_the_large_one(zigzag: bool) -> None:
    for plan in plans(8, zigzag):
        small = _cp_window._small(plan, plan.before)
        assert len(small) <= (2 if zigzag else 1)
        for rank in range(8):
            assert len(plan.gives[rank]) <= 2
        received = sum(n for r, n in enumerate(plan.sizes) if r != plan.p.rank)
        assert received <= len(small) * 1023


def test_pieces_that_follow_each_other_need_no_keys_of_others() -> None:
    last = plans(4, True)[3]  # chunks 3 and 4 of 8
    assert len(_cp_window._small(last, last.before)) == 1


@pytest.mark.parametrize("zigzag", [True, False])
def test_no_row_is_computed_twice(zigzag: bool) -> None:
    for plan in plans(8, zigzag):
        runs = _cp_window._runs(plan)
        parts = [part for part, _ in _cp_window._small(plan, plan.before)]
        small = [plan.rows.pieces[i] for part in parts for i in part.q]
        assert sum(rows.size for rows, _ in runs) + sum(p.end - p.begin for p in small) == 1 << 14
        assert sum(keys.size for _, keys in runs) == 1 << 14


@pytest.mark.parametrize("zigzag", [True, False])
def test_small_launches_of_backward_have_the_keys_before_a_run(zigzag: bool) -> None:
    for plan in plans(8, zigzag):
        for part, shard in _cp_window._small(plan, plan.before):
            (keys,) = shard.pieces
            assert keys.end == plan.rows.pieces[part.q[0]].begin
            assert keys.end - keys.begin == 1023
