"""The primitives of attention and the functions on them."""

from transformer_engine.jax._descriptor import SequenceDescriptor
from transformer_engine.jax._enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVFormat,
    QKVLayout,
)
from transformer_engine.jax._reorder import (
    reorder_causal_dual_chunk_swap,
    reorder_causal_striped,
)
from transformer_engine.jax.cpp_extensions._functions import fused_attn_bwd, fused_attn_fwd
from transformer_engine.jax.cpp_extensions._helper import FusedAttnHelper
from transformer_engine.jax.cpp_extensions._parallel import (
    FusedAttnCPStripedWithAllGatherBwdPrimitive,
    FusedAttnCPStripedWithAllGatherFwdPrimitive,
    FusedAttnCPWithAllGatherBwdPrimitive,
    FusedAttnCPWithAllGatherFwdPrimitive,
    FusedRingAttnBwdPrimitive,
    FusedRingAttnFwdPrimitive,
    FusedRingAttnStripedBwdPrimitive,
    FusedRingAttnStripedFwdPrimitive,
)
from transformer_engine.jax.cpp_extensions._primitives import (
    FusedAttnBwdPrimitive,
    FusedAttnFwdPrimitive,
)
from transformer_engine.jax.cpp_extensions._primitives import FusedAttnConfig as _FusedAttnConfig

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "FusedAttnBwdPrimitive",
    "FusedAttnCPStripedWithAllGatherBwdPrimitive",
    "FusedAttnCPStripedWithAllGatherFwdPrimitive",
    "FusedAttnCPWithAllGatherBwdPrimitive",
    "FusedAttnCPWithAllGatherFwdPrimitive",
    "FusedAttnFwdPrimitive",
    "FusedAttnHelper",
    "FusedRingAttnBwdPrimitive",
    "FusedRingAttnFwdPrimitive",
    "FusedRingAttnStripedBwdPrimitive",
    "FusedRingAttnStripedFwdPrimitive",
    "QKVFormat",
    "QKVLayout",
    "SequenceDescriptor",
    "_FusedAttnConfig",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "reorder_causal_dual_chunk_swap",
    "reorder_causal_striped",
]
