"""attention() as a node of PyTorch's autograd graph."""

import pytest
import torch
from torch import Tensor

from te_attention import torch as tea

OPTIONS = {
    "plain": {},
    "mask": {"mask": "causal"},
    "format": {"format": "bshd"},
    "soft cap": {"softcap": 2.0},
    "padded head dim": {"dim": 5},
}


def inputs(device: str = "cpu", dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (1, 2, 2, dim)
    return [
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3)
    ]


class NoGradient(torch.autograd.Function):
    """Its input gets no gradient, which autograd passes on as an undefined tensor."""

    @staticmethod
    def forward(_ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        return None


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_with_undefined_and_batched_gradients(name: str) -> None:
    options = dict(OPTIONS[name])
    tensors = inputs(dim=options.pop("dim", 8))
    function = lambda *qkv: tea.attention(*qkv, **options)  # noqa: E731
    assert torch.autograd.gradcheck(function, tensors, check_batched_grad=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_undefined_gradient_of_o_gives_none(name: str) -> None:
    options = dict(OPTIONS[name])
    tensors = inputs(dim=options.pop("dim", 8))
    other = torch.zeros((), requires_grad=True)
    (NoGradient.apply(tea.attention(*tensors, **options)).sum() + other).backward()
    assert other.grad == 1
    assert all(t.grad is None or not t.grad.any() for t in tensors)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_tensors_on_the_meta_device(name: str) -> None:
    options = dict(OPTIONS[name])
    tensors = inputs("meta", options.pop("dim", 8))
    tea.attention(*tensors, **options).sum().backward()
    assert all(t.grad.shape == t.shape and t.grad.is_meta for t in tensors)
