"""The operators of attention as PyTorch sees them: opcheck, gradients, empty tensors, strides."""

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch._arguments import Arguments
from te_attention.torch._library import OPS
from te_attention.torch._options import MINIMAL

CU = torch.tensor([0, 5, 9], dtype=torch.int32)
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def plain() -> Arguments:
    return Arguments(rows(2, 4, 9, 16), rows(2, 2, 7, 16), rows(2, 2, 7, 24), mask="causal")


def permuted() -> Arguments:
    q, k, v = (rows(2, 9, 4, 16).transpose(1, 2) for _ in range(3))
    return Arguments(q, k, v, window_left=3)


def packed() -> Arguments:
    q, k, v = torch.randn(2, 9, 12, 16).split(4, dim=2)
    return Arguments(q, k, v, format="bshd")


def sbhd() -> Arguments:
    return Arguments(rows(9, 2, 4, 16), rows(7, 2, 4, 16), rows(7, 2, 4, 16), format="sbhd")


def ragged() -> Arguments:
    q, k, v = (rows(9, 4, 16) for _ in range(3))
    return Arguments(
        q, k, v, format="thd", cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=5, max_seqlen_kv=5
    )


def extras() -> Arguments:
    return Arguments(
        *(rows(2, 4, 8, 16) for _ in range(3)),
        bias=rows(1, 4, 8, 8),
        sink=rows(4),
        softcap=5.0,
        dropout=0.25,
        rng_state=torch.tensor([1, 2]),
        alibi=True,
        max_logit=True,
    )


KINDS = [plain, permuted, packed, sbhd, ragged, extras]


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_the_differentiable_operator(kind) -> None:
    arguments = kind()._replace(training=True)
    torch.library.opcheck(OPS.attention.default, tuple(arguments), test_utils=CHECKS)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_of_forward_and_backward(kind) -> None:
    arguments = Arguments(
        *(x.detach() if isinstance(x, torch.Tensor) else x for x in kind()._replace(training=True))
    )
    o, lse, _ = OPS.forward(*arguments)
    torch.library.opcheck(OPS.forward.default, tuple(arguments), test_utils=CHECKS)
    wanted = (arguments.bias is not None, arguments.sink is not None)
    incoming = (torch.randn_like(o), None, o, lse, *wanted)
    torch.library.opcheck(OPS.backward.default, (*incoming, *arguments), test_utils=CHECKS)
    out = tuple(torch.empty_like(t) for t in arguments[:3])
    given = (*out, *incoming, *arguments)
    torch.library.opcheck(OPS.backward_out.default, given, test_utils=CHECKS)


WRONG = {
    "dout": (lambda t: t[..., :8], r"dout is of shape \[2, 4, 9, 8\]; needs \[2, 4, 9, 24\]"),
    "dlse": (lambda t: t[:1], r"dlse is of shape \[1, 4, 9\]; needs \[2, 4, 9\]"),
    "o": (lambda t: t[:, :, :8], r"o is of shape \[2, 4, 8, 24\]; needs \[2, 4, 9, 24\]"),
    "lse": (lambda t: t[0], r"lse is of shape \[4, 9\]; needs \[2, 4, 9\]"),
    "dq": (lambda t: t[0], r"dq is of shape \[4, 9, 16\]; needs \[2, 4, 9, 16\]"),
    "dk": (lambda t: t[:, :, :6], r"dk is of shape \[2, 2, 6, 16\]; needs \[2, 2, 7, 16\]"),
    "dv": (lambda t: t[..., :16], r"dv is of shape \[2, 2, 7, 16\]; needs \[2, 2, 7, 24\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_backward_takes_only_what_fits(name: str) -> None:
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in plain()]
    o, lse, _ = OPS.forward(*arguments)
    out = {n: torch.zeros_like(t) for n, t in zip(("dq", "dk", "dv"), arguments, strict=False)}
    given = {**out, "dout": torch.zeros_like(o), "dlse": torch.zeros_like(lse), "o": o, "lse": lse}
    OPS.backward_out(*given.values(), False, False, *arguments)
    cut, text = WRONG[name]
    with pytest.raises(RuntimeError, match=text):
        OPS.backward_out(*{**given, name: cut(given[name])}.values(), False, False, *arguments)
    double = {**given, name: given[name].double()}
    with pytest.raises(RuntimeError, match=rf"{name}\.dtype is float64; needs float32"):
        OPS.backward_out(*double.values(), False, False, *arguments)


def test_backward_of_a_scalar_gradient_is_refused() -> None:
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in plain()]
    o, lse, _ = OPS.forward(*arguments)
    with pytest.raises(RuntimeError, match=r"dout is of shape \[\]; needs \[2, 4, 9, 24\]"):
        OPS.backward(torch.tensor(1.0), None, o, lse, False, False, *arguments)


