"""TransformerEngine's attention for PyTorch."""

import transformer_engine_torch  # noqa: F401  (callers rely on it being loaded)
from transformer_engine.pytorch.attention import DotProductAttention, InferenceParams
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.utils import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
)

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "InferenceParams",
    "checkpoint",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_device_compute_capability",
    "is_bf16_available",
]
