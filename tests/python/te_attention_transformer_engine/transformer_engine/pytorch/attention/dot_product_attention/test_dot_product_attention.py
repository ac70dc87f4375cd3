"""DotProductAttention: what it settles, what it refuses, and what it keeps from call to call."""

import copy
import os
import pickle

import pytest
import torch

import te_attention.torch as tea
from dpa import BACKENDS, only
from transformer_engine.pytorch import CudaRNGStatesTracker, DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import (
    _attention_backends,
    dot_product_attention,
)
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context

BF16 = torch.bfloat16


def inputs(*shape: int, groups: int | None = None, dtype=BF16, device="cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [shape, *[(*shape[:-2], groups or shape[-2], shape[-1])] * 2]
    draw = [torch.randn(s, generator=generator) for s in shapes]
    return [t.to(device, dtype).requires_grad_() for t in draw]


def module(heads: int = 4, dim: int = 32, **options) -> DotProductAttention:
    return DotProductAttention(heads, dim, **{"qkv_format": "bshd"} | options)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_padding_says_what_lengths_say(backend: str) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    lengths = torch.tensor([5, 8])
    mask = (torch.arange(8) >= lengths[:, None]).view(2, 1, 1, 8)
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)
    with only(backend):
        dpa = module(attn_mask_type="padding")
        want = dpa(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert torch.equal(dpa(q, k, v, mask), want)
        assert torch.equal(module(attn_mask_type="padding", attention_type="cross")(
            q, k, v, (mask, mask)), want)  # fmt: skip
    assert want[0, 5:].abs().max() == 0


def test_an_arbitrary_mask_is_a_bias_of_minus_infinity() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    mask = torch.rand(2, 1, 8, 8) < 0.5
    mask[0, :, 3] = True  # a row without a visible key
    got = module(attn_mask_type="arbitrary")(q, k, v, mask)
    bias = torch.zeros(2, 1, 8, 8, dtype=BF16).masked_fill(mask, -torch.inf)
    close(got, tea.attention(q, k, v, format="bshd", bias=bias).flatten(-2))
    assert got[0, 3].abs().max() == 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(got.float().sum(), (q, k, v)))


def hidden(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attention_mask": hidden(2, 1, 1, 7)}, "[2, 1, 1, 7]; needs torch.bool [2, 1, 1, 8]"),
        ({"attention_mask": hidden(2, 1, 8, 8)}, "[2, 1, 8, 8]; needs torch.bool [2, 1, 1, 8]"),
        ({"attention_mask": hidden(2, 1, 1, 8, dtype=torch.int64)}, "int64 [2, 1, 1, 8]; needs"),
        (
            {"attention_mask": (hidden(2, 1, 1, 8), hidden(2, 1, 1, 9))},
            "[2, 1, 1, 9]; needs torch.bool [2, 1, 1, 8] for k",
        ),
        (
            {"attention_mask": (torch.arange(8) < 3).expand(2, 1, 1, 8)},
            "attention_mask is True before a False; needs padding after all tokens",
        ),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": hidden(2, 4, 8, 7)},
            "[2, 4, 8, 7]; needs torch.bool [2, 4, 8, 8], each of them or 1",
        ),
        (
            {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(2, 4, 8, 8)},
            "float32 [2, 4, 8, 8]; needs torch.bool [2, 4, 8, 8]",
        ),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(options: dict, text: str) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    with pytest.raises(ValueError, match="attention_mask is ") as caught:
        module()(q, k, v, **{"attn_mask_type": "padding"} | options)
    assert text in str(caught.value)


def test_unfused_reads_padding_anywhere() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    mask = (torch.arange(8) < 3).expand(2, 1, 1, 8)
    with only("UNFUSED"):
        padded = module(attn_mask_type="padding")(q, k, v, attention_mask=mask)
    close(padded[:, 3:], module(attn_mask_type="no_mask")(q[:, 3:], k[:, 3:], v[:, 3:]))


def test_integers_are_refused() -> None:
    q = torch.ones(2, 8, 4, 32, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"query_layer is torch\.int32; needs a floating-point"):
        module()(q, q, q)


@pytest.mark.parametrize("form", ["bshd", "thd"])
def test_max_logit(form: str) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    options = {"qkv_format": form, "attn_mask_type": "padding_causal", "return_max_logit": True}
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    if form == "thd":
        q, k, v = (t.flatten(0, 1)[:13] for t in (q, k, v))
    found = {}
    for backend in ("FUSED", "UNFUSED"):
        with only(backend):
            _, found[backend] = module(**options)(q, k, v, **given)
    assert found["FUSED"].shape == (4,)
    close(*found.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5, 4, 32), (2, 0, 4, 32)])
