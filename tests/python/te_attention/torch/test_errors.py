"""Memory that cannot be allocated, in the terms of PyTorch."""

import pytest
import torch

from te_attention import torch as tea
from te_attention.torch import _errors

ROWS = 1 << 40  # of 8 float32: 32 TiB


def long(differentiable: bool) -> torch.Tensor:
    q = torch.zeros(1, 1, 1, 8).expand(1, 1, ROWS, 8)
    return q.requires_grad_(differentiable)


@pytest.mark.parametrize("window", [None, (0, 0)])
@pytest.mark.parametrize("differentiable", [False, True])
def test_no_memory_on_the_cpu(window: tuple | None, differentiable: bool) -> None:
    k = torch.zeros(1, 1, 4, 8)
    with pytest.raises(MemoryError, match=rf"cpu is out of memory: {32 * ROWS} bytes") as error:
        tea.attention(long(differentiable), k, k, window=window)
    assert isinstance(error.value, RuntimeError)  # as what PyTorch raises there


def test_no_memory_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    k = torch.randn(1, 1, 4, 8, requires_grad=True)
    o = tea.attention(k, k, k, window=(0, 0))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory: 4096 bytes on cpu")

    monkeypatch.setattr("te_attention.torch._autograd._backward", _errors.guarded(fail))
    with pytest.raises(MemoryError, match="4096 bytes"):
        o.sum().backward()


def test_on_a_gpu_it_is_the_error_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(torch, "empty", no_memory)
    failed = RuntimeError("out of memory: 8589934592 bytes on cuda:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"8589934592 bytes.*CUDA out of memory"):
        _errors.raise_if_out_of_memory(failed)


def test_a_broken_gpu_is_not_called_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _errors.raise_if_out_of_memory(RuntimeError("out of memory: 16 bytes on cuda:0"))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (0, 0)])
def test_no_memory_on_a_gpu(window: tuple | None) -> None:
    q = torch.zeros(1, 1, 1, 8, device="cuda", dtype=torch.bfloat16).expand(1, 1, ROWS, 8)
    k = torch.zeros(1, 1, 4, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError, match=f"{16 * ROWS} bytes"):
        tea.attention(q, k, k, window=window)
