"""Whether a CUDA graph is being captured."""

import pytest
import torch

from transformer_engine.pytorch.graph import is_graph_capturing


def test_not_without_a_graph() -> None:
    assert not is_graph_capturing()


@pytest.mark.gpu
def test_in_a_graph() -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x * 2
        inside = is_graph_capturing()
    assert inside
