"""float64 tensors are computed in float64 throughout, against a definition in float64."""

import math

import pytest
import torch
from torch import Tensor

from te_attention import torch as tea

BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 33, 41, 24
SCALE, SOFTCAP, DROPOUT = 0.1, 20.1, 0.3  # none of them is a float32
BOUND = 1e-12


def definition(q: Tensor, k: Tensor, v: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """O and LSE, as docs/semantics.md defines them."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    x = q @ k.mT * options.get("scale", 1 / math.sqrt(q.shape[-1]))
    if cap := options.get("softcap"):
        x = cap * torch.tanh(x / cap)
    if (bias := options.get("bias")) is not None:
        x = x + bias
    if (slopes := options.get("alibi")) is not None:
        x = x - slopes[:, None, None] * (rows - columns).abs()
    if options.get("mask") == "causal":
        x = x.masked_fill(columns > rows, -math.inf)
    sink = options.get("sink")
    lse = x.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None].expand_as(lse))
    p = torch.exp(x - lse[..., None])
    if rate := options.get("dropout"):
        p = p * tea.dropout_mask(options["rng_state"], rate, p.shape) / (1 - rate)
    return p @ v, lse


def option_sets() -> dict[str, dict]:
    """Options by name; the tensors among them are made anew for every test."""
    torch.manual_seed(1)
    real = {"dtype": torch.float64}
    return {
        "default": {},
        "causal": {"mask": "causal"},
        "scale": {"scale": SCALE},
        "softcap": {"softcap": SOFTCAP},
        "bias": {"bias": torch.randn(BATCH, HEADS, ROWS, KEYS, **real).requires_grad_()},
        "slopes": {"alibi": torch.rand(HEADS, **real)},
        "sink": {"sink": torch.randn(HEADS, **real).requires_grad_()},
        "dropout": {"dropout": DROPOUT, "rng_state": torch.tensor([3, 5])},
        "all": {
            "mask": "causal",
            "scale": SCALE,
            "softcap": SOFTCAP,
            "bias": torch.randn(1, HEADS, ROWS, KEYS, **real).requires_grad_(),
            "alibi": torch.rand(HEADS, **real),
            "sink": torch.randn(HEADS, **real).requires_grad_(),
            "dropout": DROPOUT,
            "rng_state": torch.tensor([3, 5]),
        },
    }


def relative(got: Tensor, want: Tensor) -> float:
    """The largest error over the largest value."""
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("factor", [1, 10, 30])
@pytest.mark.parametrize("name", option_sets())
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_outputs_and_gradients_have_float64_accuracy(engine: str, name: str, factor: int) -> None:
    options = option_sets()[name]
    torch.manual_seed(0)
    shapes = ((BATCH, HEADS, ROWS), (BATCH, HEADS_KV, KEYS), (BATCH, HEADS_KV, KEYS))
    inputs = [
        (factor * torch.randn(*shape, DIM, dtype=torch.float64)).requires_grad_()
        for shape in shapes
    ]
    tensors = inputs + [t for t in options.values() if isinstance(t, Tensor) and t.requires_grad]
    got = tea.attention(*inputs, **options, engine=engine, return_lse=True)
    want = definition(*inputs, options)
    assert got[1].dtype == torch.float64
    upstream = [torch.randn_like(t) for t in want]
    results = zip(
        [*got, *torch.autograd.grad(got, tensors, upstream)],
        [*want, *torch.autograd.grad(want, tensors, upstream)],
        strict=True,
    )
    errors = [relative(*pair) for pair in results]
    assert max(errors) <= BOUND, errors


def test_gradcheck_with_its_default_tolerances_holds_for_small_steps() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        return tea.attention(q, k, v, sink=sink, scale=SCALE, softcap=SOFTCAP, return_lse=True)

    assert torch.autograd.gradcheck(function, (*inputs, sink), rtol=1e-7, atol=1e-9)


def test_partial_results_merge_in_float64() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64) for _ in range(3))
    parts = [
        tea.attention(q, k[:, i : i + 3], v[:, i : i + 3], format="bshd", return_lse=True)
        for i in (0, 3)
    ]
    o, lse = torch.ops.te_attention.merge(*(list(x) for x in zip(*parts, strict=True)))
    want = tea.attention(q, k, v, format="bshd", return_lse=True)
    assert lse.dtype == torch.float64
    assert max(relative(o, want[0]), relative(lse, want[1])) <= BOUND


def test_compiled_code_knows_the_type_of_the_lse() -> None:
    inputs = [torch.randn(1, 2, 8, 8, dtype=torch.float64) for _ in range(3)]
    compiled = torch.compile(
        lambda q, k, v: tea.attention(q, k, v, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    for got, want in zip(compiled(*inputs), tea.attention(*inputs, return_lse=True), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want)
