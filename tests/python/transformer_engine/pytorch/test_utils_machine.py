"""What is asked about the machine, and the initialisers."""

import torch

from transformer_engine.pytorch import utils


def test_versions() -> None:
    assert utils.get_cudnn_version() >= (9, 18, 1)
    major, _ = utils.get_device_compute_capability()
    assert (major > 0) == torch.cuda.is_available()
    assert utils.is_bf16_available(return_reason=True) == (True, "")


def test_initialisers() -> None:
    t = utils.init_method_normal(0.5)(torch.empty(10000))
    assert abs(t.std() - 0.5) < 0.02
    t = utils.scaled_init_method_normal(0.5, 2)(torch.empty(10000))
    assert abs(t.std() - 0.25) < 0.01


def test_a_mask_hides() -> None:
    scores = torch.tensor([[1.0, -2e4]])
    hidden = utils.attention_mask_func(scores, torch.tensor([[True, False]]))
    assert hidden is scores
    assert hidden.softmax(-1).tolist() == [[0.0, 1.0]]