def test_nothing_to_attend(backend: str, shape: tuple[int, ...]) -> None:
    q, k, v = inputs(*shape)
    with only(backend):
        o = module()(q, k, v)
        o.sum().backward()
    assert o.shape == (*shape[:2], 128)
    assert all(t.grad.shape == shape for t in (q, k, v))


@pytest.mark.parametrize("backend", ["FUSED", "UNFUSED"])
def test_no_token_has_no_largest_logit(backend: str) -> None:
    q, k, v = inputs(0, 4, 32)
    cu = torch.zeros(3, dtype=torch.int32)
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "return_max_logit": True}
    with only(backend):
        o, largest = module(**options)(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    assert o.shape == (0, 128)
    assert torch.equal(largest, torch.full((4,), -torch.inf, dtype=q.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_of_zero_is_a_scale(backend: str) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    with only(backend):
        o = module(softmax_scale=0.0, attn_mask_type="no_mask")(q, k, v)
    close(o, v.mean(1, keepdim=True).flatten(-2).expand_as(o))


def dropped(backend: str, tracker: CudaRNGStatesTracker | None, **options) -> list[torch.Tensor]:
    q, k, v = inputs(2, 16, 4, 32)
    get = None if tracker is None else lambda: tracker
    torch.manual_seed(11)
    with only(backend):
        o = module(attention_dropout=0.4, get_rng_state_tracker=get)(q, k, v, **options)
        return [o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))]


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_all_backends_drop_the_same(
    forked: bool, recompute: bool, window: tuple[int, int] | None
) -> None:
    found = []
    for backend in BACKENDS:
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 5)
        tracker = tracker if forked else None
        options = {"checkpoint_core_attention": recompute, "window_size": window}
        found.append(dropped(backend, tracker, **options))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=6e-2, rtol=3e-2)
    undropped = module(window_size=window)(*inputs(2, 16, 4, 32))
    assert (found[0][0] - undropped).abs().max() > 0.5


def test_evaluation_drops_nothing_and_differentiates() -> None:
    q, k, v = inputs(2, 16, 4, 32)
    o = module(attention_dropout=0.4).eval()(q, k, v)
    assert torch.equal(o, module()(q, k, v))
    assert torch.autograd.grad(o.float().sum(), q)[0].abs().max() > 0


