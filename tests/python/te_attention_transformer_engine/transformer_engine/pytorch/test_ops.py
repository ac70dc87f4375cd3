"""Fusible operations: names that refuse."""

import pytest

from transformer_engine.pytorch import ops


def test_operations_refuse_to_be_created() -> None:
    for name in ("Sequential", "FusibleOperation", "BasicLinear", "LayerNorm", "SwiGLU"):
        with pytest.raises(NotImplementedError, match=rf"pytorch\.ops\.{name} .* needs NVIDIA's"):
            getattr(ops, name)()
