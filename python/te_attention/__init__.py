"""TE Attention: fused attention for CPU and GPU. The front ends are te_attention.torch and .jax."""

from te_attention._library import version

__version__ = version()
