"""Float8Tensor by every path that it has in TransformerEngine, and the recipes."""

import transformer_engine as root
import transformer_engine.pytorch as te
from te_attention.torch import fp8
from transformer_engine.common import recipe
from transformer_engine.pytorch import tensor
from transformer_engine.pytorch.tensor import float8_tensor


def test_names() -> None:
    for name in ("Float8Tensor", "Float8Quantizer", "Float8CurrentScalingQuantizer"):
        assert (
            getattr(float8_tensor, name)
            is getattr(tensor, name)
            is getattr(te, name)
            is getattr(fp8, name)
        )


def test_recipes() -> None:
    for name in (
        *("Recipe", "Format", "DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling"),
        *("Float8BlockScaling", "NVFP4BlockScaling", "CustomRecipe", "MMParams", "QParams"),
    ):
        assert getattr(recipe, name) is getattr(fp8, name)
    assert root.common.recipe is recipe
