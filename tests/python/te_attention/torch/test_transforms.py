"""attention() under the transforms of torch.func, and what it refuses in forward mode."""

import pytest
import torch
from torch.autograd import forward_ad

from te_attention import torch as tea

OPTIONS = {
    "plain": {},
    "mask and scale": {"mask": "causal", "scale": 0.3},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": torch.randn(1, 2, 5, 5, dtype=torch.float64)},
}


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3)]


def eager(function, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


@pytest.mark.parametrize("name", OPTIONS)
def test_grad_and_vjp_are_the_eager_gradient(name: str) -> None:
    def loss(q, k, v):
        return tea.attention(q, k, v, **OPTIONS[name]).square().sum()

    want = eager(loss, inputs())
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    value, pull = torch.func.vjp(loss, *inputs())
    for a, b in zip(pull(torch.ones_like(value)), want, strict=True):
        torch.testing.assert_close(a, b)


def test_grad_of_bias_sink_and_lse() -> None:
    bias, sink = torch.randn(1, 2, 1, 5, dtype=torch.float64), torch.randn(2)

    def loss(q, k, v, bias, sink):
        o, lse = tea.attention(q, k, v, bias=bias, sink=sink, return_lse=True)
        return o.square().sum() + lse.sin().sum()

    every = [*inputs(), bias, sink]
    got = torch.func.grad(loss, argnums=tuple(range(5)))(*every)
    for a, b in zip(got, eager(loss, every), strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_of_grad_is_one_gradient_after_the_other() -> None:
    def loss(q, k, v):
        return tea.attention(q, k, v, mask="causal", window=(2, None)).square().sum()

    q, k, v = (torch.stack([t, 2 * t, -t]) for t in inputs())
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    one = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None, None))(q, k[1], v[2])
    for i in range(3):
        for a, b in zip(got, eager(loss, [q[i], k[i], v[i]]), strict=True):
            torch.testing.assert_close(a[i], b)
        torch.testing.assert_close(one[i], eager(loss, [q[i], k[1], v[2]])[0])


def test_jacrev_is_the_jacobian() -> None:
    q, k, v = inputs()
    got = torch.func.jacrev(lambda k: tea.attention(q, k, v))(k)
    want = torch.autograd.functional.jacobian(lambda k: tea.attention(q, k, v), k)
    torch.testing.assert_close(got, want)


def test_second_derivatives_are_refused_by_functorch_too() -> None:
    q, k, v = inputs()

    def loss(q):
        return tea.attention(q, k, v).square().sum()

    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)


FORWARD = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("options", [{}, {"window": (2, None)}], ids=["short", "long"])
def test_forward_mode_is_refused(name: str, options: dict) -> None:
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="an input has a tangent; needs none"):
        FORWARD[name](lambda k: tea.attention(q, k, v, **options), k)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": (2, None)}], ids=["short", "long"])
def test_dual_tensors_are_refused_and_others_are_not(differentiable: bool, options: dict) -> None:
    q, k, v = (t.requires_grad_(differentiable) for t in inputs())
    want = tea.attention(q, k, v, **options)
    with forward_ad.dual_level():
        assert torch.equal(tea.attention(q, k, v, **options), want)
        dual = forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(RuntimeError, match="an input has a tangent; needs none"):
            tea.attention(q, dual, v, **options)


def test_packed_under_grad_and_vmap() -> None:
    qkv = torch.randn(3, 1, 5, 6, 8, dtype=torch.float64)

    def loss(qkv):
        return tea.attention_packed(qkv).square().sum()

    got = torch.func.vmap(torch.func.grad(loss))(qkv)
    for i in range(3):
        torch.testing.assert_close(torch.func.grad(loss)(qkv[i]), got[i])
        torch.testing.assert_close(got[i], eager(loss, [qkv[i]])[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", OPTIONS)
def test_vmap_neither_warns_nor_refuses_an_empty_dimension(name: str) -> None:
    def call(q, k, v):
        return tea.attention(q, k, v, return_lse=True, **OPTIONS[name])

    q, k, v = (torch.stack([t, -t], 1) for t in inputs())
    for count in (2, 0):
        mapped = [t[:, :count] for t in (q, k)]
        o, lse = torch.func.vmap(call, in_dims=(1, 1, None))(*mapped, v[:, 0])
        assert o.shape == (count, 1, 2, 5, 8)
        assert lse.shape == (count, 1, 2, 5)
        gradient = torch.func.vmap(torch.func.grad(lambda *t: call(*t)[0].sum()), (1, 1, None))
        dq = gradient(*mapped, v[:, 0])
        for i in range(count):
            torch.testing.assert_close(o[i], call(q[:, i], k[:, i], v[:, 0])[0])
            torch.testing.assert_close(
                dq[i], eager(lambda *t: call(*t)[0].sum(), [q[:, i], k[:, i], v[:, 0]])[0]
            )
        assert dq.shape == o.shape


@pytest.mark.filterwarnings("error")
def test_vmap_inside_compiled_code() -> None:
    q, k, v = (torch.stack([t, -t]) for t in inputs())
    compiled = torch.compile(torch.func.vmap(tea.attention), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), torch.func.vmap(tea.attention)(q, k, v))


TRANSFORMS = FORWARD | {
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_fp8_is_refused_under_transforms_by_name(name: str) -> None:
    q, k, v = (t.float() for t in inputs())
    wrong = r"fp8 is given in a transform of torch\.func; needs None"
    with pytest.raises(RuntimeError, match=wrong):
        TRANSFORMS[name](lambda k: tea.attention(q, k, v, fp8="current"), k)