@pytest.mark.parametrize("causal", [False, True])
def test_inference_with_the_fewest_arguments(causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    wanted = OPS.inference(q, k, v, "bhsd", "causal" if causal else "none")
    assert torch.equal(OPS.inference_plain(q, k, v, causal), wanted)
    torch.library.opcheck(OPS.inference_plain.default, (q, k, v, causal), test_utils=CHECKS)


@pytest.mark.parametrize("kind", [plain, permuted, sbhd])
def test_the_operators_with_few_arguments(kind) -> None:
    few = [x.detach() if isinstance(x, torch.Tensor) else x for x in kind()[:MINIMAL]]
    o, lse, _ = OPS.forward(*few)
    got, got_lse = OPS.forward_minimal(*few)
    assert torch.equal(got, o)
    assert torch.equal(got_lse, lse)
    assert torch.equal(OPS.inference(*few), o)
    for name in ("forward_minimal", "inference"):
        torch.library.opcheck(getattr(OPS, name).default, tuple(few), test_utils=CHECKS)
    incoming = (torch.randn_like(o), o, lse)
    want = OPS.backward(incoming[0], None, o, lse, False, False, *few)
    for a, b in zip(OPS.backward_minimal(*incoming, *few), want[:3], strict=True):
        assert torch.equal(a, b)
    torch.library.opcheck(OPS.backward_minimal.default, (*incoming, *few), test_utils=CHECKS)
    out = tuple(torch.full_like(t, torch.nan) for t in few[:3])
    torch.library.opcheck(
        OPS.backward_minimal_out.default, (*out, *incoming, *few), test_utils=CHECKS
    )
    OPS.backward_minimal_out(*out, *incoming, *few)
    for a, b in zip(out, want[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(2, 4, 6, 8),
        torch.randn(6, 2, 4, 8).permute(1, 2, 0, 3),
        torch.randn(2, 6, 12, 8).split(4, dim=2)[1].transpose(1, 2),
        torch.randn(2, 4, 6, 16)[..., :8],
        torch.randn(1, 8, 6, 8)[:, ::2],
        torch.randn(2, 4, 0, 8),
        torch.randn(2, 1, 6, 8).expand(2, 4, 6, 8),
    ],
    ids=["contiguous", "permuted", "packed", "cut", "every second", "empty", "expanded"],
)
def test_gradients_lie_as_those_of_empty_like(t: torch.Tensor) -> None:
    o, lse = OPS.forward_minimal(t, t, t)
    for gradient in OPS.backward_minimal(o, o, lse, t, t, t):
        assert gradient.stride() == torch.empty_like(t).stride()


def test_gradcheck_in_double() -> None:
    inputs = [torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def function(q, k, v, bias):
        return tea.attention(q, k, v, bias=bias, mask="causal", softcap=3.0)

    assert torch.autograd.gradcheck(function, (*inputs, bias))


def test_the_gradient_that_arrives_at_lse() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = tea.attention(q, k, v, return_lse=True)
    want = torch.logsumexp(q @ k.mT / 8**0.5, -1)
    got = torch.autograd.grad(lse.double().square().sum(), (q, k))
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_gradient_that_is_expanded() -> None:
    q = rows(1, 2, 4, 8)
    tea.attention(q, q, q).sum().backward()
    expanded, q.grad = q.grad, None
    tea.attention(q, q, q).backward(torch.ones(1, 2, 4, 8))
    torch.testing.assert_close(expanded, q.grad)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8), (2, 2, 0, 8)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    q = rows(*shape)
    o = tea.attention(q, q, q)
    o.sum().backward()
    assert o.shape == q.grad.shape == shape


@pytest.mark.parametrize("shape", [(4,), (0, 4)])
def test_slopes_of_no_batch(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(0, 4, 5, 16, requires_grad=True) for _ in range(3))
    tea.attention(q, k, v, alibi=torch.ones(shape)).sum().backward()
    assert q.grad.shape == q.shape


def test_explain_says_what_every_engine_says() -> None:
    text = tea.explain(*plain()[:3], mask="causal", engine="reference")
    assert text.startswith("dtype=fp32 ")
    assert "\ncpu: accepts" in text
