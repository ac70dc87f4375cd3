"""FP8: the context that switches it on, its state, and what the machine can do."""
# ruff: noqa: F401

from te_attention.torch.fp8 import (
    DelayedScalingRecipeState,
    Float8CurrentScalingRecipeState,
    FP8GlobalStateManager,
    RecipeState,
    autocast,
    fp8_autocast,
    get_default_recipe,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    is_fp8_available,
)

_NO_BLOCKS = (
    "block scaling is no part of TE Attention; needs DelayedScaling or Float8CurrentScaling"
)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether recipes with scales for blocks can be used: no."""
    return (False, _NO_BLOCKS) if return_reason else False


is_fp8_block_scaling_available = is_nvfp4_available = is_mxfp8_available
