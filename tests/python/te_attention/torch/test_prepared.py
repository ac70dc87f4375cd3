"""PreparedAttention computes what attention() computes, with the tensors of each call."""

import pytest
import torch
from torch.autograd import forward_ad

from te_attention import torch as tea


def inputs(rows: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(1, 2, rows, 8, generator=generator) for _ in range(3)]


def test_options_stay_and_tensors_are_those_of_the_call() -> None:
    options = {"mask": "causal", "softcap": 3.0}
    prepared = tea.PreparedAttention(*inputs(), {"bias": torch.zeros(1, 2, 5, 5)}, **options)
    for rows in (5, 7):
        q, k, v = (t.requires_grad_() for t in inputs(rows))
        bias = torch.randn(1, 2, rows, rows, requires_grad=True)
        o, want = prepared(q, k, v, bias), tea.attention(q, k, v, bias=bias, **options)
        assert torch.equal(o, want)
        given = (q, k, v, bias)
        gradients = (torch.autograd.grad(x.square().sum(), given) for x in (o, want))
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def test_wrong_options_are_refused_once() -> None:
    with pytest.raises(ValueError, match="window is"):
        tea.PreparedAttention(*inputs(), {}, window=(-5, 0))


def test_prepared_calls_refuse_and_cast_as_attention_does() -> None:
    q, k, v = inputs()
    prepared = tea.PreparedAttention(q, k, v, {"sink": torch.zeros(2)})
    sink = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    o = prepared(q, k, v, sink)
    assert torch.equal(o, tea.attention(q, k, v, sink=sink.float()))
    assert torch.autograd.grad(o.square().sum(), sink)[0].any()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="an input has a tangent"):
        prepared(forward_ad.make_dual(q, q), k, v, sink)
    prepared = tea.PreparedAttention(q, k, v, {"alibi": torch.ones(2)})
    with pytest.raises(ValueError, match="alibi requires a gradient"):
        prepared(q, k, v, torch.ones(2, requires_grad=True))


def test_compiled_calls_follow_the_options_of_each() -> None:
    q, k, v = inputs()
    compiled = torch.compile(
        lambda prepared, *qkv: prepared(*qkv), fullgraph=True, backend="aot_eager"
    )
    for options in ({}, {"mask": "causal", "window": (1, None)}, {"softcap": 1.0}):
        prepared = tea.PreparedAttention(q, k, v, {}, **options)
        for leaf in (q, q.clone().requires_grad_()):
            o = compiled(prepared, leaf, k, v)
            assert torch.equal(o, tea.attention(leaf, k, v, **options))


def test_determinism_that_the_program_asks_for_later() -> None:
    q, k, v = inputs()
    prepared = tea.PreparedAttention(q, k, v, {}, softcap=1.0)
    seen = []
    unprepared = tea.PreparedAttention._unprepared
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tea.PreparedAttention,
            "_unprepared",
            lambda *arguments: seen.append(1) or unprepared(*arguments),
        )
        prepared(q, k, v)
        assert not seen
        torch.use_deterministic_algorithms(True)
        try:
            prepared(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
        assert seen
