"""A small character model in JAX, trained with attention() and with jax.nn's on the same weights.

usage: gpt.py [--steps N]

Prints both losses and fails unless training lowers the loss and both agree.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention

from te_attention.jax import attention

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))
WIDTH, HEADS, LAYERS, ROWS, BATCH = 64, 4, 2, 48, 8


def new_weights(key: jax.Array) -> dict:
    """Normal weights: embeddings, and a stack of layers for lax.scan."""
    keys = jax.random.split(key, 6)
    shapes = {"qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = {
        name: jax.random.normal(k, (LAYERS, *shape)) * WIDTH**-0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    embedding = jax.random.normal(keys[4], (len(LETTERS), WIDTH)) * 0.1
    place = jax.random.normal(keys[5], (ROWS, WIDTH)) * 0.1
    return {"layers": layers, "embedding": embedding, "place": place}


def normed(x: jax.Array) -> jax.Array:
    """Root mean square normalisation."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def loss_of(attend, weights: dict, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next letter; each layer is rematerialised, attention is kept."""

    def layer(x: jax.Array, w: dict) -> tuple:
        q, k, v = jnp.moveaxis(jnp.einsum("btc,cnhd->btnhd", normed(x), w["qkv"]), 2, 0)
        o = attend(q, k, v, is_causal=True)
        x = x + o.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"], None

    kept = jax.checkpoint_policies.save_only_these_names("context")
    x = weights["embedding"][tokens[:, :-1]] + weights["place"]
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=kept), x, weights["layers"])
    scores = jax.nn.log_softmax(normed(x) @ weights["embedding"].T * 4)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def train(attend, steps: int) -> list[float]:
    """The losses of plain gradient descent."""
    text = jnp.array([LETTERS.index(c) for c in TEXT])

    @jax.jit
    def step(weights: dict, key: jax.Array) -> tuple:
        starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - ROWS - 1)
        tokens = text[starts + jnp.arange(ROWS + 1)]
        loss, gradients = jax.value_and_grad(lambda w: loss_of(attend, w, tokens))(weights)
        return jax.tree.map(lambda w, g: w - 0.02 * g, weights, gradients), loss

    weights, losses = new_weights(jax.random.key(0)), []
    for key in jax.random.split(jax.random.key(1), steps):
        weights, loss = step(weights, key)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Trains twice and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    ours, theirs = (train(attend, steps) for attend in (attention, dot_product_attention))
    print(f"te_attention: {ours[0]:.3f} to {ours[-1]:.3f}; jax.nn: {theirs[-1]:.3f}")
    assert ours[-1] < 0.8 * ours[0], "training does not lower the loss"
    assert abs(ours[9] - theirs[9]) < 1e-2 * theirs[9], "the two differ"


if __name__ == "__main__":
    main()
