"""Moves the activations that attention marks to the host until the backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

MARK = "activation_offloading"
# TransformerEngine's older way of offloading, which the variable of this name selects there.
NVTE_CPU_OFFLOAD_V1 = False
_active = 0  # the number of open contexts


def is_cpu_offload_enabled() -> bool:
    """Whether a context of get_cpu_offload_context() is open."""
    return _active > 0


def mark_activation_offload(*tensors: Tensor | None) -> None:
    """Marks tensors that an open context moves to the host once autograd has saved them."""
    for tensor in tensors:
        if tensor is not None:
            setattr(tensor, MARK, True)


def start_offload(*tensors: Tensor | None, offload_base_tensor: bool = False) -> None:
    """As mark_activation_offload(), at the beginning of a layer.

    offload_base_tensor requests the memory that views share. Here each view is moved separately,
    with its own strides, so it has no effect.
    """
    del offload_base_tensor
    if _active:
        mark_activation_offload(*tensors)


class _Offload(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(self._to_host, self._to_device)

    def __enter__(self) -> None:
        global _active  # noqa: PLW0603
        _active += 1
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        global _active  # noqa: PLW0603
        _active -= 1
        super().__exit__(*error)

    @staticmethod
    def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if not getattr(tensor, MARK, False):
            return tensor
        pinned = tensor.is_cuda
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return tensor.device, host.copy_(tensor, non_blocking=pinned)

    @staticmethod
    def _to_device(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=host.is_pinned())


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
) -> tuple[AbstractContextManager, Callable[[Tensor], Tensor]]:
    """A context around the layers, and a function to apply to the output of each layer.

    TransformerEngine offloads num_layers of model_layers. Here a context offloads every layer that
    runs in it, so the function returns its argument.
    """
    del num_layers, model_layers
    if offload_weights:
        raise ValueError("offload_weights is True; needs False: attention has no weights")
    if not (enabled and offload_activations):
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), lambda t: t
    return _Offload(), lambda t: t
