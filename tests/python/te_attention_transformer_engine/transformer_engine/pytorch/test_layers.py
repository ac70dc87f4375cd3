"""Names of TransformerEngine's other layers: there to be imported, and refused when used."""

import subprocess
import sys

import pytest
import torch

import transformer_engine as te
from transformer_engine.pytorch import fp8
from transformer_engine.pytorch.distributed import activation_recompute_forward

LAYERS = (
    *("Linear", "LayerNormLinear", "LayerNorm", "RMSNorm", "GroupedLinear", "LayerNormMLP"),
    *("TransformerLayer", "MultiheadAttention", "RotaryPositionEmbedding"),
)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_can_be_subclassed_and_refuse_to_be_created(name: str) -> None:
    base = getattr(te.pytorch, name)
    assert issubclass(base, torch.nn.Module)

    class Parallel(base):
        """As Megatron-Core's."""

        def __init__(self) -> None:
            super().__init__(16, 16, bias=False)

    with pytest.raises(NotImplementedError, match=f"pytorch.{name} .as Parallel. needs NVIDIA's"):
        Parallel()


def test_weights_in_fp8_are_refused() -> None:
    assert fp8.fp8_model_init is te.pytorch.fp8_model_init is te.pytorch.quantized_model_init
    with te.pytorch.fp8_model_init(enabled=False):
        pass
    with pytest.raises(NotImplementedError, match="enabled is True"), fp8.fp8_model_init():
        pass


def test_recomputation_is_marked_where_no_scales_are_kept() -> None:
    with activation_recompute_forward(activation_recompute=True, recompute_phase=False):
        pass
    with activation_recompute_forward(activation_recompute=True, recompute_phase=True):
        pass


def test_the_recipes_are_reached_through_the_package() -> None:
    program = "import transformer_engine as te; print(te.common.recipe.Format.HYBRID.name)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "HYBRID\n"
