"""attention() on a CUDA device: the oracle's cases, graphs, streams, and the host's time."""

import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cases import run
from kit import draw
from te_attention import torch as tea
from te_attention.torch._library import OPS

pytestmark = pytest.mark.gpu
BLOCKS, SIZE = 16, 34  # cases: the product


def cases(block: int) -> list[tuple[int, str]]:
    """SIZE cases of a block that a GPU computes: fp8 is not attention()'s, fp64 the CPU's."""
    found: list[tuple[int, str]] = []
    seed = 1000 * (block + 1)
    while len(found) < SIZE:
        line = draw(seed)
        if "dtype=e" not in line.split("|")[0] and "dtype=fp64" not in line:
            found.append((seed, line))
        seed += 1
    return found


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_cases_agree_with_the_oracle(block: int) -> None:
    wrong = [
        run(line, choice=seed, large=seed // 2 % 2 == 0, device="cuda")
        for seed, line in cases(block)
    ]
    assert not any(wrong), "\n".join(w for w in wrong if w)


def inputs(*shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(*shape, **options) for _ in range(3)]


def test_it_is_sdpa() -> None:
    q, k, v = inputs(2, 8, 300, 64)
    got = tea.attention(q, k, v, mask="causal")
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    dout = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), dout),
        torch.autograd.grad(want, (q, k, v), dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("parts", ["unbind", "split"])
def test_gradients_of_parts_of_one_tensor(parts: str) -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    if parts == "unbind":
        views = torch.randn(2, 300, 3, 8, 64, **options).unbind(2)
    else:
        views = torch.randn(2, 300, 12, 128, **options).split((8, 2, 2), 2)
    alone = [t.detach().clone().requires_grad_() for t in views]
    dout = torch.randn_like(views[0])
    got, want = (
        torch.autograd.grad(tea.attention(*t, format="bshd", mask="causal"), t, dout)
        for t in (views, alone)
    )
    assert len({g.untyped_storage().data_ptr() for g in got}) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_capture_draws_new_dropout_at_each_replay() -> None:
    q, k, v = (t.detach() for t in inputs(1, 2, 64, 64))
    tea.attention(q, k, v, dropout=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rng_state = tea.new_rng_state("cuda")
        o = tea.attention(q, k, v, dropout=0.5, rng_state=rng_state)
    graph.replay()
    first = o.clone()
    graph.replay()
    assert not torch.equal(first, o)
    assert torch.equal(o, tea.attention(q, k, v, dropout=0.5, rng_state=rng_state))


def test_make_graphed_callables() -> None:
    module = tea.Attention(mask="causal")
    # Of other leaves: capture must not meet a gradient's node of the default stream.
    leaves = inputs(1, 2, 64, 64)
    want = module(*leaves)
    expected = torch.autograd.grad(want.float().square().sum(), leaves)
    q, k, v = inputs(1, 2, 64, 64)
    graphed = torch.cuda.make_graphed_callables(module, (q, k, v))
    got = graphed(q, k, v)
    assert torch.equal(got, want)
    for a, b in zip(
        torch.autograd.grad(got.float().square().sum(), (q, k, v)), expected, strict=True
    ):
        torch.testing.assert_close(a, b)


def test_the_current_stream_orders_the_work() -> None:
    q, k, v = (t.detach() for t in inputs(1, 2, 64, 64))
    want = tea.attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = q * 1
        got = tea.attention(late, k, v)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode: str) -> None:
    every = inputs(1, 2, 64, 64)

    def function(q, k, v):
        return tea.attention(q, k, v, mask="causal") * 2

    compiled = torch.compile(function, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()  # the last one's results may be overwritten
        got, want = compiled(*every), function(*every)
        torch.testing.assert_close(got, want)
        # Into new tensors: a .grad of the last step is memory of the graph, and overwritten too.
        gradients = (torch.autograd.grad(o.float().sum(), every) for o in (got, want))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)


def microseconds(call, count: int = 500) -> float:
    """The host time of a call: the least of five rounds, in microseconds."""
    for _ in range(100):
        call()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
        torch.cuda.synchronize()
    return best * 1e6


@pytest.mark.timing
def test_host_time(capsys: pytest.CaptureFixture) -> None:
    q, k, v = inputs(1, 1, 16, 64)
    plain = [t.detach() for t in (q, k, v)]
    dout = torch.randn_like(q)

    def both(function) -> None:
        torch.autograd.grad(function(q, k, v), (q, k, v), dout)

    times = {
        "inference.default": microseconds(lambda: OPS.inference.default(*plain)),
        "forward.default": microseconds(lambda: OPS.forward.default(*plain)),
        "attention(), no grad": microseconds(lambda: tea.attention(*plain)),
        "attention(), grad": microseconds(lambda: tea.attention(q, k, v)),
        "attention(), both": microseconds(lambda: both(tea.attention)),
        "sdpa, no grad": microseconds(lambda: scaled_dot_product_attention(*plain)),
        "sdpa, grad": microseconds(lambda: scaled_dot_product_attention(q, k, v)),
        "sdpa, both": microseconds(lambda: both(scaled_dot_product_attention)),
    }
    with capsys.disabled():
        for name, value in times.items():
            print(f"host time {name}: {value:.1f} us")
    assert times["inference.default"] <= 10
    assert times["attention(), grad"] <= 20
