"""attention() inside PyTorch: compile, checkpoints, autocast, random state, FLOPs, DDP."""

import contextlib

import pytest
import torch
import torch.nn.attention.bias
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from te_attention import torch as tea


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def gradients(o: torch.Tensor, of: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(o.square().sum(), of)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_sdpa(causal: bool, scale: float | None) -> None:
    q, k, v = inputs(2, 4, 33, 16)
    got = tea.attention(q, k, v, mask="causal" if causal else None, scale=scale)
    want = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    torch.testing.assert_close(got, want)
    for a, b in zip(gradients(got, [q, k, v]), gradients(want, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b)


PLAIN = {
    "none": {},
    "mask": {"mask": "causal_bottom_right"},
    "the name of no mask": {"mask": "none"},
    "format": {"format": "bshd"},
    "scale": {"scale": 0.3},
    "all": {"format": "sbhd", "mask": "causal", "scale": 0.0},
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_the_short_way_is_the_long_one(
    name: str, differentiable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [t.requires_grad_(differentiable) for t in inputs(2, 4, 4, 16)]
    short = tea.attention(*tensors, **PLAIN[name])
    monkeypatch.delattr("te_attention.torch.functional.run_minimal")
    long = tea.attention(*tensors, **PLAIN[name], return_lse=True)[0]
    assert torch.equal(short, long)
    assert short.requires_grad == long.requires_grad == differentiable
    if differentiable:
        for a, b in zip(gradients(short, tensors), gradients(long, tensors), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "option",
    [
        *({"window": (3, None)}, {"bias": torch.ones(1, 1, 1, 1)}, {"alibi": True}),
        *({"softcap": 2.0}, {"sink": "off_by_one"}, {"dropout": 0.5}, {"deterministic": True}),
        *({"batch_invariant": True}, {"max_ctas": 3}),
        *({"engine": "reference"}, {"return_lse": True}, {"return_max_logit": True}),
        *({"origin": torch.zeros(4, dtype=torch.int64)}, {"bias_type": "post"}),
        {"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)},
        {"cu_seqlens_kv": torch.tensor([0, 8], dtype=torch.int32)},
        *({"max_seqlen_q": 3}, {"max_seqlen_kv": 3}, {"offsets_q": torch.zeros(2)}),
        *({"offsets_kv": torch.zeros(2)}, {"page_table": torch.zeros(1, 1)}),
        *({"page_table_v": torch.zeros(1, 1)}, {"fp8": tea.Fp8()}, {"generator": "any"}),
        {"rng_state": torch.tensor([1, 2])},
    ],
    ids=lambda option: next(iter(option)),
)
def test_no_option_goes_the_short_way(option: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        pytest.fail(f"{option} was lost")

    monkeypatch.setattr("te_attention.torch.functional.run_minimal", fail)
    tensors = [t.detach() for t in inputs(1, 2, 8, 16)]
    with contextlib.suppress(RuntimeError, ValueError):
        tea.attention(*tensors, **option)


def test_determinism_of_the_whole_program_goes_the_long_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("te_attention.torch.functional.run_minimal")
    torch.use_deterministic_algorithms(True)
    try:
        tea.attention(*inputs(1, 2, 8, 16))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_without_a_graph_break(dynamic: bool | None) -> None:
    def model(q, k, v, bias, sink):
        options = {"bias": bias, "sink": sink, "window": (5, None)}
        return tea.attention(q, k, v, mask="causal", **options, scale=q.shape[-1] ** -0.5) * 2

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (7, 12):
        q, k, v = inputs(2, 4, rows, 16)
        bias = torch.randn(1, 4, rows, rows, requires_grad=True)
        sink = torch.randn(4, requires_grad=True)
        every = [q, k, v, bias, sink]
        got, want = compiled(*every), model(*every)
        torch.testing.assert_close(got, want)
        for a, b in zip(gradients(got, every), gradients(want, every), strict=True):
            torch.testing.assert_close(a, b)


def test_compile_of_ragged_work() -> None:
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)

    def model(q, k, v, cu):
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 8, "max_seqlen_kv": 8}
        return tea.attention(q, k, v, format="thd", mask="causal", **lengths)

    q, k, v = inputs(9, 2, 16)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, cu)
    torch.testing.assert_close(got, model(q, k, v, cu))


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return tea.attention(q, k, v, mask="causal")

    q, k, v = (t.detach() for t in inputs(2, 4, 9, 16))
    program = torch.export.export(Model(), (q, k, v))
    assert "te_attention.attention" in str(program.graph)
    torch.testing.assert_close(program.module()(q, k, v), tea.attention(q, k, v, mask="causal"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_dropout_again(reentrant: bool) -> None:
    q, k, v = inputs(1, 2, 32, 16)

    def layer(q, k, v):
        return tea.attention(q, k, v, dropout=0.5)

    torch.manual_seed(3)
    want = layer(q, k, v)
    torch.manual_seed(3)
    got = checkpoint(layer, q, k, v, use_reentrant=reentrant)
    assert torch.equal(got, want)
    got.square().sum().backward()
    for leaf, expected in zip((q, k, v), gradients(want, [q, k, v]), strict=True):
        assert torch.equal(leaf.grad, expected)


def test_dropout_follows_the_generator_and_the_mask() -> None:
    q, k, v = (t.detach() for t in inputs(2, 3, 24, 16))
    first, second = (
        tea.attention(q, k, v, dropout=0.5, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert torch.equal(first, second)
    rng_state = tea.new_rng_state("cpu")
    keep = tea.dropout_mask(rng_state, 0.5, (2, 3, 24, 24))
    with pytest.raises(ValueError, match=r"shape is \(3, 24, 24\); needs batch, heads_q, rows"):
        tea.dropout_mask(rng_state, 0.5, (3, 24, 24))
    want = ((q @ k.mT / 4).softmax(-1) * keep * 2) @ v
    got = tea.attention(q, k, v, dropout=0.5, rng_state=rng_state)
    torch.testing.assert_close(got, want)


def test_autocast() -> None:
    q, k, v = inputs(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        o = tea.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    assert gradients(o, [q])[0].dtype == torch.float32


def test_paged_keys_are_the_ragged_ones() -> None:
    torch.manual_seed(0)
    lengths, page = [5, 9], 4
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    k, v = torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    q = torch.randn(2, 4, 16)
    one = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.tensor([[6, 1, 0], [3, 0, 5]], dtype=torch.int32)
    pools = [torch.full((7, page, 2, 16), float("nan")) for _ in range(2)]
    for pool, rows in zip(pools, (k, v), strict=True):
        for b, n in enumerate(lengths):
            for i in range(n):
                pool[table[b, i // page], i % page] = rows[cu[b] + i]
    ragged = {"format": "thd", "cu_seqlens_q": one, "cu_seqlens_kv": cu}
    options = {"mask": "causal_bottom_right", **ragged}
    got = tea.attention(q, *pools, page_table=table, **options)
    torch.testing.assert_close(got, tea.attention(q, k, v, **options))


def test_results_in_order() -> None:
    q, k, v = inputs(1, 2, 8, 16)
    o, lse, largest = tea.attention(q, k, v, return_lse=True, return_max_logit=True)
    scores = q @ k.mT / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(largest, scores.amax(-1))
    assert not largest.requires_grad
    assert torch.equal(o, tea.attention(q, k, v))


def test_flops_are_those_of_visible_pairs() -> None:
    q, k, v = inputs(2, 4, 9, 16)
    with FlopCounterMode(display=False) as counter:
        gradients(tea.attention(q, k, v, mask="causal", window=(3, None)), [q])
    pairs = 2 * 4 * sum(min(4, i + 1) for i in range(9))
    flops = 2 * pairs * (16 + 16) + 2 * pairs * (3 * 16 + 2 * 16)
    assert counter.get_total_flops() == flops
    views = torch.randn(2, 3, 4, 9, 16, requires_grad=True).unbind(1)  # gradients in one tensor
    for options, want in (({"window": (3, None)}, flops), ({}, flops // pairs * 2 * 4 * 45)):
        with FlopCounterMode(display=False) as counter:
            gradients(tea.attention(*views, mask="causal", **options), list(views))
        assert counter.get_total_flops() == want


@pytest.mark.parametrize("name", ["bias_type", "sink", "alibi"])
def test_words_that_mean_nothing_are_refused(name: str) -> None:
    q, k, v = inputs(1, 2, 8, 16)
    with pytest.raises(ValueError, match=f"{name} is 'odd'; needs"):
        tea.attention(q, k, v, **{name: "odd"})
    with pytest.raises(ValueError, match="each None or an integer, at"):
        tea.attention(q, k, v, window=(-2, None))


def test_two_sources_of_random_state_are_refused() -> None:
    q, k, v = inputs(1, 2, 8, 16)
    options = {"rng_state": torch.tensor([1, 2]), "generator": torch.Generator()}
    with pytest.raises(ValueError, match="generator is given with rng_state"):
        tea.attention(q, k, v, dropout=0.5, **options)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = inputs(1, 2, 8, 16)
    o = tea.attention(q, k, v, window=(3, None))
    with pytest.raises(RuntimeError, match="create_graph is True; needs False"):
        torch.autograd.grad(o.sum(), q, create_graph=True)
    # PyTorch differentiates the plain call, and refuses when the second derivative is asked for.
    (gradient,) = torch.autograd.grad(tea.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .*_backward is not implemented"):
        gradient.sum().backward()


def test_explain_leaves_the_random_numbers_alone() -> None:
    q, k, v = inputs(1, 2, 8, 16)
    generator = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), generator.get_state()
    tea.explain(q, k, v, dropout=0.5)
    tea.explain(q, k, v, dropout=0.5, generator=generator)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())


def test_ddp(tmp_path) -> None:
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(tea.Attention(sink_heads=2))
        q, k, v = inputs(1, 2, 8, 16)
        model(q, k, v).square().sum().backward()
        assert model.module.sink.grad.isfinite().all()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_autocast_casts_no_other_types(dtype: torch.dtype) -> None:
    q = torch.ones(1, 2, 8, 16).to(dtype)
    match = "q.dtype is .*; needs float16, bfloat16, float32 or float64"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=match):
        tea.attention(q, q, q)


def test_autocast_leaves_fp8_alone() -> None:
    q = torch.ones(1, 2, 8, 16).to(torch.float8_e4m3fn)
    with torch.autocast("cpu", torch.float16):
        assert tea.attention(q, q, q).dtype == q.dtype
        assert tea.attention(q, q, q, fp8=tea.Fp8()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["scale", "softcap", "alibi"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_learnable_number_is_refused(name: str, packed: bool) -> None:
    value = torch.ones(2) if name == "alibi" else torch.tensor(0.5)
    value.requires_grad_()
    q, k, v = inputs(1, 2, 8, 16)
    qkv = torch.randn(1, 8, 6, 16, requires_grad=True)

    def call() -> torch.Tensor:
        if packed:
            return tea.attention_packed(qkv, **{name: value})
        return tea.attention(q, k, v, **{name: value})

    with pytest.raises(ValueError, match=f"{name} requires a gradient; needs"):
        call()
    with torch.no_grad():  # there is none to be lost
        call()
    value = value.detach()
    assert call().requires_grad


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout"])
def test_a_number_on_a_device_is_refused(name: str) -> None:
    value = torch.zeros((), device="meta")
    with pytest.raises(ValueError, match=f"{name} is a tensor on meta; needs a number"):
        tea.attention(*inputs(1, 2, 8, 16), **{name: value})


@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
def test_a_causal_bias_is_refused_with_the_masks_name(name: str) -> None:
    bias = getattr(torch.nn.attention.bias, name)(8, 9)
    q, k, v = inputs(1, 2, 8, 16)
    word = "causal" if name == "causal_upper_left" else "causal_bottom_right"
    with pytest.raises(TypeError, match=f"bias is a CausalBias; needs numbers: use mask='{word}'"):
        tea.attention(q, k, v, bias=bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_sink_of_another_type_is_cast(dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 2, 8, 16)
    sink = torch.randn(2).to(dtype).requires_grad_()
    o, want = (tea.attention(q, k, v, sink=s) for s in (sink, sink.float()))
    assert torch.equal(o, want)
    (gradient,) = torch.autograd.grad(o.square().sum(), sink)
    assert gradient.dtype == dtype
    assert gradient.any()


CPU_ENGINES = ("", "cpu-generic", "cpu-avx2", "cpu-avx512", "cpu-avx512-bf16", "cpu-amx")


@pytest.mark.parametrize("engine", [*CPU_ENGINES, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("least", [-1e9, -1e12, -1e30, -3e38, torch.finfo(torch.float32).min])
def test_a_row_that_a_finite_bias_hides_is_the_mean_of_the_values(
    least: float, dtype: torch.dtype, engine: str
) -> None:
    """As padding that other code wrote with the least number of its type."""
    q, k, v = inputs(1, 2, 70, 16, dtype=dtype)
    bias = torch.zeros(1, 1, 70, 70)
    bias[..., 9:], bias[..., :3, :] = least, least
    bias = bias.to(dtype) if dtype == torch.float64 else bias
    try:
        o = tea.attention(q, k, v + 9, bias=bias, engine=engine)
    except RuntimeError as error:
        pytest.skip(str(error))
    x = (q.float() @ k.float().mT / 4 + bias).double()
    wrong = (o - x.softmax(-1) @ (v.double() + 9)).abs().amax(-1)
    assert wrong[..., 3:].amax() < 0.1
    # The scores are below the precision of their sum with the bias.
    assert wrong[..., :3].amax() < (0.1 if least < -1e12 else 2)
    o[..., 3:, :].sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("form", ["bhsd", "bshd"])
@pytest.mark.parametrize("dims", [(20, 20), (16, 12), (9, 24), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"window": (3, None), "scale": 0.3}])
def test_head_dims_that_are_no_multiples_of_8(form: str, dims: tuple, options: dict) -> None:
    torch.manual_seed(0)
    dim, dim_v = dims
    tensors = [torch.randn(2, 4, 9, d, requires_grad=True) for d in (dim, dim, dim_v)]
    masks = torch.ones(9, 9, dtype=torch.bool)
    if options.get("mask"):
        masks = masks.tril()
    if options.get("window"):
        masks = masks.triu(-3)
    want = scaled_dot_product_attention(*tensors, attn_mask=masks, scale=options.get("scale"))
    turned = tensors if form == "bhsd" else [t.transpose(1, 2) for t in tensors]
    got = tea.attention(*turned, format=form, **options)
    assert (got.transpose(1, 2) if form == "bhsd" else got).is_contiguous()
    got = got if form == "bhsd" else got.transpose(1, 2)
    torch.testing.assert_close(got, want)
    for a, b in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_head_dims_that_are_no_multiples_of_8() -> None:
    tensors = inputs(2, 4, 9, 20)
    compiled = torch.compile(
        lambda *t: tea.attention(*t, mask="causal"), fullgraph=True, backend="aot_eager"
    )
    want = tea.attention(*tensors, mask="causal")
    torch.testing.assert_close(compiled(*tensors), want)
    for a, b in zip(gradients(compiled(*tensors), tensors), gradients(want, tensors), strict=True):
        torch.testing.assert_close(a, b)


def test_lengths_and_pages_of_int64() -> None:
    q = torch.randn(12, 4, 16)
    cu = torch.tensor([0, 5, 12])
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "format": "thd"}
    short = {n: v.int() if n != "format" else v for n, v in lengths.items()}
    assert torch.equal(tea.attention(q, q, q, **lengths), tea.attention(q, q, q, **short))
    gaps = {"offsets_q": torch.tensor([0, 5, 12]), "offsets_kv": torch.tensor([0, 5, 12])}
    assert torch.equal(tea.attention(q, q, q, **lengths, **gaps), tea.attention(q, q, q, **short))
    pool, table = torch.randn(4, 4, 4, 16), torch.tensor([[0, 1], [2, 3]])
    wide = tea.attention(q, pool, pool, **lengths, page_table=table)
    assert torch.equal(wide, tea.attention(q, pool, pool, **short, page_table=table.int()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_slopes_of_other_types_are_cast(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 9, 16)
    slopes = torch.rand(4).to(dtype)
    got = tea.attention(q, q, q, alibi=slopes)
    assert torch.equal(got, tea.attention(q, q, q, alibi=slopes.float()))


def test_autocast_casts_a_bias_of_the_other_half() -> None:
    q = torch.randn(2, 4, 8, 16)
    bias = torch.randn(8, 8).half().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        o = tea.attention(q, q, q, bias=bias)
    assert o.dtype == torch.bfloat16
    want = tea.attention(*[q.bfloat16()] * 3, bias=bias.bfloat16())
    assert torch.equal(o, want)
    (gradient,) = torch.autograd.grad(o.float().square().sum(), bias)
    assert gradient.dtype == torch.float16 and gradient.any()


def test_small_calls_are_differentiated_by_pytorch_and_large_ones_on_a_gpu_here() -> None:
    q, k, v = inputs(2, 4, 9, 16)
    assert "FusedAttentionOverrideable" in tea.attention(q, k, v).grad_fn.name()
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True).permute(2, 0, 3, 1, 4).unbind(0)
    assert "Minimal" in tea.attention(*qkv).grad_fn.name()  # one gradient for parts of one tensor


def test_the_operator_for_other_backends_has_neither_bias_nor_dropout() -> None:
    q, k, v = (t.detach() for t in inputs(2, 4, 9, 16))
    fused = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
    with pytest.raises(RuntimeError, match="attn_bias is a tensor; needs None"):
        fused(q, k, v, torch.zeros(2, 4, 9, 9))
    with pytest.raises(RuntimeError, match=r"dropout_p is 0\.\d+; needs 0"):
        fused(q, k, v, None, 0.5)
    with pytest.raises(RuntimeError, match="return_debug_mask is True; needs False"):
        fused(q, k, v, None, 0.0, False, True)
