"""The part of TransformerEngine's extension module that attention needs, on TE Attention.

Functions are positional, as there. docs/transformer-engine.md says what is compatible.
"""

from transformer_engine_torch.backend import get_cudnn_version, get_fused_attn_backend
from transformer_engine_torch.context_parallel import (
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
)
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
from transformer_engine_torch.fp8 import (
    compute_amax,
    dequantize,
    fused_amax_and_scale_update_after_reduction,
    mha_fill,
    quantize,
)
from transformer_engine_torch.fused_attn import fused_attn_bwd, fused_attn_fwd
from transformer_engine_torch.kv_cache import (
    convert_bshd_to_thd,
    convert_thd_to_bshd,
    copy_to_kv_cache,
)
from transformer_engine_torch.softmax import (
    fa_prepare_bwd,
    fa_prepare_fwd,
    scaled_aligned_causal_masked_softmax_backward,
    scaled_aligned_causal_masked_softmax_forward,
    scaled_masked_softmax_backward,
    scaled_masked_softmax_forward,
    scaled_softmax_backward,
    scaled_softmax_forward,
    scaled_upper_triang_masked_softmax_backward,
    scaled_upper_triang_masked_softmax_forward,
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
    "compute_amax",
    "convert_bshd_to_thd",
    "convert_thd_to_bshd",
    "copy_to_kv_cache",
    "dequantize",
    "fa_prepare_bwd",
    "fa_prepare_fwd",
    "fused_amax_and_scale_update_after_reduction",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_cudnn_version",
    "get_fused_attn_backend",
    "mha_fill",
    "quantize",
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
]


def __getattr__(name: str) -> object:
    """Says what is here. `from ... import` has Python's own text instead."""
    raise AttributeError(
        f"module transformer_engine_torch has no attribute {name}: of TransformerEngine's names "
        "TE Attention has those of attention, and none of other layers"
    )
