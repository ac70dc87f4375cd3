"""Recipes: how the scales of FP8 tensors are chosen."""
# ruff: noqa: F401

from te_attention.torch.fp8.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
