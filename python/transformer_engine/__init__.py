"""TransformerEngine's import paths for attention, on TE Attention. Not affiliated with NVIDIA."""

from te_attention import version

# The release whose interface this is: callers compare it to decide what they may use.
__version__ = f"2.13.0+te.attention.{version()}"
__all__ = ["__version__"]
