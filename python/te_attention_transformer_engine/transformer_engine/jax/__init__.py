"""TransformerEngine's attention for JAX, on TE Attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import transformer_engine_jax  # noqa: F401  # callers rely on it being loaded
from transformer_engine.jax import attention, cpp_extensions, quantize, sharding
from transformer_engine.jax.sharding import MeshResource, global_shard_guard

__all__ = [
    "MeshResource",
    "attention",
    "autocast",
    "cpp_extensions",
    "flax",
    "quantize",
    "sharding",
]


@contextmanager
def autocast(
    enabled: bool = False, recipe: object = None, mesh_resource: MeshResource | None = None
) -> Iterator[None]:
    """Sets the mesh resource for the duration; None unsets it. FP8 is refused."""
    if enabled or recipe is not None:
        seen = "enabled is True" if enabled else "recipe is given"
        raise NotImplementedError(f"{seen} in autocast(); needs its default: JAX has no FP8 here")
    with global_shard_guard(mesh_resource):
        yield


def __getattr__(name: str) -> object:
    """Loads `flax`, which needs a package of its own, where it is used."""
    if name == "flax":
        return import_module("transformer_engine.jax.flax")
    raise AttributeError(
        f"module transformer_engine.jax has no attribute {name}: of TransformerEngine's names "
        "TE Attention has those of attention, and none of other layers"
    )
