"""TE Attention: fused attention for CPU and GPU. The front ends are te_attention.torch and .jax.

Modules and names without a leading underscore are public; all others may change in any version.
"""

from te_attention._library import library, version

__all__ = ["library", "version"]
__version__ = version()
