"""attention_fn in the modules of Flax, compared with Flax's own attention."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from te_attention import jax as tea

X = jax.random.normal(jax.random.key(0), (2, 3, 12, 32))
MASK = nn.make_causal_mask(jnp.ones((2, 3, 12)))


def test_linen() -> None:
    own, ours = (
        nn.MultiHeadDotProductAttention(num_heads=4, **given)
        for given in ({}, {"attention_fn": tea.attention_fn()})
    )
    weights = own.init(jax.random.key(1), X)

    def loss(module):
        return jax.value_and_grad(lambda w: (module.apply(w, X, mask=MASK) ** 2).sum())(weights)

    for a, b in zip(jax.tree.leaves(loss(ours)), jax.tree.leaves(loss(own)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)


def test_nnx() -> None:
    def module(**given):
        return nnx.MultiHeadAttention(
            num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), **given
        )

    x = X[:, 0]
    own = module()(x, mask=MASK[:, 0])
    ours = module(attention_fn=tea.attention_fn())(x, mask=MASK[:, 0])
    np.testing.assert_allclose(ours, own, atol=1e-5)


def test_options_of_the_library() -> None:
    run = tea.attention_fn(is_causal=True, softcap=5.0)
    q = X.reshape(2, 3, 12, 4, 8)
    flat = q.reshape(6, 12, 4, 8)
    want = tea.attention(flat, flat, flat, is_causal=True, softcap=5.0)
    np.testing.assert_allclose(run(q, q, q), want.reshape(q.shape), atol=1e-6)


def test_dropout_follows_the_module() -> None:
    q, key = X[0].reshape(3, 12, 4, 8), jax.random.key(5)
    given = {"dropout_rate": 0.5, "dropout_rng": key, "broadcast_dropout": False}
    run = tea.attention_fn()
    want = tea.attention(q, q, q, dropout=0.5, dropout_key=key)
    assert (run(q, q, q, **given) == want).all()
    assert (run(q, q, q, **given, deterministic=True) == tea.attention(q, q, q)).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"module": object()}, "module is given; needs None"),
        ({"precision": "high"}, "precision is high; needs None"),
        ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "broadcast_dropout is True"),
    ],
)
def test_refusals(given: dict, text: str) -> None:
    q = X[0].reshape(3, 12, 4, 8)
    with pytest.raises(ValueError, match=text):
        tea.attention_fn()(q, q, q, **given)
