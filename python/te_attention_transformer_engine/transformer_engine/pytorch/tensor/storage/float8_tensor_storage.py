"""Float8TensorStorage: FP8 data that autograd does not know."""
# ruff: noqa: F401

from te_attention.torch.fp8 import Float8TensorStorage
