"""The dropout pattern as a custom call: what it draws, and what it refuses."""

import jax
import jax.numpy as jnp
import pytest

from te_attention import jax as tea
from te_attention.jax import _library

KEY = jax.random.key(3)


def test_the_rate_is_that_of_the_argument() -> None:
    keep = tea.dropout_mask(KEY, 0.3, (2, 3, 100, 100))
    assert keep.dtype == jnp.bool_
    assert abs(float(keep.mean()) - 0.7) < 0.01


def test_origin_moves_the_pattern() -> None:
    whole = tea.dropout_mask(KEY, 0.5, (2, 2, 8, 8))
    part = tea.dropout_mask(KEY, 0.5, (1, 1, 4, 3), origin=[1, 1, 4, 5])
    assert (part[0, 0] == whole[1, 1, 4:, 5:]).all()


def test_a_program_that_does_not_fit_is_refused() -> None:
    _library.library()
    run = jax.ffi.ffi_call(
        "tea_attention_dropout_mask", jax.ShapeDtypeStruct((1, 1, 1, 4), jnp.bool_)
    )
    words = jnp.zeros(0, jnp.uint32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="4 words of rng_state"):
        jax.block_until_ready(run(jnp.zeros(3, jnp.uint32), words, dropout=0.5))
    with pytest.raises(jax.errors.JaxRuntimeError, match="dropout is 2"):
        jax.block_until_ready(run(jnp.zeros(4, jnp.uint32), words, dropout=2.0))
