"""The functions of the extension module, with fused attention by the names of its options."""

from transformer_engine_torch import *  # noqa: F403

# The module with the same names is imported second.
# isort: split
from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]
