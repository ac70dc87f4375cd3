"""Names of TransformerEngine's other layers, so that programs that also use them can be imported.

Megatron-Core subclasses and imports them before it knows whether a model needs them. They refuse
when they are used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

NEEDED = "needs NVIDIA's TransformerEngine: TE Attention has its attention alone"


def layer(name: str) -> type[torch.nn.Module]:
    """A module class of that name whose instances refuse to be created."""

    def refuse(self: object, *_: object, **__: object) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            f"transformer_engine.pytorch.{name} (as {type(self).__name__}) {NEEDED}"
        )

    text = f"TransformerEngine's {name}, which TE Attention does not have: creating one raises."
    return type(name.rpartition(".")[2], (torch.nn.Module,), {"__init__": refuse, "__doc__": text})


def function(name: str) -> Callable:
    """A function of that name that refuses when it is called."""

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"transformer_engine.pytorch.{name}() {NEEDED}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"TransformerEngine's {name}, which TE Attention does not have: calls raise."
    return refuse


Linear = layer("Linear")
LayerNormLinear = layer("LayerNormLinear")
LayerNorm = layer("LayerNorm")
RMSNorm = layer("RMSNorm")
GroupedLinear = layer("GroupedLinear")
LayerNormMLP = layer("LayerNormMLP")
TransformerLayer = layer("TransformerLayer")


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: object = None,  # noqa: ARG001
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """A context in which layers keep FP8 weights. Attention has none, so True is refused."""
    for name, value in (
        ("enabled", enabled),
        ("preserve_high_precision_init_val", preserve_high_precision_init_val),
    ):
        if value:
            raise NotImplementedError(f"{name} is True in quantized_model_init(); {NEEDED}")
    yield


fp8_model_init = quantized_model_init
