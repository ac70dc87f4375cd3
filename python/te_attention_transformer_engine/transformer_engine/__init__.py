"""TransformerEngine's import paths for attention, on TE Attention. Not affiliated with NVIDIA."""

from importlib import import_module

from te_attention import version

# The release whose interface this is: callers compare it to decide what they may use.
__version__ = f"2.13.0+te.attention.{version()}"
__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    """Importing transformer_engine is enough to use its packages, as there."""
    if name not in ("common", "jax", "pytorch"):
        raise AttributeError(f"transformer_engine has no {name}; needs common, jax or pytorch")
    return import_module(f"transformer_engine.{name}")
