"""FP8 on sequences that virtual ranks share in lock-step."""

import pytest
import torch

from te_attention.torch import attention
from te_attention.torch import context_parallel as cp
from te_attention.torch._cp_layout import Side
from te_attention.torch._cp_problem import Distribution, make_problem, problem_of
from te_attention.torch._cp_run import backward, forward
from te_attention.torch._cp_transport import LockStep
from te_attention.torch.fp8.formats import E4M3
from te_attention.torch.functional import describe

HOW = [("ring", 1), ("all_gather", 1), ("a2a", 1), ("halo", 1), ("ring", 2), ("gather_q", 1)]
WINDOW = {"mask": "causal", "window": (40, None)}
OPTIONS = [
    {},
    {"mask": "causal"},
    WINDOW,
    {"mask": "causal", "alibi": True},
    {"mask": "causal", "dropout": 0.3, "rng_state": torch.tensor([3, 4])},
    {"mask": "causal", "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"softcap": 5.0, "scale": 0.3},
]
ROWS, HEADS, DIM = 128, (4, 2, 2), 32


class Shared:
    """q, k, v and dO of all rows, and the calls of the ranks.

    `loud`: the factor of the values of rank 0. `dsink`: what each rank's backward pass returned.
    """

    def __init__(self, how: tuple[str, int], world: int = 4, loud: float = 1.0, **options) -> None:
        generator = torch.Generator().manual_seed(5)
        self.side = Side("bshd", world, True, ROWS)
        self.whole = [
            torch.randn(2, ROWS, h, DIM, generator=generator).bfloat16() for h in (*HEADS, HEADS[0])
        ]
        for tensor in self.whole:
            tensor[:, -ROWS // (2 * world) :] *= loud  # of rank 0
        self.options, self.calls = {"format": "bshd"} | options, []
        for r in range(world):
            a = describe(*(self.local(t, r) for t in self.whole[:3]), **self.options)
            a = a._replace(training=True)
            self.calls.append(make_problem(a, Distribution(world, r, *how, True, ROWS, True)))

    def local(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        pieces = self.side.shard(rank).pieces
        return torch.cat([tensor[:, p.begin : p.end] for p in pieces], 1)

    def run(self) -> tuple[list[torch.Tensor], LockStep, list]:
        """O, dQ, dK and dV of all rows; the transfers of forward; what it saved."""
        steps = LockStep([forward(p, x) for p, x in self.calls])
        results = steps.run()
        saved = [s for _, s in results]
        programs = [
            backward(p, x, s, self.local(self.whole[3], p.rank), None)
            for (p, x), s in zip(self.calls, saved, strict=True)
        ]
        found = LockStep(programs).run()
        self.dsink = [g[4] for g in found]
        out = [[r[0][0] for r in results], *([g[i] for g in found] for i in range(3))]
        return [self.side.join(one, 0) for one in out], steps, saved

    def alone(self, dtype: torch.dtype, **more) -> list[torch.Tensor]:
        """The same of one device; the gradient of the sink is the last one."""
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in self.whole[:3]]
        options, inputs = self.options | more, leaves
        if "sink" in options:
            sink = options["sink"].to(torch.float64 if dtype is torch.float64 else torch.float32)
            options["sink"] = sink.requires_grad_()
            inputs = [*leaves, options["sink"]]
        o = attention(*leaves, **options)
        return [o, *torch.autograd.grad(o, inputs, self.whole[3].to(o.dtype))]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


CASES = [  # a halo needs a window
    pytest.param(how, options, id=f"{'-'.join(options) or 'full'}-{how}")
    for options in OPTIONS
    for how in HOW
    if how[0] != "halo" or "window" in options
]


@pytest.mark.parametrize(("how", "options"), CASES)
def test_errors_are_those_of_one_device(how: tuple[str, int], options: dict) -> None:
    shared = Shared(how, **options)
    found, _, _ = shared.run()
    exact, of_one = shared.alone(torch.float64), shared.alone(torch.bfloat16, fp8="current")
    if "sink" in options:
        found.append(shared.dsink[0])
        assert all(torch.equal(one, found[-1]) for one in shared.dsink)
    for one, wanted, alone in zip(found, exact, of_one, strict=True):
        assert one.dtype == alone.dtype
        assert error(one, wanted) <= 1.2 * error(alone, wanted)


@pytest.mark.parametrize("how", HOW[:3], ids=str)
def test_the_scale_of_a_tensor_is_that_of_all_rows(how: tuple[str, int]) -> None:
    """One rank has larger values: without its magnitude the others would have another scale."""
    shared = Shared(how, loud=30.0, mask="causal")
    found, _, saved = shared.run()
    _, scale = torch.ops.te_attention.fp8_quantize_current(shared.whole[0], E4M3.name)[1:3]
    assert all(torch.equal(s.operands.scales.q, scale) for s in saved)
    exact = shared.alone(torch.float64)
    of_one = shared.alone(torch.bfloat16, fp8="current")
    for one, wanted, alone in zip(found, exact, of_one, strict=True):
        assert error(one, wanted) <= 1.2 * error(alone, wanted)


def test_keys_travel_as_bytes() -> None:
    world = 4
    shared = Shared(("ring", 1), world, mask="causal")
    _, steps, _ = shared.run()
    of_one = shared.whole[1].numel() // world * 2
    amaxes = 3 * 4
    assert steps.received == [(world - 1) * (of_one + amaxes)] * world


@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_cache_in_fp8_is_that_of_one_device(how: tuple[str, int], count: int | None) -> None:
    """Also where more ranks than key heads have copies of them."""
    generator, world = torch.Generator().manual_seed(6), 4
    q, k, v = (torch.randn(2, ROWS, h, DIM, generator=generator).bfloat16() for h in (6, 2, 2))
    k, v = k.to(E4M3.torch), v.to(E4M3.torch)
    descales = [None if count is None else torch.rand(count, generator=generator) + 0.5
                for _ in range(2)]  # fmt: skip
    options = WINDOW | {"format": "bshd", "k_descale": descales[0], "v_descale": descales[1]}
    side, calls = Side("bshd", world, True, ROWS), []
    for r in range(world):
        rows = [i for piece in side.shard(r).pieces for i in range(piece.begin, piece.end)]
        for _ in range(2):  # the second call has the kept problem
            call = problem_of(
                describe(*(t[:, rows] for t in (q, k, v)), **options),
                Distribution(world, r, *how, True, ROWS),
            )
        calls.append(call)
    for _ in range(2):  # the second run has the kept arguments
        results = LockStep([forward(p, x) for p, x in calls]).run()
        found = side.join([outputs[0] for outputs, _ in results], 0)
        torch.testing.assert_close(found, attention(q, k, v, **options), atol=0.01, rtol=0.01)


def test_fp8_with_scales_of_the_caller_is_refused() -> None:
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(ValueError, match="fp8 is of type object; needs 'current'"):
        cp.explain(q, q, q, world=2, fp8=object(), format="bshd")
    with pytest.raises(
        ValueError, match=r"q\.dtype is float64; needs float16, bfloat16 or float32"
    ):
        cp.explain(q.double(), q, q, world=2, fp8="current", format="bshd")
