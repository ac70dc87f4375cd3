"""TransformerLayer: a name that refuses when one is created."""

import pytest

from transformer_engine.pytorch.transformer import TransformerLayer


def test_creating_one_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"pytorch\.TransformerLayer .* needs NVIDIA's"):
        TransformerLayer(64, 256, 4)
