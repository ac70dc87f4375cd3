"""The cache of choices: which calls share an entry, and that no call uses the entry of another."""

from collections import OrderedDict

import pytest
import torch

import te_attention.torch as tea
from te_attention.torch.fp8 import Float8CurrentScaling
from transformer_engine.pytorch import DotProductAttention, InferenceParams, autocast
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

BF16 = torch.bfloat16


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(BF16)


@pytest.fixture
def dispatches(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The cache, empty at first."""
    found: dict = {}
    monkeypatch.setattr(dot_product_attention, "_dispatches", found)
    monkeypatch.setattr(dot_product_attention, "_latest", ((), None))
    return found


@pytest.mark.parametrize("page_size", [None, 256])
def test_a_longer_prompt_after_a_short_one_without_max_seqlen_q(page_size: int | None) -> None:
    dpa = DotProductAttention(2, 32, qkv_format="thd", attn_mask_type="padding_causal").eval()
    dpa.layer_number = 1
    for length in (5, 300, 70):
        pages = {} if page_size is None else {"is_paged": True, "page_size": page_size}
        options = {"max_ctx_len": 300, "qkv_format": "thd", "device": "cpu"}
        cache = InferenceParams(2, 512, 2, 32, BF16, **pages, **options)
        cache.allocate_memory(1)
        cache.pre_step(OrderedDict({0: length, 1: 3}))
        q, k, v = (drawn(length + 3, 2, 32) for _ in range(3))
        with torch.no_grad():
            got = dpa(q, k, v, inference_params=cache)
        lengths = torch.tensor([0, length, length + 3], dtype=torch.int32)
        given = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
        given |= {"max_seqlen_q": length, "max_seqlen_kv": length}
        want = tea.attention(q, k, v, format="thd", mask="causal", **given)
        torch.testing.assert_close(got, want.flatten(-2), atol=2e-2, rtol=2e-2)


class Unread:
    """A bound on the device, whose read would synchronise."""

    def __index__(self) -> int:
        raise AssertionError("read")


@pytest.mark.parametrize("form", ["bshd", "sbhd"])
def test_bounds_that_shapes_determine_are_not_read(form: str) -> None:
    q, k, v = (drawn(2, 8, 2, 32) for _ in range(3))
    dpa = DotProductAttention(2, 32, qkv_format=form)
    bounds = {"max_seqlen_q": Unread(), "max_seqlen_kv": Unread()}
    assert torch.equal(dpa(q, k, v, **bounds), dpa(q, k, v))


def test_a_bound_that_a_cache_determines_is_not_read() -> None:
    dpa = DotProductAttention(2, 32, attn_mask_type="padding_causal", layer_number=1).eval()
    for form, shape in (("thd", (5, 2, 32)), ("bshd", (1, 5, 2, 32))):
        cache = InferenceParams(1, 64, 2, 32, BF16, max_ctx_len=5, qkv_format=form, device="cpu")
        cache.allocate_memory(1)
        cache.pre_step(OrderedDict({0: 5}))
        most_q = 5 if form == "thd" else Unread()
        bounds = {"max_seqlen_q": most_q, "max_seqlen_kv": Unread(), "qkv_format": form}
        with torch.no_grad():
            dpa(*(drawn(*shape) for _ in range(3)), inference_params=cache, **bounds)


def test_dense_calls_with_other_bounds_share_an_entry(dispatches: dict) -> None:
    q, k, v = (drawn(2, 8, 2, 32) for _ in range(3))
    dpa = DotProductAttention(2, 32, qkv_format="bshd")
    for bound in (8, 16, 32):
        dpa(q, k, v, max_seqlen_q=bound, max_seqlen_kv=bound)
    assert len(dispatches) == 1


def test_strided_calls_from_other_places_share_an_entry(dispatches: dict) -> None:
    dpa = DotProductAttention(2, 32, qkv_format="bshd")
    memory = drawn(2, 64, 2, 32)
    for start in range(10):  # in one memory, and in three
        parts = (memory[:, at : at + 4] for at in (start, 3 * start + 6, 40 - start))
        dpa(*parts)
        dpa(*(drawn(2, 64, 2, 32)[:, at : at + 4] for at in (start, 3 * start, 40 - start)))
    assert len(dispatches) == 1


def test_a_change_of_the_environment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without backend_selection_requires_update, which another choice may have reset."""
    backends = dot_product_attention._attention_backends
    q, k, v = (drawn(2, 8, 2, 32) for _ in range(3))
    dpa = DotProductAttention(2, 32, qkv_format="bshd")
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    dpa(q, k, v)
    assert backends["use_fused_attention"]
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    backends["backend_selection_requires_update"] = False
    dpa(q, k, v)
    assert backends["use_fused_attention"] is False
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    dpa(q, k, v)
    assert backends["use_unfused_attention"]
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(ValueError, match="the backend is none"):
        dpa(q, k, v)
    monkeypatch.delenv("NVTE_FUSED_ATTN")
    dpa(q, k, v)
    assert backends["use_fused_attention"]
    assert backends["use_unfused_attention"] is False


def test_the_choice_of_fp8_emulation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (drawn(1, 8, 2, 32) for _ in range(3))
    dpa = DotProductAttention(2, 32, qkv_format="bshd")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    with autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        dpa(q, k, v)
        monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "0")
        with pytest.raises(ValueError, match="attention in FP8; needs NVTE_UnfusedDPA_Emulate"):
            dpa(q, k, v)


def test_the_short_sequence_backend_is_chosen_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = dot_product_attention._attention_backends
    q, k, v = (drawn(1, 64, 2, 64) for _ in range(3))
    dpa = DotProductAttention(2, 64, qkv_format="bshd")
    for value, name in (("0", "NVTE_F16_max512_seqlen"), ("1", "NVTE_F16_arbitrary_seqlen")):
        monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", value)
        dpa(q, k, v)
        assert backends["fused_attention_backend"].name == name


def test_packed_calls_have_their_own_entries(dispatches: dict) -> None:
    dpa = DotProductAttention(2, 32, qkv_format="bshd")
    layouts = []
    for dim in (2, 3):
        dpa(*drawn(2, 8, *((3, 2, 32) if dim == 2 else (2, 3, 32))).unbind(dim))
        layouts.append(dot_product_attention._attention_backends["attention_params"].qkv_layout)
    dpa(*(drawn(2, 8, 3, 2, 32)[:, :, 0] for _ in range(3)))
    layouts.append(dot_product_attention._attention_backends["attention_params"].qkv_layout)
    assert layouts == ["bs3hd", "bsh3d", "bshd_bshd_bshd"]
    assert len(dispatches) == 3
