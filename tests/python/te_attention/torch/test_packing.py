"""Inputs that are parts of one tensor: so are the gradients, equal to those of separate inputs."""

from collections.abc import Callable

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch._packing import packed_gradients

CU = torch.tensor([0, 5, 9], dtype=torch.int32)
RAGGED = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_seqlen_q": 5}

# The shape of the packed tensor, how its parts are taken, and the options.
PACKED: dict[str, tuple[tuple, Callable, dict]] = {
    "unbind, batch first": ((2, 9, 3, 4, 16), lambda x: x.unbind(2), {"format": "bshd"}),
    "unbind, heads inside": ((2, 9, 4, 3, 16), lambda x: x.unbind(3), {"format": "bshd"}),
    "chunk of the last": ((2, 9, 4, 48), lambda x: x.chunk(3, -1), {"format": "bshd"}),
    "one after the other": ((3, 2, 9, 4, 16), lambda x: x.unbind(0), {"format": "bshd"}),
    "select": ((9, 2, 3, 4, 16), lambda x: [x[:, :, i] for i in range(3)], {"format": "sbhd"}),
    "split with groups": ((2, 9, 8, 16), lambda x: x.split((4, 2, 2), 2), {"format": "bshd"}),
    "sequence first": ((9, 2, 8, 16), lambda x: x.split((4, 2, 2), 2), {"format": "sbhd"}),
    "ragged": ((9, 8, 16), lambda x: x.split((4, 2, 2), 1), RAGGED),
    "turned": (
        (2, 9, 8, 16),
        lambda x: [t.transpose(1, 2) for t in x.split((4, 2, 2), 2)],
        {"mask": "causal"},
    ),
    "another order": (
        (2, 9, 8, 16),
        lambda x: [x[:, :, 4:], x[:, :, 2:4], x[:, :, :2]],
        {"format": "bshd"},
    ),
    "part of a wider one": (
        (2, 9, 12, 16),
        lambda x: x[:, :, 2:10].split((4, 2, 2), 2),
        {"format": "bshd"},
    ),
    "with a bias": (
        (2, 9, 3, 4, 16),
        lambda x: x.unbind(2),
        {"format": "bshd", "bias": torch.ones(1, 4, 9, 9)},
    ),
}


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def apart(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("name", PACKED)
def test_one_tensor_holds_the_gradients(name: str) -> None:
    shape, parts, options = PACKED[name]
    packed = torch.randn(shape, requires_grad=True)
    inputs = list(parts(packed))
    o = tea.attention(*inputs, **options)
    dout = torch.randn_like(o)
    got = torch.autograd.grad(o, inputs, dout, retain_graph=True)
    assert len({memory(g) for g in got}) == 1
    assert got[0].untyped_storage().nbytes() == sum(g.numel() for g in got) * 4  # and nothing else
    alone = apart(inputs)
    want = torch.autograd.grad(tea.attention(*alone, **options), alone, dout)
    assert len({memory(g) for g in want}) == 3
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    (whole,) = torch.autograd.grad(o, packed, dout)
    for a, b in zip(parts(whole), want, strict=True):
        assert torch.equal(a, b)


def test_they_lie_as_the_inputs_do() -> None:
    inputs = torch.randn(2, 9, 8, 16, requires_grad=True).split((4, 2, 2), 2)
    o = tea.attention(*inputs, format="bshd")
    for gradient, of in zip(torch.autograd.grad(o.sum(), inputs), inputs, strict=True):
        assert gradient.stride() == of.stride()
        assert gradient.storage_offset() == of.storage_offset()


def test_keys_and_values_alone() -> None:
    q = torch.randn(2, 7, 4, 16, requires_grad=True)
    k, v = torch.randn(2, 9, 2, 40, requires_grad=True).split((16, 24), -1)
    o = tea.attention(q, k, v, format="bshd")
    dout = torch.randn_like(o)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), dout)
    assert memory(dk) == memory(dv) != memory(dq)
    alone = apart([q, k, v])
    want = torch.autograd.grad(tea.attention(*alone, format="bshd"), alone, dout)
    for a, b in zip((dq, dk, dv), want, strict=True):
        assert torch.equal(a, b)


def test_what_lies_around_them_stays_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = torch.full((4, 9, 12, 16), torch.nan)

    def take_memory_inside(every: torch.Tensor) -> torch.Tensor:
        assert every.shape == (2, 9, 8, 16)
        return inside[1:3, :, 2:10]

    inputs = torch.randn(2, 9, 8, 16, requires_grad=True).split((4, 2, 2), 2)
    o = tea.attention(*inputs, format="bshd")
    monkeypatch.setattr("torch.empty_like", take_memory_inside)
    gradients = torch.autograd.grad(o, inputs, torch.ones_like(o))
    assert all(memory(g) == memory(inside) and g.isfinite().all() for g in gradients)
    inside[1:3, :, 2:10] = torch.nan
    assert inside.isnan().all()


