"""The functions of the extension module, with fused attention by the names of its options."""

from transformer_engine_torch import *  # noqa: F403

# What has the same name comes second.
# isort: split
from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd, fused_attn_fwd

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]
