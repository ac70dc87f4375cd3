"""The name of quantization before release 2.9."""
# ruff: noqa: F401

from transformer_engine.pytorch._layers import fp8_model_init
from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    get_default_recipe,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    is_fp8_available,
)