@pytest.mark.parametrize("backend", ["FUSED", "UNFUSED"])
@pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
def test_a_checkpoint_gives_the_same_gradients(backend: str, softmax: str) -> None:
    q, k, v = inputs(2, 16, 4, 32)
    dpa = module(softmax_type=softmax)
    every = [q, k, v] + ([dpa.softmax_offset] if softmax == "learnable" else [])
    with only(backend):
        plain, saved = dpa(q, k, v), dpa(q, k, v, checkpoint_core_attention=True)
        assert torch.equal(plain, saved)
        dout = torch.randn_like(plain)
        for a, b in zip(
            torch.autograd.grad(plain, every, dout),
            torch.autograd.grad(saved, every, dout),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_the_choice_is_kept_until_the_environment_changes_or_an_update_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    asked = []
    chosen = dot_product_attention.get_attention_backend
    monkeypatch.setattr(
        dot_product_attention,
        "get_attention_backend",
        lambda params: asked.append(params) or chosen(params),
    )
    dpa = module()
    with only(*BACKENDS):
        dpa(q, k, v)
        assert _attention_backends["use_fused_attention"]
        dpa(q, k, v)
        assert len(asked) == 1
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
        dpa(q, k, v)
        assert len(asked) == 2
        assert _attention_backends["use_flash_attention"]
        _attention_backends["backend_selection_requires_update"] = True
        dpa(q, k, v)
        assert len(asked) == 3
        assert _attention_backends["use_flash_attention"]
        assert not _attention_backends["backend_selection_requires_update"]


def test_calls_of_two_kinds_that_take_turns() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    dpa = module()
    masks = ("causal", "no_mask")
    want = [tea.attention(q, k, v, format="bshd", mask=m).flatten(-2) for m in ("causal", None)]
    for i in (0, 1, 1, 0):
        assert torch.equal(dpa(q, k, v, attn_mask_type=masks[i]), want[i])
        assert _attention_backends["attention_params"].attn_mask_type == masks[i]
    with pytest.raises(ValueError, match=r"key_layer is torch\.float32"):
        dpa(q, k.float(), v, attn_mask_type=masks[0])
    with pytest.raises(ValueError, match=r"value_layer is torch\.bfloat16 on meta"):
        dpa(q, k, v.to("meta"), attn_mask_type=masks[0])


def test_known_kinds_of_calls_are_still_seen() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    dpa = module()
    want = dpa(q, k, v)
    seen = []
    handle = dpa.fused_attention.register_forward_hook(lambda *_: seen.append("hook"))
    assert torch.equal(dpa(q, k, v), want)
    handle.remove()
    assert torch.equal(dpa(q, k, v), want)
    assert seen == ["hook"]
    context, _ = get_cpu_offload_context(enabled=True)
    with context:
        dpa(q, k, v)
    assert hasattr(q, "activation_offloading")
    with torch.autocast("cpu", BF16):
        assert dpa(*(t.float() for t in (q, k, v))).dtype == BF16


def test_known_kinds_of_calls_follow_the_module() -> None:
    q, k, v = inputs(2, 16, 4, 32)
    dpa = module(attention_dropout=0.4)
    for _ in range(2):
        dropped = dpa.train()(q, k, v)
        kept = dpa.eval()(q, k, v)
        assert torch.equal(kept, module()(q, k, v))
        assert (dropped - kept).abs().max() > 0.5
    other = module(softmax_scale=0.5)
    want = tea.attention(q, k, v, format="bshd", mask="causal", scale=0.5)
    assert torch.equal(other(q, k, v), want.flatten(-2))
    assert torch.equal(pickle.loads(pickle.dumps(other))(q, k, v), want.flatten(-2))
    assert torch.equal(copy.deepcopy(dpa)(q, k, v), kept)


def test_known_kinds_of_calls_take_the_tensors_of_each_call() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    dpa = module(softmax_type="learnable")
    dpa(q, k, v)
    for value in (0.5, -2.0):
        torch.nn.init.constant_(dpa.softmax_offset, value)
        sink = torch.full((4,), value, requires_grad=True)
        bias = torch.full((1, 4, 8, 8), value, dtype=BF16).triu_(2).requires_grad_()
        rows = {"format": "bshd", "mask": "causal", "sink": sink}
        got, want = dpa(q, k, v), tea.attention(q, k, v, **rows).flatten(-2)
        assert torch.equal(got, want)
        dout = torch.randn_like(got)
        (dsink,) = torch.autograd.grad(want, sink, dout)
        assert torch.equal(torch.autograd.grad(got, dpa.softmax_offset, dout)[0], dsink)
        given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
        got = dpa(q, k, v, attn_mask_type="no_mask", **given)
        rows |= {"mask": "bottom_right", "bias": bias}
        want = tea.attention(q, k, v, **rows).flatten(-2)
        assert torch.equal(got, want)
        for a, b in zip(
            *(torch.autograd.grad(o, (q, bias), dout) for o in (got, want)), strict=True
        ):
            assert torch.equal(a, b)
        slopes = torch.rand(4)
        given = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
        rows = {"format": "bshd", "mask": "causal", "alibi": slopes}
        assert torch.equal(module()(q, k, v, **given), tea.attention(q, k, v, **rows).flatten(-2))


def test_lengths_may_be_tensors() -> None:
    q, k, v = (t.flatten(0, 1) for t in inputs(2, 8, 4, 32))
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    dpa = module(**{"qkv_format": "thd", "attn_mask_type": "padding_causal"})
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    longest = cu.diff().max()
    o = dpa(q, k, v, max_seqlen_q=longest, max_seqlen_kv=longest, **given)
    assert torch.equal(o, dpa(q, k, v, max_seqlen_q=11, max_seqlen_kv=11, **given))
    assert type(_attention_backends["attention_params"].max_seqlen_q) is int


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "bs3hd", "bsh3d", "rows", "dims"])
def test_known_kinds_of_calls_of_any_strides(layout: str) -> None:
    module()(*inputs(2, 8, 4, 32))  # contiguous ones of the same shape
    for seed in range(3):
        torch.manual_seed(seed)
        whole = torch.randn(2, 8, 4, 3, 32, dtype=BF16, requires_grad=True)
        q, k, v = whole.unbind(3) if layout == "bsh3d" else whole.transpose(2, 3).unbind(2)
        if layout in ("bshd", "sbhd", "bhsd", "rows", "dims"):
            dims = {"sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "dims": (0, 1, 3, 2)}
            order = dims.get(layout, (0, 1, 2, 3))
            q, k, v = (t.permute(order).contiguous().permute(order) for t in (q, k, v))
        if layout == "rows":
            q, k, v = (torch.cat([t, t], 1)[:, 8:] for t in (q, k, v))
        got = module()(q, k, v)
        alone = [t.detach().clone(memory_format=torch.contiguous_format) for t in (q, k, v)]
        want = tea.attention(*(t.requires_grad_() for t in alone), format="bshd", mask="causal")
        assert torch.equal(got, want.flatten(-2))
        dout = torch.randn_like(got)
        found = torch.autograd.grad(got, (q, k, v), dout)
        memory = {t.untyped_storage().data_ptr() for t in found}
        assert len(memory) == (1 if layout in ("bs3hd", "bsh3d") else 3)
        for a, b in zip(found, torch.autograd.grad(want.flatten(-2), alone, dout), strict=True):
            assert torch.equal(a, b)


def test_ragged_calls_of_one_kind() -> None:
    q, k, v = (t.flatten(0, 1) for t in inputs(2, 8, 4, 32))
    dpa = module(**{"qkv_format": "thd", "attn_mask_type": "padding_causal"})
    for ends in ([0, 5, 16], [0, 8, 13], [0, 0, 9]):
        cu = torch.tensor(ends, dtype=torch.int32)
        given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 11, "max_seqlen_kv": 11}
        rows = [t[: ends[-1]] for t in (q, k, v)]
        want = tea.attention(*rows, format="thd", mask="causal", **given).flatten(-2)
        assert torch.equal(dpa(*rows, **given), want)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is torch\.int64"):
        dpa(q, k, v, **given | {"cu_seqlens_q": cu.long()})
    with pytest.raises(ValueError, match=r"cu_seqlens_kv is .*; needs the shape of cu_seqlens_q"):
        dpa(q, k, v, **given | {"cu_seqlens_kv": cu[:2]})
    with pytest.raises(ValueError, match=r"value_layer is .*; needs all but the last"):
        dpa(q, k, v[:5], **given)


