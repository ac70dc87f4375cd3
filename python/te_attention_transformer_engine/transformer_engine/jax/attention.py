"""The attention functions of TransformerEngine."""

from transformer_engine.jax._descriptor import SequenceDescriptor
from transformer_engine.jax._enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVFormat,
    QKVLayout,
    ReorderStrategy,
    canonicalize_attn_mask_type,
)
from transformer_engine.jax._fused import fused_attn, fused_attn_thd
from transformer_engine.jax._masks import make_swa_mask, run_length_fill
from transformer_engine.jax._reorder import (
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)
from transformer_engine.jax.cpp_extensions._helper import is_fused_attn_kernel_available

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "QKVFormat",
    "QKVLayout",
    "ReorderStrategy",
    "SequenceDescriptor",
    "canonicalize_attn_mask_type",
    "fused_attn",
    "fused_attn_thd",
    "inverse_reorder_causal_load_balancing",
    "is_fused_attn_kernel_available",
    "make_swa_mask",
    "reorder_causal_load_balancing",
    "run_length_fill",
]
