"""attention() in FP8: with scales that it finds itself, and with scales that are given."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8_reference
from te_attention import torch as tea
from te_attention.torch import _fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def inputs(
    b: int, s: int, h: int, d: int, kv: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """q, k and v [b, s, h, d] that require gradients, and dO."""
    torch.manual_seed(1)
    shapes = [(b, s, n, d) for n in (h, kv or h, kv or h, h)]
    return [torch.randn(n, dtype=dtype).requires_grad_(i < 3) for i, n in enumerate(shapes)]


def gradients(o: Tensor, dout: Tensor, *of: Tensor) -> dict[str, Tensor]:
    names = ("dq", "dk", "dv", "dsmall")[: len(of)]
    return {"o": o.detach()} | dict(zip(names, torch.autograd.grad(o, of, dout), strict=True))


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, scale_inv, _ = torch.ops.te_attention.fp8_quantize_current(x, "float8_e4m3fn")
    return codes, scale, scale_inv


# ---- fp8="current" -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("s", "causal"), [(1024, True), (2048, False)])
def test_current_scaling_is_within_the_bars(s: int, causal: bool, dtype: torch.dtype) -> None:
    q, k, v, dout = inputs(1, s, 1, 64, dtype=dtype)
    o = tea.attention(q, k, v, format="bshd", mask="causal" if causal else None, fp8="current")
    found = gradients(o, dout, q, k, v)
    assert {t.dtype for t in found.values()} == {dtype}
    fp8_reference.check(found, fp8_reference.reference(q, k, v, dout, causal=causal))


def test_each_tensor_has_its_own_scale() -> None:
    q, k, v, dout = inputs(1, 256, 2, 32)
    few = [
        (x * y).detach().requires_grad_()
        for x, y in zip((q, k, v), (256, 1 / 256, 2.0**-20), strict=True)
    ]
    dout = dout * 2.0**12
    found = gradients(tea.attention(*few, format="bshd", fp8="current"), dout, *few)
    fp8_reference.check(found, fp8_reference.reference(*few, dout))


def test_grouped_heads_padding_bias_sink_and_lse() -> None:
    q, k, v, dout = inputs(2, 160, 4, 32, kv=2)
    bias = torch.randn(1, 4, 160, 160).requires_grad_()
    lens = torch.tensor([0, 160, 250], dtype=torch.int32)
    words = {"format": "bshd", "mask": "causal", "bias": bias, "cu_seqlens_q": lens}
    words |= {"cu_seqlens_kv": lens, "return_lse": True}
    o, lse = tea.attention(q, k, v, fp8="current", **words)
    found = gradients(o, dout, q, k, v, bias)
    dbias = found.pop("dsmall")
    wanted = fp8_reference.reference(q, k, v, dout, causal=True, lens=[160, 90], bias=bias)
    fp8_reference.check(found, wanted)
    exact, exact_lse = tea.attention(q.float(), k.float(), v.float(), **words)
    (exact_dbias,) = torch.autograd.grad(exact, bias, dout.float())
    assert (dbias - exact_dbias).norm() <= 0.11 * exact_dbias.norm()
    assert (lse - exact_lse)[:, :, :90].abs().max() < 0.2


def test_the_gradient_of_lse_and_of_a_sink() -> None:
    q, k, v, dout = inputs(1, 128, 2, 32)
    sink = torch.randn(2).requires_grad_()
    dlse = torch.randn(1, 2, 128) * 8

    def run(fp8: str | None, *qkv: Tensor) -> tuple[Tensor, ...]:
        o, lse = tea.attention(*qkv, format="bshd", sink=sink, return_lse=True, fp8=fp8)
        return torch.autograd.grad((o, lse), (*qkv, sink), (dout.to(o.dtype), dlse))

    exact = run(None, *(t.detach().float().requires_grad_() for t in (q, k, v)))
    for found, wanted in zip(run("current", q, k, v), exact, strict=True):
        assert (found.float() - wanted).norm() <= 0.11 * wanted.norm()


@pytest.mark.parametrize("dropout", [0.25, 0.9])
def test_dropout_does_not_saturate(dropout: float) -> None:
    q, k, v, dout = inputs(1, 96, 2, 32)
    rng = torch.tensor([3, 0])
    words = {"format": "bshd", "dropout": dropout, "rng_state": rng}
    o, amax = tea.attention(q, k, v, fp8="current", return_amax=True, **words)
    found = gradients(o, dout, q, k, v)
    plain = [t.detach().float().requires_grad_() for t in (q, k, v)]
    exact = gradients(tea.attention(*plain, **words), dout.float(), *plain)
    fp8_reference.check(found, {name: t.double() for name, t in exact.items()})
    assert amax[0] <= 1.0001 / (1 - dropout)


def test_parts_of_one_tensor_have_gradients_in_one() -> None:
    torch.manual_seed(2)
    qkv = torch.randn(2, 64, 3, 2, 32, dtype=torch.bfloat16).requires_grad_()
    o = tea.attention(*qkv.unbind(2), format="bshd", fp8="current")
    dout = torch.randn_like(o)
    (found,) = torch.autograd.grad(o, qkv, dout)
    wanted = fp8_reference.reference(*qkv.unbind(2), dout)
    parts = zip(("dq", "dk", "dv"), found.unbind(2), strict=True)
    fp8_reference.check({"o": o.detach()} | dict(parts), wanted)


def test_ragged_and_jagged() -> None:
    q, k, v, dout = inputs(1, 200, 2, 32)
    flat = [t[0].detach().requires_grad_() for t in (q, k, v)]
    lens = torch.tensor([0, 120, 200], dtype=torch.int32)
    words = {"cu_seqlens_q": lens, "cu_seqlens_kv": lens, "fp8": "current"}
    o = tea.attention(*flat, format="thd", **words)
    found = gradients(o, dout[0], *flat)
    for a, b in ((0, 120), (120, 200)):
        parts = [t[:, a:b] for t in (q, k, v, dout)]
        wanted = fp8_reference.reference(*parts)
        fp8_reference.check({name: t[None, a:b] for name, t in found.items()}, wanted)
    nested = [torch.nested.nested_tensor_from_jagged(t, lens) for t in flat]
    nested_o = tea.attention(*nested, format="bshd", fp8="current")
    torch.testing.assert_close(nested_o.values(), o)
    with pytest.raises(ValueError, match="return_amax is True; needs False with nested tensors"):
        tea.attention(*nested, format="bshd", fp8="current", return_amax=True)


def test_a_checkpoint_and_a_compiler_give_the_same() -> None:
    q, k, v, dout = inputs(1, 64, 2, 32)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tea.attention(q, k, v, format="bshd", mask="causal", fp8="current")

    wanted = gradients(run(q, k, v), dout, q, k, v)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for o in (checkpoint(run, q, k, v, use_reentrant=False), compiled(q, k, v)):
        torch.testing.assert_close(gradients(o, dout, q, k, v), wanted)


def test_an_inner_autocast_and_odd_head_dims() -> None:
    q, k, v, dout = inputs(1, 64, 2, 20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o = tea.attention(q, k, v, format="bshd", fp8="current")
    assert o.dtype == torch.bfloat16
    found = gradients(o, dout.bfloat16(), q, k, v)
    fp8_reference.check(found, fp8_reference.reference(q, k, v, dout))


def test_a_module_and_inference() -> None:
    q, k, v, _ = (t.detach() for t in inputs(1, 64, 2, 32))
    module = tea.Attention(format="bshd", mask="causal", fp8="current")
    o = module(q, k, v)
    fp8_reference.check({"o": o}, fp8_reference.reference(q, k, v, causal=True))
    with pytest.raises(TypeError, match="fp8 is given at construction"):
        tea.Attention(fp8=tea.Fp8())


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_extreme_inputs(value: float) -> None:
    """Zeros give zeros. An infinite or undefined V has no finite O, and stops nothing."""
    q, k, v, dout = inputs(1, 16, 2, 16)
    with torch.no_grad():
        v.fill_(value) if value == 0 else v[0, 0].fill_(value)
    o = tea.attention(q, k, v, format="bshd", fp8="current")
    found = gradients(o, dout, q, k, v)
    if value == 0:
        assert not o.any()
        assert not found["dq"].any()
        assert found["dv"].any()


def test_empty_tensors() -> None:
    q, k, v, dout = inputs(0, 8, 2, 16)
    o = tea.attention(q, k, v, format="bshd", fp8="current")
    assert [t.shape for t in gradients(o, dout, q, k, v).values()] == [q.shape] * 4


# ---- The scale of dP ---------------------------------------------------------------------------


def _bound(q: Tensor, v: Tensor, dout: Tensor, dropout: float = 0.0) -> float:
    norms = _fp8.largest_norm(v), _fp8.largest_norm(dout.to(E5M2), torch.ones(1))
    scale, scale_inv = _fp8.scales_of_dp(*norms, None, dropout, q.shape[-1] ** -0.5, "float8_e5m2")
    assert scale * scale_inv == pytest.approx(1)
    return float(57344 * scale_inv)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_bound_of_dp_holds_and_is_near(dropout: float) -> None:
    """Two keys of equal score, and a dO along V of one of them, have the largest dP: half of it."""
    d = 16
    q, k = torch.zeros(1, 1, 1, d), torch.zeros(1, 2, 1, d)
    v = torch.zeros(1, 2, 1, d)
    v[0, 0, 0, 0], v[0, 1, 0, 0] = 3.0, -3.0
    dout = torch.zeros(1, 1, 1, d)
    dout[..., 0] = 5.0
    bound = _bound(q, v, dout, dropout)
    assert bound == pytest.approx(15 / d**0.5 / (1 - dropout), rel=0.01)
    for t in (q, k, v):
        t.requires_grad_()
    o, amax = tea.attention(q, k, v, format="bshd", fp8="current", return_amax=True)
    o.backward(dout)
    assert amax[2] == pytest.approx(15 / d**0.5 / 2, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_of_dp_holds_for_random_inputs(seed: int) -> None:
    torch.manual_seed(seed)
    spread = 10 ** torch.randn(3)
    q, k, v = (torch.randn(1, 24, 2, 16) * s for s in spread)
    dout = torch.randn(1, 24, 2, 16)
    bound = _bound(q, v, dout)
    for t in (q, k, v):
        t.requires_grad_()
    o, amax = tea.attention(q, k, v, format="bshd", fp8="current", return_amax=True)
    o.backward(dout)
    assert 0 < amax[2] <= bound


# ---- fp8=Fp8(...) ------------------------------------------------------------------------------


@pytest.mark.parametrize("o_dtype", [torch.bfloat16, torch.float32, E4M3])
def test_given_scales(o_dtype: torch.dtype) -> None:
    exact = [t.detach() for t in inputs(2, 33, 4, 16)[:3]]
    (q, k, v), _, inverse = zip(*map(quantized, exact), strict=True)
    one, s_scale = torch.ones(1), torch.full((1,), 256.0)
    o_scale = one * 64 if o_dtype == E4M3 else None
    scales = tea.Fp8(*inverse, s_scale, 1 / s_scale, o_scale, o_dtype)
    words = {"format": "bshd", "mask": "causal", "return_lse": True}
    got, lse = tea.attention(q, k, v, fp8=scales, **words)
    known = [t.float() * i for t, i in zip((q, k, v), inverse, strict=True)]
    want, want_lse = tea.attention(*known, **words)
    assert got.dtype == o_dtype
    got = got.float() / (1 if o_scale is None else o_scale)
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.1)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)


def _leaves(*tensors: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    codes, _, inverse = zip(*map(quantized, tensors), strict=True)
    codes = [t.detach().requires_grad_() for t in codes]
    for t in codes:
        t.grad_dtype = None
    return codes, inverse


def test_gradients_with_given_scales() -> None:
    q, k, v, dout = inputs(1, 256, 2, 64)
    codes, inverse = _leaves(q, k, v)
    s = torch.full((1,), 448.0)
    scales = tea.Fp8(*inverse, s, 1 / s)
    o, amax = tea.attention(*codes, format="bshd", fp8=scales, return_amax=True)
    assert amax[0] == 1
    assert amax[1] == pytest.approx(float(o.detach().abs().max()), rel=0.01)
    assert not amax[2:].any()
    found = gradients(o, dout, *codes)
    fp8_reference.check(found, fp8_reference.reference(q, k, v, dout))
    largest = torch.stack([found[n].abs().max() for n in ("dq", "dk", "dv")]).float()
    torch.testing.assert_close(amax[3:], largest, rtol=0.01, atol=0)


def test_all_scales_of_backward_are_used() -> None:
    """Delayed scaling as a caller does it: every tensor in FP8, O and the gradients too."""
    q, k, v, dout = inputs(1, 256, 2, 64)
    codes, inverse = _leaves(q, k, v)
    values = (448.0, 64.0, 2048.0, 2.0**16, 4096.0)
    s, of_o, of_dout, of_dp, of_g = (torch.full((1,), x) for x in values)
    options = {"dp_scale": of_dp, "dp_scale_inv": 1 / of_dp, "dq_scale": of_g}
    options |= {"dk_scale": of_g * 2, "dv_scale": of_g / 2, "dqkv_dtype": E5M2}
    scales = tea.Fp8(*inverse, s, 1 / s, dout_scale=of_dout, **options)
    o = tea.attention(*codes, format="bshd", fp8=scales)
    found = gradients(o, dout, *codes)
    assert {found[n].dtype for n in ("dq", "dk", "dv")} == {E5M2}
    for name, scale in (("dq", of_g), ("dk", of_g * 2), ("dv", of_g / 2)):
        found[name] = found[name].float() / scale
    wanted = fp8_reference.reference(q, k, v, dout)
    fp8_reference.check(found, wanted, slack=1.4)  # the results are rounded to E5M2 too
    scales = scales._replace(o_dtype=E4M3, o_scale=of_o, o_scale_inv=1 / of_o)
    of_dp = torch.full((1,), 1024.0)  # dP has the type of dO, which is E4M3 now
    scales = scales._replace(dout_scale_inv=torch.full((1,), 1 / 64))
    scales = scales._replace(dp_scale=of_dp, dp_scale_inv=1 / of_dp)
    o = tea.attention(*codes, format="bshd", fp8=scales)
    again = gradients(o, (dout * 64).to(E4M3), *codes)
    assert again["o"].dtype == E4M3
    again = {"o": again["o"].float() / of_o} | {
        name: again[name].float() / scale
        for name, scale in (("dq", of_g), ("dk", of_g * 2), ("dv", of_g / 2))
    }
    fp8_reference.check(again, wanted, slack=1.4)


def test_a_scale_that_changes_between_the_passes_is_noticed() -> None:
    codes, inverse = _leaves(*inputs(1, 16, 2, 16)[:3])
    o = tea.attention(*codes, format="bshd", fp8=tea.Fp8(*inverse))
    inverse[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(torch.ones_like(o))


def test_explain_describes_the_fp8_problem() -> None:
    q, k, v, _ = inputs(1, 16, 2, 16)
    text = tea.explain(q, k, v, format="bshd", fp8="current")
    assert text.startswith("dtype=e4m3 ")
    for field in ("o_dtype=bf16", "dout_dtype=e5m2", "dqkv_dtype=bf16", "cpu: accepts"):
        assert field in text
    codes = [quantized(t.detach())[0] for t in (q, k, v)]
    text = tea.explain(*codes, format="bshd", fp8=tea.Fp8(o_dtype=torch.float16))
    assert "o_dtype=fp16" in text
    assert "dout_dtype" not in text  # nothing requires a gradient


def test_what_is_refused() -> None:
    q, k, v, dout = inputs(1, 16, 2, 16)
    codes = [quantized(t.detach())[0].requires_grad_() for t in (q, k, v)]
    match = r"fp8.dqkv_dtype is bfloat16 and autograd casts the gradient of q to float8_e4m3fn"
    with pytest.raises(ValueError, match=match):
        tea.attention(*codes, fp8=tea.Fp8())
    with pytest.raises(ValueError, match=r"q.dtype is float64; needs float16, bfloat16 or float32"):
        tea.attention(q.double(), k.double(), v.double(), fp8="current")
    with pytest.raises(ValueError, match=r"k.dtype is float32; needs that of q, bfloat16"):
        tea.attention(q, k.float(), v, fp8="current")
    with pytest.raises(ValueError, match="return_amax is True without fp8; needs False"):
        tea.attention(q, k, v, return_amax=True)
    with pytest.raises(ValueError, match="fp8 is given; needs attention"):
        tea.PreparedAttention(q, k, v, {}, fp8="current")
    o = tea.attention(q, k, v, fp8="current")
    with pytest.raises(RuntimeError, match="attention has no second derivative"):
        torch.autograd.grad(o, q, dout, create_graph=True)
