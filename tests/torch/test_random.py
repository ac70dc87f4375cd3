"""Random state and the dropout pattern."""

import pytest
import torch

from te_attention.torch._library import OPS


def state(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_fill_and_advance() -> None:
    rng = state(0, 0)
    OPS.rng_fill(rng, 5, 7)
    assert rng.tolist() == [5, 7]
    OPS.rng_advance(rng, 4)
    assert rng.tolist() == [5, 11]
    OPS.rng_fill_captured(rng, state(3), state(10), 2)
    assert rng.tolist() == [3, 12]
    OPS.rng_fill_captured(rng, state(3), None, 2)
    assert rng.tolist() == [3, 2]


def test_the_mask_keeps_the_asked_share_and_shifts_with_the_origin() -> None:
    rng = state(11, 3)
    keep = OPS.dropout_mask(rng, 0.25, 2, 3, 64, 128)
    assert keep.dtype == torch.bool
    assert abs(keep.double().mean().item() - 0.75) < 0.01
    shifted = OPS.dropout_mask(rng, 0.25, 1, 2, 48, 112, state(1, 1, 16, 16))
    assert torch.equal(shifted, keep[1:, 1:, 16:, 16:])


def test_a_wrong_state_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rng_state is of shape \[1\]; needs int64 \[2\]"):
        OPS.rng_fill(state(1), 5, 7)


def test_a_negative_size_is_refused_before_memory_is_asked_for(
    capfd: pytest.CaptureFixture,
) -> None:
    with pytest.raises(RuntimeError, match=r"is of shape \[1, -2, 8, 8\]; needs 0 or more"):
        OPS.dropout_mask(state(1, 2), 0.25, 1, -2, 8, 8)
    assert not capfd.readouterr().err  # PyTorch writes a backtrace where its allocator refuses
