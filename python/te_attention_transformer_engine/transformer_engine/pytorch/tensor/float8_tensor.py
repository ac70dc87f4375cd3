"""Float8Tensor and the quantizers that make it."""
# ruff: noqa: F401

from te_attention.torch.fp8 import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
