"""The name of quantization before release 2.9."""
# ruff: noqa: F401

from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    fp8_autocast,
    is_fp8_available,
)
