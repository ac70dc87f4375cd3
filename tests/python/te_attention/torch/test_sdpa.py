"""Plain users of scaled_dot_product_attention: the same results through ours."""

import pytest
import torch
from torch.nn import attention, functional
from torch.nn.attention import bias as biases

from te_attention import torch as tea
from te_attention.torch import sdpa

CASES = {
    "plain": ({}, (2, 4, 9, 16), (2, 4, 7, 16)),
    "causal": ({"is_causal": True}, (2, 4, 9, 16), (2, 4, 9, 16)),
    "scale": ({"scale": 0.5}, (2, 4, 9, 16), (2, 4, 7, 16)),
    "gqa": ({"enable_gqa": True}, (2, 4, 9, 16), (2, 2, 7, 16)),
    "boolean": ({"attn_mask": torch.ones(9, 7).tril().bool()}, (2, 4, 9, 16), (2, 4, 7, 16)),
    "float": ({"attn_mask": torch.randn(4, 9, 7)}, (2, 4, 9, 16), (2, 4, 7, 16)),
    "odd dim": ({}, (2, 4, 9, 13), (2, 4, 7, 13)),
    "three dims": ({}, (4, 9, 16), (4, 7, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_enabled_gives_the_same(name: str) -> None:
    options, shape_q, shape_kv = CASES[name]
    q = torch.randn(shape_q, requires_grad=True)
    k, v = (torch.randn(shape_kv, requires_grad=True) for _ in range(2))
    want = functional.scaled_dot_product_attention(q, k, v, **options)
    with sdpa.enabled():
        got = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, want)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize(("rows", "cols"), [(5, 9), (9, 5), (7, 7)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_biases_are_words(name: str, rows: int, cols: int) -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (rows, cols, cols))
    mask = getattr(biases, name)(rows, cols)
    want = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with sdpa.enabled():
        got = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        with pytest.raises(ValueError, match="is a CausalBias; needs None with is_causal=True"):
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(got, want, equal_nan=True)


def test_a_mask_of_an_unknown_subclass_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(torch.Tensor):
        pass

    q, mask = torch.randn(1, 2, 8, 16), torch.randn(8, 8).as_subclass(Odd)
    monkeypatch.setattr(sdpa, "_original", lambda *_, **__: "PyTorch's")
    assert sdpa.scaled_dot_product_attention(q, q, q, mask) == "PyTorch's"
    assert sdpa.scaled_dot_product_attention(q, q, q, dropout_p=1.0) == "PyTorch's"


def test_everything_dropped_is_zero() -> None:
    q = torch.randn(1, 2, 8, 16)
    with sdpa.enabled():
        o = functional.scaled_dot_product_attention(q, q, q, dropout_p=1.0)
    assert not o.any()


def test_nested_tensors_are_pytorchs() -> None:
    parts = [torch.randn(n, 2, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    want = functional.scaled_dot_product_attention(nested, nested, nested)
    with sdpa.enabled():
        got = functional.scaled_dot_product_attention(nested, nested, nested)
    for a, b in zip(got.unbind(), want.unbind(), strict=True):
        torch.testing.assert_close(a, b)


LAID = {
    "bhsd": lambda: torch.randn(2, 4, 9, 16),
    "bshd": lambda: torch.randn(2, 9, 4, 16).transpose(1, 2),
    "sbhd": lambda: torch.randn(9, 2, 4, 16).permute(1, 2, 0, 3),
    "packed": lambda: torch.randn(2, 9, 12, 16).split(4, dim=2)[0].transpose(1, 2),
}


@pytest.mark.parametrize("name", LAID)
def test_o_lies_as_pytorchs(name: str) -> None:
    q = LAID[name]().requires_grad_()
    want = functional.scaled_dot_product_attention(q, q, q)
    with sdpa.enabled():
        got = functional.scaled_dot_product_attention(q, q, q)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(o.square().sum(), q)[0] for o in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_enabled_ends_with_its_block() -> None:
    before = functional.scaled_dot_product_attention
    with sdpa.enabled():
        assert functional.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    assert functional.scaled_dot_product_attention is before


def test_it_is_registered_and_not_active_by_itself() -> None:
    assert sdpa.NAME in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_kernels_behind_the_backend(device: str, dropout: float) -> None:
    options = {"device": device, "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(2, 4, 32, 64, **options) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.manual_seed(3)
    want = tea.attention(*leaves, mask="causal", dropout=dropout)
    torch.manual_seed(3)
    with torch.no_grad():
        o, lse, _, _, *lengths, rng_state, offset, _ = sdpa._flash_forward(q, k, v, dropout, True)
        got = sdpa._flash_backward(
            *(dout, q, k, v, o, lse, None, None, *lengths, dropout, True, rng_state, offset),
            scale=None,
        )
    assert torch.equal(o, want)
    for a, b in zip(got, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_flash_backend_is_ours_while_active(causal: bool) -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(2, 4, 64, 64, **options) for _ in range(3))

    def both() -> tuple[torch.Tensor, ...]:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))

    want = both()
    attention.activate_flash_attention_impl(sdpa.NAME)
    try:
        with torch.profiler.profile() as profile:
            got = both()
    finally:
        attention.restore_flash_attention_impl()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
    names = {event.key for event in profile.key_averages()}
    assert {"te_attention::forward_minimal", "te_attention::backward_minimal"} <= names
