"""Programs for releases before 2.9 find FP8 where it was, and the latest choice of a backend."""

import transformer_engine.pytorch as te
from transformer_engine.pytorch import fp8, quantization
from transformer_engine.pytorch.attention import _attention_backends, dot_product_attention


def test_the_older_name() -> None:
    assert fp8.FP8GlobalStateManager is quantization.FP8GlobalStateManager
    assert fp8.fp8_autocast is te.fp8_autocast
    assert fp8.is_fp8_available is te.is_fp8_available
    assert _attention_backends is dot_product_attention._attention_backends
