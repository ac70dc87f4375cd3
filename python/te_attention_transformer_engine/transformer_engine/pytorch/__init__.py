"""TransformerEngine's attention for PyTorch."""
# ruff: noqa: F401

import transformer_engine_torch  # callers rely on it being loaded
from transformer_engine.pytorch import ops
from transformer_engine.pytorch._layers import (
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    TransformerLayer,
    fp8_model_init,
    quantized_model_init,
)
from transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint
from transformer_engine.pytorch.graph import make_graphed_callables
from transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_saved,
)
from transformer_engine.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from transformer_engine.pytorch.utils import (
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
)


def __getattr__(name: str) -> object:
    """Says what is here. `from ... import` has Python's own text instead."""
    raise AttributeError(
        f"module transformer_engine.pytorch has no attribute {name}: of TransformerEngine's names "
        "TE Attention has those of attention, FP8 attention too, and none of other layers"
    )
