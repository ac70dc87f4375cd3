"""The part of TransformerEngine's extension module for JAX that attention needs, on TE Attention.

Functions are positional, as there. docs/transformer-engine-jax.md says what is compatible.
"""

from transformer_engine_jax.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine_jax.queries import (
    get_cuda_version,
    get_cudnn_version,
    get_device_compute_capability,
    get_fused_attn_backend,
    get_fused_attn_bwd_workspace_sizes,
    get_fused_attn_fwd_workspace_sizes,
    nvte_get_qkv_format,
    registrations,
)

__all__ = [
    "DType",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "get_cuda_version",
    "get_cudnn_version",
    "get_device_compute_capability",
    "get_fused_attn_backend",
    "get_fused_attn_bwd_workspace_sizes",
    "get_fused_attn_fwd_workspace_sizes",
    "nvte_get_qkv_format",
    "registrations",
]


def __getattr__(name: str) -> object:
    """Says what is here. `from ... import` has Python's own text instead."""
    raise AttributeError(
        f"module transformer_engine_jax has no attribute {name}: of TransformerEngine's names "
        "TE Attention has those of attention, and none of other layers"
    )
