"""TE Attention: fused attention for CPU and GPU. The front ends are te_attention.torch and .jax.

Modules and names without a leading underscore are public; all others may change in any version.
"""

import importlib
import importlib.util
from types import ModuleType

from te_attention._library import library, version

__all__ = ["library", "version"]
__version__ = version()
_FRONT_ENDS = ("torch", "jax")


def __getattr__(name: str) -> ModuleType:
    """Imports a front end when it is first asked for: PyTorch and JAX take seconds to import."""
    if name in _FRONT_ENDS and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the module, front ends included, also before they are imported."""
    return sorted({*globals(), *_FRONT_ENDS})
