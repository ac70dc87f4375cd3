"""The names of TransformerEngine's helpers of quantization."""

import transformer_engine_jax
from transformer_engine.jax.quantize import helper


def test_the_dtypes_are_those_of_the_extension_module() -> None:
    assert helper.DType is transformer_engine_jax.DType