def test_the_gradient_of_lse_comes_along() -> None:
    packed = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    inputs = packed.unbind(2)
    results = tea.attention(*inputs, format="bshd", return_lse=True)
    incoming = [torch.randn_like(t) for t in results]
    got = torch.autograd.grad(results, inputs, incoming)
    alone = apart(inputs)
    want = tea.attention(*alone, format="bshd", return_lse=True)
    for a, b in zip(got, torch.autograd.grad(want, alone, incoming), strict=True):
        assert torch.equal(a, b)
    assert len({memory(g) for g in got}) == 1


# Views of one memory that are not, or not all, parts of one tensor; how many memories the gradients
# have.
OTHERS = {
    "the same": (lambda x: (x[0], x[0], x[0]), 3),
    "v is k": (lambda x: (x[0], x[1], x[1]), 3),
    "other strides": (lambda x: (x[0], x[1], x[2].transpose(0, 1)), 3),
    "other distances": (lambda x: (x[0], x[1], x[3]), 2),
    "only q and k": (lambda x: (x[0], x[1], x[2].clone()), 3),
    "a hole": (lambda x: (x[0, :, :4], x[0, :, 4:6], x[0, :, 7:]), 2),
    "shifted by one element": (
        lambda x: tuple(x.flatten()[i : i + 1296].view(9, 9, 16) for i in range(3)),
        3,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_part_has_memory_of_its_own(name: str) -> None:
    views, memories = OTHERS[name]
    inputs = views(torch.randn(4, 9, 9, 16, requires_grad=True))
    o = tea.attention(*inputs, **RAGGED)
    dout = torch.randn_like(o)
    alone = apart(inputs)
    want = torch.autograd.grad(tea.attention(*alone, **RAGGED), alone, dout)
    if len({id(t) for t in inputs}) == len(inputs):  # else autograd adds them up
        got = torch.autograd.grad(o, inputs, dout)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        assert len({memory(g) for g in got}) == memories
    assert (packed_gradients(*inputs) is None) == (memories == len(inputs))


def test_gradients_may_be_changed_one_by_one() -> None:
    inputs = torch.randn(2, 9, 3, 4, 16, requires_grad=True).unbind(2)
    weight = torch.randn(2, 9, 4, 16, requires_grad=True)
    dq, dk, dv = torch.autograd.grad(tea.attention(*inputs, format="bshd").sum(), inputs)
    kept = dk.clone()
    loss = (dk * weight).sum()
    dq.mul_(2)
    dv.zero_()
    loss.backward()
    assert torch.equal(weight.grad, kept)


@pytest.mark.parametrize("options", [{}, {"window": (3, None)}], ids=["short", "long"])
def test_batches_of_gradients(options: dict) -> None:
    inputs = torch.randn(1, 9, 3, 2, 8, requires_grad=True).unbind(2)
    o = tea.attention(*inputs, format="bshd", **options)
    douts = torch.randn(2, *o.shape)
    got = torch.autograd.grad(o, inputs, douts, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        want = torch.autograd.grad(o, inputs, douts[i], retain_graph=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b)


def test_parts_that_overlap_have_gradients_of_their_own() -> None:
    x = torch.randn(2, 9, 8, 16, requires_grad=True)
    inputs = x[:, :, :4], x[:, :, 2:6], x[:, :, 4:]
    o = tea.attention(*inputs, format="bshd")
    dout = torch.randn_like(o)
    alone = apart(inputs)
    want = torch.autograd.grad(tea.attention(*alone, format="bshd"), alone, dout)
    for a, b in zip(torch.autograd.grad(o, inputs, dout), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(0, 9, 3, 4, 16), (2, 0, 3, 4, 16), (1, 1, 3, 1, 8)])
def test_small_and_empty_ones(shape: tuple[int, ...]) -> None:
    packed = torch.randn(shape, requires_grad=True)
    tea.attention(*packed.unbind(2), format="bshd").sum().backward()
    assert packed.grad.shape == packed.shape
    assert packed.grad.isfinite().all()


def test_compiled_code_computes_the_same() -> None:
    def model(packed):
        return tea.attention(*packed.unbind(2), format="bshd", mask="causal")

    packed = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    (got,), (want,) = (
        torch.autograd.grad(f(packed).square().sum(), packed) for f in (compiled, model)
    )
    torch.testing.assert_close(got, want)


def test_leaves_that_share_memory_add_up() -> None:
    leaves = [t.requires_grad_() for t in torch.randn(2, 9, 3, 4, 16).unbind(2)]
    for _ in range(2):
        o = tea.attention(*leaves, format="bshd")
        o.backward(torch.ones_like(o))
    o = tea.attention(*leaves, format="bshd")
    for leaf, once in zip(leaves, torch.autograd.grad(o, leaves, torch.ones_like(o)), strict=True):
        torch.testing.assert_close(leaf.grad, 2 * once)
