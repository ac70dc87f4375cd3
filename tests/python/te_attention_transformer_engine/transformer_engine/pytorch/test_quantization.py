"""FP8 is off: asked for it says so, switched on it is refused."""

import pytest
import torch

from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    is_fp8_available,
)


def test_a_context_that_is_off() -> None:
    q, k, v = (torch.randn(2, 8, 4, 32) for _ in range(3))
    dpa = DotProductAttention(4, 32, qkv_format="bshd")
    with fp8_autocast(enabled=False), autocast(False):
        assert not FP8GlobalStateManager.is_fp8_enabled()
        assert torch.equal(dpa(q, k, v), dpa(q, k, v))
    FP8GlobalStateManager.reset()


@pytest.mark.parametrize("context", [autocast, fp8_autocast])
def test_a_context_that_is_on_is_refused(context: object) -> None:
    with pytest.raises(ValueError, match="enabled is True; needs False: FP8 attention is not"):
        context().__enter__()
    with pytest.raises(ValueError, match="calibrating is True; needs False"):
        context(False, calibrating=True).__enter__()


def test_availability() -> None:
    assert is_fp8_available() is False
    assert is_fp8_available(return_reason=True) == (False, "FP8 attention is not there yet")
