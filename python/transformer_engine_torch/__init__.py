"""TransformerEngine's extension module, as far as attention needs it, on TE Attention.

Functions are positional, as there. docs/transformer-engine.md says what is compatible.
"""

from transformer_engine_torch.enums import (
    DType,
    FP8BwdTensors,
    FP8FwdTensors,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine_torch.fused_attn import (
    fused_attn_bwd,
    fused_attn_fwd,
    get_cudnn_version,
    get_fused_attn_backend,
)

__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_cudnn_version",
    "get_fused_attn_backend",
]
