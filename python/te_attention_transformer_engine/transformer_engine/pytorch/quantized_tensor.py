"""The base classes of FP8 tensors and quantizers, and saving them for the backward pass."""
# ruff: noqa: F401

from te_attention.torch.fp8 import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_saved,
)
