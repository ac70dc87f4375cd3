"""MultiheadAttention: a name that refuses when one is created."""

import pytest

from transformer_engine.pytorch.attention.multi_head_attention import MultiheadAttention


def test_creating_one_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"pytorch\.MultiheadAttention .* needs NVIDIA's"):
        MultiheadAttention(64, 4)
