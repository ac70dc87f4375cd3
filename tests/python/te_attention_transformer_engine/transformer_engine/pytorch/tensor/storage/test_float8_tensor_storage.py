"""Float8TensorStorage by TransformerEngine's path."""

from te_attention.torch import fp8
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage


def test_name() -> None:
    assert Float8TensorStorage is fp8.Float8TensorStorage