def test_max_seqlens_of_ragged_sequences_are_found() -> None:
    q, k, v = (t.flatten(0, 1) for t in inputs(2, 8, 4, 32))
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    dpa = module(qkv_format="thd", attn_mask_type="padding_causal")
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    want = dpa(q, k, v, max_seqlen_q=11, max_seqlen_kv=11, **given)
    assert torch.equal(dpa(q, k, v, **given), want)
    assert _attention_backends["attention_params"].max_seqlen_q == 64


def test_strides_are_read() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    moved = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(module()(*moved), module()(q, k, v))


def test_state_of_older_and_of_fp8_checkpoints() -> None:
    dpa = torch.nn.ModuleDict({"core_attention": module(softmax_type="learnable")})
    state = dpa.state_dict()
    assert state["core_attention._extra_state"].numel() == 0
    assert set(state) == {"core_attention._extra_state", "core_attention.softmax_offset"}
    del state["core_attention._extra_state"]
    dpa.load_state_dict(state)
    old = torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": None})), dtype=torch.uint8)
    dpa.load_state_dict(state | {"core_attention.fused_attention._extra_state": old})
    assert torch.equal(dpa.state_dict()["core_attention._extra_state"], old)


def test_activations_wait_on_the_host() -> None:
    q, k, v = inputs(2, 16, 4, 32)
    context, sync = get_cpu_offload_context(enabled=True)
    with context:
        o = sync(module()(q, k, v))
    dout = torch.randn_like(o)
    want = torch.autograd.grad(module()(q, k, v), (q, k, v), dout)
    for a, b in zip(torch.autograd.grad(o, (q, k, v), dout), want, strict=True):
        assert torch.equal(a, b)


