"""Versions and dtypes between JAX and TransformerEngine."""

import pytest

import transformer_engine_jax as tex
from transformer_engine.jax.cpp_extensions.misc import (
    DTYPES,
    get_cudnn_version,
    jax_dtype_to_te_dtype,
    te_dtype_to_jax_dtype,
)


def test_the_version_of_cudnn_in_three_numbers() -> None:
    major, minor, patch = get_cudnn_version()
    assert (major * 100 + minor) * 100 + patch == tex.get_cudnn_version()


def test_dtypes() -> None:
    for dtype, member in DTYPES.items():
        assert jax_dtype_to_te_dtype(dtype) is member
        assert te_dtype_to_jax_dtype(member) == dtype
    with pytest.raises(ValueError, match="jax_dtype is complex64; needs one of uint8"):
        jax_dtype_to_te_dtype("complex64")
