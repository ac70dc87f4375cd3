"""FP8 by TransformerEngine's names: one implementation, and what the machine can do."""

import torch

from te_attention.torch import fp8
from transformer_engine.pytorch import DotProductAttention, quantization
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast, fp8_autocast


def test_a_context_that_is_off() -> None:
    q, k, v = (torch.randn(2, 8, 4, 32) for _ in range(3))
    dpa = DotProductAttention(4, 32, qkv_format="bshd")
    with fp8_autocast(enabled=False), autocast(False):
        assert not FP8GlobalStateManager.is_fp8_enabled()
        assert torch.equal(dpa(q, k, v), dpa(q, k, v))
    FP8GlobalStateManager.reset()


def test_names_are_those_of_the_core() -> None:
    for name in (
        *("autocast", "fp8_autocast", "FP8GlobalStateManager", "RecipeState"),
        *("DelayedScalingRecipeState", "Float8CurrentScalingRecipeState", "get_fp8_te_dtype"),
        *("get_fp8_torch_dtype", "is_fp8_available", "get_default_recipe"),
    ):
        assert getattr(quantization, name) is getattr(fp8, name)


def test_availability() -> None:
    assert quantization.is_fp8_available(return_reason=True) == (True, "")
    for name in ("is_mxfp8_available", "is_fp8_block_scaling_available", "is_nvfp4_available"):
        found, reason = getattr(quantization, name)(return_reason=True)
        assert not found
        assert "block scaling is no part of TE Attention" in reason
