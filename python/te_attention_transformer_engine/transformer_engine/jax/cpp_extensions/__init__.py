"""The operations below fused_attn(), which TransformerEngine implements as custom calls."""

from transformer_engine.jax.cpp_extensions.attention import (
    FusedAttnHelper,
    fused_attn_bwd,
    fused_attn_fwd,
)

__all__ = ["FusedAttnHelper", "fused_attn_bwd", "fused_attn_fwd"]
