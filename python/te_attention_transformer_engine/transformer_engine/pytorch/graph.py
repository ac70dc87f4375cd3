"""CUDA graphs: whether one is being captured."""

import torch


def is_graph_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
