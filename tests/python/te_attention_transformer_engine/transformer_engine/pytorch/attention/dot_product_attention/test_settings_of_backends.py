"""Attributes, patches and hooks on the backends of a DotProductAttention counts in every call."""

import pytest
import torch
from torch.nn.modules import module as modules

import te_attention.torch as tea
from dpa import only
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.attention.dot_product_attention.backends import (
    FlashAttention,
    FusedAttention,
)

DIRECT = ("FLASH", "FUSED")


def backend_of(dpa: DotProductAttention, name: str) -> torch.nn.Module:
    return getattr(dpa, f"{name.lower()}_attention")


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 8, 4, 32).bfloat16().requires_grad_() for _ in range(3)]


def expected(q, k, v, **options) -> torch.Tensor:
    return tea.attention(q, k, v, format="bshd", mask="causal", **options).flatten(-2)


@pytest.mark.parametrize(
    ("name", "learnable"), [("FLASH", False), ("FUSED", False), ("FUSED", True)]
)
def test_the_scale_of_a_backend_counts(name: str, learnable: bool) -> None:
    given = tensors()
    with only(name):
        dpa = DotProductAttention(
            4, 32, qkv_format="bshd", softmax_type="learnable" if learnable else "vanilla"
        )
        sink = {"sink": dpa.softmax_offset} if learnable else {}
        assert torch.equal(dpa(*given), expected(*given, **sink))
        for scale in (0.5, 2.0):
            backend_of(dpa, name).softmax_scale = scale
            assert torch.equal(dpa(*given), expected(*given, scale=scale, **sink))


@pytest.mark.parametrize("name", DIRECT)
def test_the_dropout_of_a_backend_counts(name: str) -> None:
    given = tensors()
    kept = expected(*given)
    with only(name):
        dpa = DotProductAttention(4, 32, qkv_format="bshd", attention_dropout=0.4)
        backend = backend_of(dpa, name)
        assert not torch.equal(dpa(*given), kept)
        backend.eval()
        assert torch.equal(dpa(*given), kept)
        backend.train()
        assert not torch.equal(dpa(*given), kept)
        backend.attention_dropout = 0.0
        assert torch.equal(dpa(*given), kept)


def test_the_context_of_a_backends_dropout_counts() -> None:
    entered = []

    class Context:
        def __enter__(self) -> None:
            entered.append(self)

        def __exit__(self, *_: object) -> None:
            pass

    with only("FUSED"):
        dpa = DotProductAttention(4, 32, qkv_format="bshd", attention_dropout=0.4)
        dpa(*tensors())
        dpa.fused_attention.attention_dropout_ctx = Context
        dpa(*tensors())
    assert len(entered) == 1


def test_a_scale_of_ones_own_subclass_is_its_own() -> None:
    class Mine(DotProductAttention):
        def __init__(self) -> None:
            super().__init__(4, 32, qkv_format="bshd")
            self.softmax_scale = 100.0

    given = tensors()
    assert torch.equal(Mine()(*given), expected(*given))


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize("at", ["instance", "class", "module"])
def test_a_patched_backend_is_called(name: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = {"FLASH": FlashAttention, "FUSED": FusedAttention}[name]
    seen = []

    class Other(torch.nn.Module):
        def forward(self, *_: object, **__: object) -> str:
            seen.append(at)
            return "other"

    given = tensors()
    with only(name):
        dpa = DotProductAttention(4, 32, qkv_format="bshd")
        want = dpa(*given)
        if at == "module":
            setattr(dpa, f"{name.lower()}_attention", Other())
        else:
            where = cls if at == "class" else backend_of(dpa, name)
            monkeypatch.setattr(where, "forward", lambda *_, **__: seen.append(at) or "other")
        assert dpa(*given) == "other"
        fresh = DotProductAttention(4, 32, qkv_format="bshd")
        assert at == "class" or torch.equal(fresh(*given), want)
    assert seen == [at]


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.parametrize(
    "register",
    [
        modules.register_module_forward_hook,
        modules.register_module_forward_pre_hook,
        modules.register_module_full_backward_hook,
        modules.register_module_full_backward_pre_hook,
    ],
)
def test_hooks_of_all_modules_see_the_backend(name: str, register) -> None:
    given = tensors()
    with only(name):
        dpa = DotProductAttention(4, 32, qkv_format="bshd")
        dpa(*given)
        seen = []
        handle = register(lambda module, *_: seen.append(module))
        try:
            dpa(*given).sum().backward()
        finally:
            handle.remove()
        assert backend_of(dpa, name) in seen
        assert _attention_backends[f"use_{name.lower()}_attention"]