def test_a_program_that_is_compiled() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    dpa = module()
    compiled = torch.compile(lambda q, k, v: dpa(q * 2, k, v) + 1, backend="eager")
    assert torch.equal(compiled(q, k, v), dpa(q * 2, k, v) + 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attn_mask_type": "odd"}, "attn_mask_type is 'odd'; needs one of no_mask, padding"),
        ({"softmax_type": "odd"}, "softmax_type is 'odd'; needs vanilla"),
        ({"attention_type": "odd"}, "attention_type is 'odd'; needs self or cross"),
        ({"num_gqa_groups": 3}, "num_gqa_groups is 3; needs a divisor of the 4 heads"),
        ({"tp_size": 8}, "tp_size is 8; needs a divisor of the 4 key heads"),
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\) with mask causal; needs"),
    ],
)
def test_the_module_refuses(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        module(**options)


CU = torch.tensor([0, 5, 13], dtype=torch.int32)
THD = {"qkv_format": "thd", "attn_mask_type": "padding"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"qkv_format": "bhsd"}, "qkv_format is 'bhsd'; needs sbhd, bshd or thd"),
        ({"attn_mask_type": "padding"}, "cu_seqlens_q and attention_mask is None; needs one"),
        ({"attn_mask_type": "arbitrary"}, "attention_mask is None; needs a tensor"),
        (THD, "query_layer is of 4 dimensions; needs 3 for thd"),
        ({"core_attention_bias_type": "odd"}, "core_attention_bias_type is odd; needs"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias is None; needs"),
        ({"core_attention_bias": torch.zeros(1, 4, 8, 8)}, "core_attention_bias is .*; needs None"),
        ({"alibi_slopes": torch.zeros(4)}, "alibi_slopes is .*; needs None with bias type no_bias"),
        ({"num_splits": 2}, "FlashAttention 2: num_splits is 2; needs 1"),
        ({"bottom_right_diagonal": "x"}, "bottom_right_diagonal is 'x'; needs None, False or True"),
        (
            {
                "core_attention_bias": torch.zeros(3, 4, 8, 8),
                "core_attention_bias_type": "post_scale_bias",
            },
            r"core_attention_bias is torch.float32 \[3, 4, 8, 8\]; needs \[1 or 2, 1 or 4",
        ),
    ],
)
def test_a_call_is_refused(options: dict, text: str) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    with only(*BACKENDS), pytest.raises(ValueError, match=text):
        module()(q, k, v, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "cu_seqlens_q is None; needs int32"),
        ({"cu_seqlens_q": CU, "cu_seqlens_kv": CU[:2]}, "cu_seqlens_kv is torch.int32 .2.; needs"),
        ({"cu_seqlens_q": CU.long(), "cu_seqlens_kv": CU}, "cu_seqlens_q is torch.int64"),
        (
            {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "attn_mask_type": "causal"},
            "attn_mask_type is causal; needs a padding mask",
        ),
    ],
)
def test_a_ragged_call_is_refused(options: dict, text: str) -> None:
    q, k, v = inputs(13, 4, 32)
    with pytest.raises(ValueError, match=text):
        module(**THD)(q, k, v, **options)


def test_tensors_that_do_not_fit() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    with pytest.raises(
        ValueError, match=r"key_layer is torch\.float32 on cpu; needs torch\.bfloat16"
    ):
        module()(q, k.float(), v)
    with pytest.raises(ValueError, match=r"value_layer is .*; needs all but the last dimension"):
        module()(q, k, v[:, :5])
    with pytest.raises(ValueError, match=r"query_layer is .*; needs 8 heads of 32 as the module"):
        module(heads=8)(q, k, v)


def test_where_no_backend_is_left_every_one_says_why() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    with only(), pytest.raises(ValueError, match="UnfusedDotProductAttention: NVTE_UNFUSED_ATTN"):
        module()(q, k, v)


@pytest.mark.parametrize(
    ("group", "comm_type", "text"),
    [
        ("group", "p2p", "cp_group is of str; needs a process group with cp_comm_type p2p"),
        (["group"], "a2a+p2p", "needs a list of two process groups with cp_comm_type a2a"),
        ("group", "ring", "cp_comm_type is 'ring'; needs p2p, all_gather, a2a, a2a"),
    ],
)
def test_context_parallelism_needs_process_groups(
    monkeypatch: pytest.MonkeyPatch, group: object, comm_type: str, text: str
) -> None:
    q, k, v = inputs(2, 8, 4, 32)
    dpa = module()
    dpa.set_context_parallel_group(group, [0, 1], None, comm_type)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    with pytest.raises(ValueError, match=text):
        dpa(q, k, v)


def test_refusals_are_assertions_too() -> None:
    with pytest.raises(AssertionError):
        module(window_size=(-2, 0))


def test_the_environment_is_left_alone() -> None:
    q, k, v = inputs(2, 8, 4, 32)
    bias = torch.zeros(1, 1, 8, 8, dtype=BF16)
    before = dict(os.environ)
    module()(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert dict(os.environ) == before


def test_float64_goes_to_unfused() -> None:
    q, k, v = inputs(2, 5, 4, 32, dtype=torch.float64)
    o = module()(q, k, v)
    want = tea.attention(q, k, v, format="bshd", mask="causal").flatten(2)
    torch.testing.assert_close(o, want)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, want)), strict=True):
        torch.testing.assert_close(a, b)
