"""FP8 for attention: recipes, quantizers, FP8 tensors, and the state of delayed scaling.

Names, arguments and meanings are TransformerEngine's, as far as attention needs them; objects of
NVIDIA's package are accepted where these classes are.
"""

from te_attention.torch.fp8.formats import DType
from te_attention.torch.fp8.manager import (
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    get_default_recipe,
    is_fp8_available,
)
from te_attention.torch.fp8.quantizer import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
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
from te_attention.torch.fp8.saving import prepare_for_saving, restore_from_saved
from te_attention.torch.fp8.state import (
    DelayedScalingRecipeState,
    Float8CurrentScalingRecipeState,
    RecipeState,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
)
from te_attention.torch.fp8.tensor import (
    Float8Tensor,
    Float8TensorStorage,
    QuantizedTensor,
    QuantizedTensorStorage,
)

__all__ = [
    "CustomRecipe",
    "DType",
    "DelayedScaling",
    "DelayedScalingRecipeState",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8CurrentScalingRecipeState",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "Recipe",
    "RecipeState",
    "autocast",
    "fp8_autocast",
    "get_default_recipe",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_fp8_available",
    "prepare_for_saving",
    "restore_from_saved",
]
