"""Routers of experts: names that refuse."""

import pytest
import torch

from transformer_engine.pytorch import router


def test_routers_refuse_to_be_called() -> None:
    for name in (
        *("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss"),
        "fused_moe_aux_loss",
    ):
        with pytest.raises(NotImplementedError, match=rf"router\.{name}\(\) needs NVIDIA's"):
            getattr(router, name)(torch.zeros(1))
