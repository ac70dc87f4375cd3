"""The base class of the modules."""

import pytest
import torch

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class Layer(TransformerEngineBaseModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


def test_attributes_before_a_forward_pass() -> None:
    layer = Layer()
    assert not layer.fp8_initialized
    assert layer.fp8_meta["fp8_group"] is None
    assert layer.quantizers == {"scaling_fwd": {}, "scaling_bwd": {}}
    layer.fast_setattr("tp_size", 2)
    layer.set_tensor_parallel_group("group")
    assert (layer.tp_size, layer.tp_group) == (2, "group")


def test_the_input_is_prepared() -> None:
    x = torch.randn(2, 3).t()
    with Layer().prepare_forward_ctx(x) as ready:
        assert ready.is_contiguous()
    with Layer().prepare_forward_ctx(x, allow_non_contiguous=True) as ready:
        assert ready is x
    with (
        pytest.raises(ValueError, match=r"weight is torch\.float32; needs torch\.float16"),
        Layer().prepare_forward_ctx(x.half()),
    ):
        pass
