"""Packed projections: the same numbers as apart, and one gradient without a copy."""

import pytest
import torch

from te_attention import torch as tea

CU = torch.tensor([0, 5, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("shape", "heads_kv", "options"),
    [
        ((2, 9, 12, 16), None, {"mask": "causal"}),
        ((2, 9, 8, 16), 2, {"mask": "causal", "window": (3, None)}),
        ((9, 2, 12, 16), None, {"format": "sbhd"}),
        ((9, 12, 16), None, {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}),
    ],
)
def test_heads_side_by_side(shape: tuple, heads_kv: int | None, options: dict) -> None:
    qkv = torch.randn(shape, requires_grad=True)
    o, lse = tea.attention_packed(qkv, heads_kv=heads_kv, return_lse=True, **options)
    kv = heads_kv or shape[-2] // 3
    parts = qkv.split((shape[-2] - 2 * kv, kv, kv), dim=-2)
    want, want_lse = tea.attention(*parts, return_lse=True, **{"format": "bshd", **options})
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)
    dout = torch.randn_like(o)
    (got,) = torch.autograd.grad([o, lse], qkv, [dout, lse.detach()])
    (expected,) = torch.autograd.grad([want, want_lse], qkv, [dout, lse.detach()])
    torch.testing.assert_close(got, expected)


def test_interleaved() -> None:
    qkv = torch.randn(2, 9, 4, 48, requires_grad=True)
    o = tea.attention_packed(qkv, interleaved=True)
    want = tea.attention(*qkv.unflatten(-1, (3, 16)).unbind(-2), format="bshd")
    assert torch.equal(o, want)
    got, expected = (torch.autograd.grad(t.square().sum(), qkv)[0] for t in (o, want))
    torch.testing.assert_close(got, expected)


def test_what_has_no_gradient_here_is_refused() -> None:
    qkv = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match="sink requires a gradient"):
        tea.attention_packed(qkv, sink=torch.zeros(2, requires_grad=True))
    with pytest.raises(ValueError, match="qkv has 5 heads; needs a multiple of 3"):
        tea.attention_packed(qkv[:, :, :5])


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((1, 4, 6, 24), {"interleaved": True, "heads_kv": 2}, "heads_kv is 2; needs None"),
        ((1, 4, 6, 25), {"interleaved": True}, "qkv has 25 elements a head; needs a multiple of 3"),
        ((1, 4, 6, 8), {"heads_kv": 3}, "heads_kv is 3; needs from 1 to 2"),
        ((1, 4, 6, 8), {"heads_kv": 0}, "heads_kv is 0; needs from 1 to 2"),
        ((1, 4, 6, 8), {"heads_kv": 1.5}, "heads_kv is 1.5; needs from 1 to 2"),
        ((1, 6, 4, 8), {"format": "bhsd"}, "format is 'bhsd'; needs bshd, sbhd or thd"),
        ((1, 4, 6, 8), {"format": "bshd_sbhd"}, "format is 'bshd_sbhd'; needs bshd"),
        ((4, 6, 8), {}, r"qkv is of shape \[4, 6, 8\]; needs 4 dimensions for bshd"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(shape: tuple, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tea.attention_packed(torch.randn(shape), **options)


@pytest.mark.parametrize("interleaved", [False, True])
def test_autocast(interleaved: bool) -> None:
    qkv = torch.randn((2, 9, 4, 48) if interleaved else (2, 9, 12, 16), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        o = tea.attention_packed(qkv, interleaved=interleaved)
    want = tea.attention_packed(qkv.bfloat16(), interleaved=interleaved)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, want)
    (gradient,) = torch.autograd.grad(o.float().square().sum(), qkv)
    assert gradient.dtype == torch.float32


def test_dropout_without_a_gradient_and_the_largest_logit() -> None:
    qkv = torch.randn(2, 9, 12, 16)
    rng_state = torch.tensor([1, 2])
    options = {"dropout": 0.5, "rng_state": rng_state, "return_max_logit": True}
    got = tea.attention_packed(qkv, **options)
    want = tea.attention(*qkv.split(4, dim=-2), format="bshd", **options)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_compile_without_a_graph_break() -> None:
    qkv = torch.randn(2, 9, 12, 16, requires_grad=True)
    compiled = torch.compile(tea.attention_packed, fullgraph=True, backend="aot_eager")
    got, want = compiled(qkv, mask="causal"), tea.attention_packed(qkv, mask="causal")
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(o.square().sum(), qkv)[0] for o in (got, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_batch_of_gradients(interleaved: bool) -> None:
    qkv = torch.randn((2, 9, 4, 48) if interleaved else (2, 9, 12, 16), requires_grad=True)
    o = tea.attention_packed(qkv, interleaved=interleaved)
    dout = torch.randn(3, *o.shape)
    keep = {"retain_graph": True}
    (got,) = torch.autograd.grad(o, qkv, dout, is_grads_batched=True, **keep)
    for i in range(3):
        torch.testing.assert_close(got[i], torch.autograd.grad(o, qkv, dout[i], **keep)[0])


def test_a_list_as_qkv_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"qkv is .*; needs a tensor"):
        tea.attention_packed([1.0])
