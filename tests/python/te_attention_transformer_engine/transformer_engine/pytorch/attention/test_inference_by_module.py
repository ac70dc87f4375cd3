"""DotProductAttention on a KV cache: every step of a serving loop against full attention."""

import gc
import weakref

import pytest
import test_inference as serving
import torch

from dpa import BACKENDS, only
from te_attention import torch as tea
from transformer_engine.pytorch import DotProductAttention, InferenceParams
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

DIM = serving.DIM  # of K and V alike, as flash-attn needs


@pytest.fixture(autouse=True)
def _one_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "DIM_V", DIM)


def module(form: str, device: str) -> DotProductAttention:
    options = {"qkv_format": form, "attn_mask_type": "padding_causal", "layer_number": 1}
    heads = (serving.HEADS, DIM, serving.HEADS_KV)
    return DotProductAttention(*heads, **options).eval().to(device)


def length_of(form: str, step: dict[int, int]) -> int:
    return serving.CONTEXT if form == "thd" else max(step.values())


def takes(backend: str, page_size: int | None) -> bool:
    """Flash takes large pages only, as flash-attn does."""
    return backend != "FLASH" or page_size in (None, 256)


@pytest.mark.parametrize("device", serving.DEVICES)
@pytest.mark.parametrize("form", serving.FORMATS)
@pytest.mark.parametrize("page_size", serving.PAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_step_is_full_attention(backend: str, page_size, form: str, device: str) -> None:
    dtype = torch.bfloat16
    served = serving.requests(dtype, device)
    ours = serving.params(page_size, form, dtype, device)
    dpa = module(form, device)
    if not takes(backend, page_size):
        with only(backend), pytest.raises(ValueError, match="page_size is below 256; needs 256"):
            one_step(dpa, served, ours, next(serving.schedule(served)), form)
        return
    tokens = 0
    with only(backend), torch.no_grad():
        for step in serving.schedule(served):
            o = one_step(dpa, served, ours, step, form)
            tokens += serving.check(o, served, ours, step, form)
        assert _attention_backends[f"use_{backend.lower()}_attention"]
    assert tokens == sum(len(r.q) for r in served)


def one_step(dpa, served: list, ours: InferenceParams, step: dict, form: str) -> torch.Tensor:
    ours.pre_step(step)
    batch, length = (serving.BATCH if form == "thd" else len(step)), length_of(form, step)
    inputs = serving.buffers(form, batch, length, served[0])
    serving.gather(inputs, served, ours, step, form)
    lengths = {"max_seqlen_q": length, "max_seqlen_kv": serving.LONGEST}
    o = dpa(*inputs, inference_params=ours, **lengths)
    return o.unflatten(-1, (serving.HEADS, DIM))


@pytest.mark.gpu
@pytest.mark.parametrize("form", serving.FORMATS)
@pytest.mark.parametrize("page_size", serving.PAGES)
def test_each_replay_is_full_attention(page_size, form: str) -> None:
    served = serving.requests(torch.bfloat16, "cuda")
    ours = serving.params(page_size, form, torch.bfloat16, "cuda")
    inputs = serving.buffers(form, serving.BATCH, serving.CONTEXT, served[0])
    dpa = module(form, "cuda")
    lengths = {"max_seqlen_q": serving.CONTEXT, "max_seqlen_kv": serving.LONGEST}
    first = next(serving.schedule(served))
    ours.pre_step(first)
    serving.gather(inputs, served, ours, first, form)
    with only("FUSED"), torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                dpa(*inputs, inference_params=ours, **lengths)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = dpa(*inputs, inference_params=ours, **lengths)
    ours.reset()
    for step in serving.schedule(served):
        ours.pre_step(step)
        serving.gather(inputs, served, ours, step, form)
        graph.replay()
        serving.check(o.unflatten(-1, (serving.HEADS, DIM)), served, ours, step, form)


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page_size", serving.PAGES)
@pytest.mark.parametrize("form", serving.FORMATS)
def test_a_cache_of_fp8_holds_the_cast_tokens(form: str, page_size, fp8: torch.dtype) -> None:
    """Tokens that FP8 holds exactly give the same with a cache of either type."""
    served = serving.requests(torch.bfloat16, "cpu")
    for request in served:
        for tensor in (request.k, request.v):
            tensor.copy_(tensor.to(fp8))
        qkv = (t[None] for t in (request.q, request.k, request.v))
        request.full.copy_(tea.attention(*qkv, format="bshd", mask="causal")[0])
    ours = serving.params(page_size, form, fp8, "cpu")
    dpa = module(form, "cpu")
    tokens = 0
    with torch.no_grad():
        for step in serving.schedule(served):
            o = one_step(dpa, served, ours, step, form)
            tokens += serving.check(o, served, ours, step, form)
    assert tokens == sum(len(r.q) for r in served)
    k_cache, v_cache = ours.cache_manager.cache[1]
    assert k_cache.dtype == v_cache.dtype == fp8


def test_no_choice_keeps_a_cache_alive() -> None:
    served = serving.requests(torch.bfloat16, "cpu", 1)
    ours = serving.params(16, "bshd", torch.bfloat16, "cpu")
    one_step(module("bshd", "cpu"), served, ours, next(serving.schedule(served)), "bshd")
    kind = _attention_backends["attention_params"].inference_params
    assert (kind.is_paged, kind.page_size) == (True, 16)
    alive = weakref.ref(ours)
    del ours
    gc.collect()
    assert alive() is None


def test_a_cache_needs_a_padding_mask() -> None:
    served = serving.requests(torch.bfloat16, "cpu", 1)
    ours = serving.params(None, "bshd", torch.bfloat16, "cpu")
    dpa = module("bshd", "cpu")
    dpa.attn_mask_type = "causal"
    with pytest.raises(ValueError, match="attn_mask_type is causal; needs a padding mask"):
        one_step(dpa, served, ours, next(serving.schedule(served)), "bshd")


def small(**options) -> InferenceParams:
    sizes = {"num_heads_kv": 2, "head_dim_k": 16, "dtype": torch.float32, "device": "cpu"}
    return InferenceParams(2, 16, **sizes | options)


def call(ours: InferenceParams, batch: int, **options) -> torch.Tensor:
    q, k, v = (torch.randn(batch, 3, 2, 16, **options) for _ in range(3))
    words = {"qkv_format": "bshd", "attn_mask_type": "padding_causal", "layer_number": 1}
    return DotProductAttention(2, 16, **words).eval()(q, k, v, inference_params=ours)


def test_what_a_step_refuses() -> None:
    ours = small()
    ours.pre_step({0: 3, 1: 2})
    with pytest.raises(ValueError, match=r"layer_number is 1; needs .* allocate_memory\(1\)"):
        call(ours, 2)
    ours.allocate_memory(1)
    with pytest.raises(ValueError, match="new_k has a batch of 1; needs 2"):
        call(ours, 1)
    assert call(ours, 2).shape == (2, 3, 32)


def test_a_gradient_through_the_cache_is_refused() -> None:
    ours = small()
    ours.allocate_memory(1)
    ours.pre_step({0: 3, 1: 2})
    o = call(ours, 2, requires_grad=True)  # a program that forgot torch.no_grad() may go on
    with pytest.raises(RuntimeError, match="inference_params is given, and a gradient is asked"):
        o.sum().backward()
