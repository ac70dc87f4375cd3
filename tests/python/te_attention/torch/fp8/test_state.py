"""The state of a recipe: quantizers that are views of it, and the step of delayed scaling."""

import pytest
import torch

from te_attention.torch import fp8
from te_attention.torch.fp8 import DType, Format, RecipeState


def test_delayed_state() -> None:
    recipe = fp8.DelayedScaling(amax_history_len=4)
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, device="cpu")
    assert type(state) is fp8.DelayedScalingRecipeState
    assert (state.scale.tolist(), state.amax_history.shape) == ([1, 1, 1], (4, 3))
    assert (state.dtype, state.recipe, state.mode) == (DType.kFloat8E4M3, recipe, "forward")
    quantizers = state.make_quantizers()
    assert [type(q) for q in quantizers] == [fp8.Float8Quantizer] * 3
    quantizers[1](torch.tensor([-7.0, 2.0]))
    assert state.amax_history[0].tolist() == [0, 7, 0]
    state.update()
    assert state.scale.tolist() == [1, 64, 1]
    assert quantizers[1].scale.item() == 64
    assert quantizers[1].amax.item() == 0
    assert state.amax_history[:, 1].tolist() == [0, 0, 0, 7]
    quantizers[1](torch.tensor([3.5]))
    state.update()
    assert state.scale[1] == 64  # the largest of the history


def reference(history: torch.Tensor, scale: torch.Tensor, recipe, largest: float) -> tuple:
    """The step in TransformerEngine's words: amax, roll, zero, scale."""
    latest = history[0]
    amax = history.max(0).values if recipe.amax_compute_algo == "max" else latest
    rolled = torch.roll(history, -1, 0)
    rolled[0] = 0
    new = torch.tensor(largest) / amax / 2**recipe.margin
    keeps = (amax <= 0) | ~amax.isfinite()
    return rolled, torch.where(keeps, scale, new)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 7, 1024])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_steps(algorithm: str, length: int, mode: str) -> None:
    torch.manual_seed(length)
    recipe = fp8.DelayedScaling(
        margin=1, amax_history_len=length, amax_compute_algo=algorithm, fp8_format=Format.HYBRID
    )
    state = RecipeState.create(recipe, mode=mode, num_quantizers=5, device="cpu")
    state.amax_history.uniform_()
    largest = 448.0 if mode == "forward" else 57344.0
    for amax in ([1.0, 0.0, torch.inf, 3.0, 1e-3], [2.0, 4.0, 0.0, 0.5, 1.0]):
        state.amax_history[0] = torch.tensor(amax)
        history, scale = reference(state.amax_history.clone(), state.scale.clone(), recipe, largest)
        state.update()
        assert torch.equal(state.amax_history, history)
        torch.testing.assert_close(state.scale, scale, rtol=1e-6, atol=0)


def test_current_state() -> None:
    recipe = fp8.Float8CurrentScaling(
        fp8_quant_bwd_grad=fp8.QParams(power_2_scale=True, amax_epsilon=0.5)
    )
    for mode, dtype, power, epsilon in (
        ("forward", DType.kFloat8E4M3, False, 0.0),
        ("backward", DType.kFloat8E5M2, True, 0.5),
    ):
        state = RecipeState.create(recipe, mode=mode, num_quantizers=2, device="cpu")
        quantizers = state.make_quantizers()
        assert [type(q) for q in quantizers] == [fp8.Float8CurrentScalingQuantizer] * 2
        assert quantizers[0].dtype == dtype
        assert (quantizers[0].force_pow_2_scales, quantizers[0].amax_epsilon) == (power, epsilon)


def test_formats_of_a_recipe() -> None:
    for recipe, of_gradient in (
        (fp8.DelayedScaling(), torch.float8_e5m2),
        (fp8.DelayedScaling(fp8_format=Format.E4M3), torch.float8_e4m3fn),
    ):
        assert fp8.get_fp8_torch_dtype(recipe) == torch.float8_e4m3fn
        assert fp8.get_fp8_torch_dtype(recipe, fprop_tensor=False) == of_gradient
    assert fp8.get_fp8_te_dtype(fp8.DelayedScaling(), False) == DType.kFloat8E5M2


def test_what_has_no_state() -> None:
    with pytest.raises(ValueError, match="recipe is a MXFP8BlockScaling; needs DelayedScaling or"):
        RecipeState.create(fp8.MXFP8BlockScaling(), mode="forward")
    with pytest.raises(ValueError, match="mode is 'both'; needs 'forward' or 'backward'"):
        RecipeState.create(fp8.DelayedScaling(), mode="both")
