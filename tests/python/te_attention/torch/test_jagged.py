"""Nested tensors of layout torch.jagged: each sequence as if it were alone."""

import pytest
import torch

from te_attention import torch as tea

LENGTHS = (3, 0, 17, 5)


def nested(form: str, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, heads, 16, generator=generator) for n in LENGTHS]
    out = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    return out if form == "bshd" else out.transpose(1, 2)


@pytest.mark.parametrize("form", ["bhsd", "bshd"])
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"window": (2, 0), "softcap": 5.0}])
def test_sequences_of_their_own(form: str, options: dict) -> None:
    q = nested(form, 4, 0)
    k, v = (
        torch.nested.nested_tensor_from_jagged(
            torch.randn(sum(LENGTHS), 2, 16, requires_grad=True), q.offsets()
        )
        for _ in range(2)
    )
    if form == "bhsd":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    got = tea.attention(q, k, v, format=form, **options)
    assert got.is_nested and got.shape == q.shape
    want = [
        tea.attention(*(t[None] for t in row), format=form, **options)[0]
        for row in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    ]
    for a, b in zip(got.unbind(), want, strict=True):
        torch.testing.assert_close(a, b)
    inputs = [q, k, v]
    some = torch.autograd.grad(got.values().square().sum(), inputs)
    others = torch.autograd.grad(sum(o.square().sum() for o in want), inputs)
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a.values(), b.values())


def test_other_offsets_of_v_are_refused() -> None:
    q, k = nested("bhsd", 4, 0), nested("bhsd", 4, 1)
    rows = [torch.randn(n, 4, 16) for n in (4, 1, 15, 5)]
    v = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="v has other offsets than k"):
        tea.attention(q, k, v)


@pytest.mark.parametrize("form", ["bhsd", "bshd"])
def test_compile_without_a_graph_break(form: str) -> None:
    compiled = torch.compile(tea.attention, fullgraph=True, backend="aot_eager")
    for options in ({}, {"mask": "causal", "window": (2, None)}, {"softcap": 3.0}):
        q = nested(form, 4, 0)
        got, want = (f(q, q, q, format=form, **options) for f in (compiled, tea.attention))
        assert torch.equal(got.values(), want.values())
        some, others = (torch.autograd.grad(o.values().square().sum(), q)[0] for o in (got, want))
        assert torch.equal(some.values(), others.values())
