"""Saving FP8 tensors for the backward pass of an autograd function."""

from torch import Tensor


def prepare_for_saving(
    *tensors: Tensor | object | None,
) -> tuple[list[Tensor | None], list[object | None]]:
    """Tensors for ctx.save_for_backward(), and what to keep to restore the arguments from them.

    Tensors, Float8Tensors too, are saved as they are; the tensors of a storage are moved out.
    """
    saved, objects = [], []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            saved.append(tensor)
            objects.append(None)
        else:
            parts, rest = tensor.prepare_for_saving()
            saved += parts
            objects.append(rest)
    return saved, objects


def restore_from_saved(
    tensors: list[object | None],
    saved_tensors: list[Tensor | None],
    return_saved_tensors: bool = False,
) -> list | tuple[list, list[Tensor | None]]:
    """The arguments of prepare_for_saving(), and with return_saved_tensors those that are left."""
    left, restored = list(saved_tensors), []
    for tensor in tensors:
        if tensor is None:
            restored.append(left.pop(0))
        else:
            left = list(tensor.restore_from_saved(left))
            restored.append(tensor)
    return (restored, left) if return_saved_tensors else restored
