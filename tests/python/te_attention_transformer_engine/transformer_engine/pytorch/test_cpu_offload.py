"""Offloading of what attention has marked."""

import pytest
import torch

from transformer_engine.pytorch.cpu_offload import (
    get_cpu_offload_context,
    is_cpu_offload_enabled,
    mark_activation_offload,
    start_offload,
)


def test_only_marked_tensors_leave() -> None:
    x = torch.randn(4, requires_grad=True)
    context, _ = get_cpu_offload_context(enabled=True)
    assert not is_cpu_offload_enabled()
    with context:
        assert is_cpu_offload_enabled()
        y = torch.randn(4, requires_grad=True)
        start_offload(x, None)
        product = x * y
    saved = product.grad_fn._saved_self
    assert saved.data_ptr() != x.data_ptr()  # a copy
    assert torch.equal(saved, x)
    assert product.grad_fn._saved_other.data_ptr() == y.data_ptr()
    assert not is_cpu_offload_enabled()
    assert torch.equal(torch.autograd.grad(product.sum(), x)[0], y.detach())


def test_outside_of_a_context_nothing_is_marked() -> None:
    x = torch.randn(4)
    start_offload(x)
    assert not hasattr(x, "activation_offloading")
    mark_activation_offload(x, None)
    assert x.activation_offloading


def test_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="offload_weights is True; needs False"):
        get_cpu_offload_context(enabled=True, offload_weights=True)
    context, sync = get_cpu_offload_context(enabled=False)
    with context:
        assert not is_cpu_offload_enabled()
    assert sync(3) == 3
