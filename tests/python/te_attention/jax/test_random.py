"""dropout_mask(): arguments; tests/jax/test_dropout.py has what it draws."""

import jax
import numpy as np
import pytest

from te_attention import jax as tea

KEY = jax.random.key(0)


def test_under_vmap_each_key_has_its_pattern() -> None:
    keys = jax.random.split(KEY, 3)
    masks = jax.vmap(lambda key: tea.dropout_mask(key, 0.5, (1, 2, 8, 8)))(keys)
    for key, mask in zip(keys, masks, strict=True):
        np.testing.assert_array_equal(mask, tea.dropout_mask(key, 0.5, (1, 2, 8, 8)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((KEY, 1.0, (1, 1, 1, 1)), "dropout is 1.0; needs at least 0"),
        ((KEY, 0.5, (1, 1, 1)), r"shape is \(1, 1, 1\); needs batch, heads"),
        ((KEY, 0.5, (1, 1, 1, -1)), r"shape is \(1, 1, 1, -1\); needs batch"),
        ((jax.random.split(KEY), 0.5, (1, 1, 1, 1)), "dropout_key is a uint32 array"),
    ],
)
def test_refusals(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tea.dropout_mask(*arguments)
