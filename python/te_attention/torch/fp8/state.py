"""Scales of a module from step to step: one state for the forward pass, one for gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from te_attention.torch._library import OPS
from te_attention.torch.fp8.formats import DType, format_of
from te_attention.torch.fp8.quantizer import Float8CurrentScalingQuantizer, Float8Quantizer
from te_attention.torch.fp8.recipe import Format, Recipe

_update_scales = OPS.fp8_update_scales.default


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """The format of a recipe's tensors: E4M3, but E5M2 for the gradients of HYBRID."""
    hybrid_gradient = fp8_recipe.fp8_format == Format.HYBRID and not fprop_tensor
    return DType.kFloat8E5M2 if hybrid_gradient else DType.kFloat8E4M3


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """The same as a torch.dtype."""
    return format_of(get_fp8_te_dtype(fp8_recipe, fprop_tensor)).torch


class RecipeState:
    """The state of a recipe for one direction of a module."""

    recipe: Recipe
    mode: str
    num_quantizers: int

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | None = None,
    ) -> RecipeState:
        """The state of a recipe's kind. `mode` is "forward" or "backward"; device: by default CUDA,
        or the host where there is none.
        """
        for belongs, kind in (
            (recipe.delayed(), DelayedScalingRecipeState),
            (recipe.float8_current_scaling(), Float8CurrentScalingRecipeState),
        ):
            if belongs:
                return kind(recipe, mode=mode, num_quantizers=num_quantizers, device=device)
        seen = type(recipe).__name__
        raise ValueError(f"recipe is a {seen}; needs DelayedScaling or Float8CurrentScaling")

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """See create()."""
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode is {mode!r}; needs 'forward' or 'backward'")
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.dtype = get_fp8_te_dtype(recipe, mode == "forward")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(default if device is None else device)

    def make_quantizers(self) -> list:
        """One quantizer for each tensor."""
        raise NotImplementedError


class DelayedScalingRecipeState(RecipeState):
    """`scale` float32 [n] and `amax_history` float32 [length, n]; row 0, `amax`, is collected.

    Quantizers hold views of both, so that an update of the state is one of every quantizer.
    """

    scale: Tensor
    amax_history: Tensor
    amax: Tensor

    def __init__(self, recipe: Recipe, **options: object) -> None:
        """Scales of 1 and an empty history."""
        super().__init__(recipe, **options)
        n, new = self.num_quantizers, {"dtype": torch.float32, "device": self.device}
        self.scale = torch.ones(n, **new)
        self.amax_history = torch.zeros(recipe.amax_history_len, n, **new)
        self.amax = self.amax_history[0]
        # Whether there are amaxes. The autocast() of a first forward pass may end after the
        # backward pass of another module, and then updates the state of gradients too.
        self.recorded = self.mode == "forward"
        self.updated = False  # whether the scales are from a history
        # The same for kernels of a CUDA graph, whose replays may be before and after an update.
        self.updated_on_device = torch.zeros(1, dtype=torch.bool, device=self.device)

    def make_quantizers(self) -> list[Float8Quantizer]:
        """See the class."""
        return [
            Float8Quantizer(self.scale[i], self.amax[i : i + 1], self.dtype)
            for i in range(self.num_quantizers)
        ]

    def update(self, amax: Tensor | None = None) -> None:
        """The scales of the next step; `amax` [n] replaces row 0, after a reduction of ranks."""
        recipe = self.recipe
        arguments = amax, recipe.amax_compute_algo, format_of(self.dtype).name, recipe.margin
        _update_scales(self.amax_history, self.scale, *arguments)
        if self.recorded:
            self.mark_updated()

    def mark_updated(self) -> None:
        """Notes that the scales are from a history."""
        if not self.updated:
            self.updated = True
            self.updated_on_device.fill_(True)


class Float8CurrentScalingRecipeState(RecipeState):
    """Nothing to keep: the quantizers alone."""

    def make_quantizers(self) -> list[Float8CurrentScalingQuantizer]:
        """One for each tensor, with the options that the recipe has for this direction."""
        forward = self.mode == "forward"
        params = self.recipe.fp8_quant_fwd_inp if forward else self.recipe.fp8_quant_bwd_grad
        options = {
            "force_pow_2_scales": self.recipe.use_power_2_scales or params.power_2_scale,
            "amax_epsilon": params.amax_epsilon,
        }
        return [
            Float8CurrentScalingQuantizer(self.dtype, self.device, **options)
            for _ in range(self.num_quantizers)
        ]
