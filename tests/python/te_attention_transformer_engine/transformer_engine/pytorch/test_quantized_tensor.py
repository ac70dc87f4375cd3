"""The base classes by TransformerEngine's path."""

from te_attention.torch import fp8
from transformer_engine.pytorch import quantized_tensor


def test_names() -> None:
    for name in (
        *("QuantizedTensor", "QuantizedTensorStorage", "Quantizer"),
        *("prepare_for_saving", "restore_from_saved"),
    ):
        assert getattr(quantized_tensor, name) is getattr(fp8, name)
