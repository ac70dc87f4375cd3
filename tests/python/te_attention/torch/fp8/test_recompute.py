"""Checkpoints: the second call of a function finds the scales of the first."""

import torch

from te_attention.torch import fp8
from te_attention.torch.fp8 import DType
from te_attention.torch.fp8.recompute import Recomputation, forward_quantizers, frozen


def made() -> fp8.Float8Quantizer:
    return fp8.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), DType.kFloat8E4M3)


def test_a_frozen_quantizer_keeps_its_scale_and_records() -> None:
    quantizer = made()
    copy = frozen(quantizer)
    quantizer.scale.fill_(8.0)
    assert copy(torch.ones(2))._scale_inv.item() == 0.25
    assert quantizer.amax.item() == 1


def test_both_calls_have_the_same_scales_and_context() -> None:
    quantizer, seen = made(), []
    current = fp8.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, "cpu")

    def function(x: torch.Tensor) -> None:
        for_calls = [forward_quantizers([quantizer, current]) for _ in range(2)]
        assert for_calls[0][1] is current
        seen.append([q[0](x)._scale_inv.item() for q in for_calls])
        seen.append(fp8.FP8GlobalStateManager.is_fp8_enabled())

    with fp8.autocast():
        call = Recomputation(function)
        call(torch.ones(2))
    assert quantizer.amax.item() == 1
    quantizer.scale.fill_(8.0)
    quantizer.amax.zero_()
    call(torch.full((2,), 3.0))
    assert seen == [[0.25, 0.25], True] * 2
    assert quantizer.amax.item() == 0  # the second call records nothing
    assert not fp8.FP8GlobalStateManager.is_fp8_enabled()
    assert forward_quantizers([quantizer]) == [quantizer]
