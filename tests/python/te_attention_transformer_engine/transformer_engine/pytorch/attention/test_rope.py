"""Rotary embeddings: names that refuse when they are used."""

import pytest

from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)


def test_their_use_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"pytorch\.RotaryPositionEmbedding .* needs"):
        RotaryPositionEmbedding(64)
    with pytest.raises(NotImplementedError, match=r"pytorch.apply_rotary_pos_emb\(\) needs NVIDIA"):
        apply_rotary_pos_emb(None, None)
