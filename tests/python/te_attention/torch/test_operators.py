"""The operators as compatibility layers call them: a forward pass, then a backward pass."""

import pytest
import torch

from te_attention import library, version
from te_attention import torch as tea
from te_attention.torch import operators
from te_attention.torch.operators import Arguments, backward_out, forward

ROWS = 6
OPTIONS = {
    "minimal signature": {},
    "all": {"window_left": 3, "softcap": 5.0, "max_logit": True},
    "bias and sink": {"bias": torch.linspace(-1, 1, ROWS**2), "sink": torch.tensor([0.5, -0.5])},
}


def arguments_of(options: dict) -> Arguments:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, ROWS, 8) for _ in range(3))
    if "bias" in options:
        options = options | {"bias": options["bias"].view(1, 1, ROWS, ROWS)}
    return Arguments(q, k, v, mask="causal", training=True, **options)


def by_autograd(a: Arguments) -> tuple[tuple, torch.Tensor]:
    """The results of attention(), and its gradients for the sum of squares of O."""
    given = [t.detach().requires_grad_() for t in (a.q, a.k, a.v, a.bias, a.sink) if t is not None]
    names = [name for name in ("bias", "sink") if getattr(a, name) is not None]
    small = dict(zip(names, given[3:], strict=True))
    window = None if a.window_left < 0 else (a.window_left, None)
    more = {"return_lse": True, "return_max_logit": a.max_logit}
    out = tea.attention(*given[:3], mask=a.mask, window=window, softcap=a.softcap, **small, **more)
    return out, torch.autograd.grad(out[0].square().sum(), given)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_forward_and_backward_are_those_of_attention(options: dict) -> None:
    a = arguments_of(options)
    o, lse, max_logit = forward(a)
    want, want_gradients = by_autograd(a)
    assert (max_logit is None) is not a.max_logit
    got = [t for t in (o, lse, max_logit) if t is not None]
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    gradients = tuple(torch.empty_like(t) for t in a[:3])
    wanted = ("bias" in options, "sink" in options)
    small = backward_out(gradients, 2 * o, None, o, lse, a, *wanted)
    assert tuple(t is not None for t in small) == wanted
    found = [*gradients, *(t for t in small if t is not None)]
    for x, y in zip(found, want_gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_every_operator_is_there() -> None:
    assert operators.ops is torch.ops.te_attention
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    assert operators.ops.cu_seqlens_from_lengths(lengths).tolist() == [0, 3, 7]


def test_the_c_api_is_there() -> None:
    assert library().tea_version().decode() == version()
