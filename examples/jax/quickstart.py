"""attention() in JAX: options, a gradient under jit, vmap, packed rows."""

import jax
import jax.numpy as jnp

from te_attention.jax import attention, cost, explain

# [batch, seqlen, heads, dim], as jax.nn.dot_product_attention. Every option combines with others.
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
bias = jnp.zeros((1, 8, 128, 128))


@jax.jit
def loss(q, k, v, bias):
    """The mean square of O."""
    o = attention(q, k, v, bias, is_causal=True, local_window_size=(63, 0), softcap=30.0)
    return (o**2).mean()


gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)
each = jax.vmap(attention)(*(x[None] for x in (q, k, v)))

# Rows that hold several sequences each: ids from 1, 0 is padding.
ids = jnp.repeat(jnp.array([[1, 1, 2, 0], [1, 2, 2, 3]]), 32, axis=1)
o, lse = attention(q, k, v, q_segment_ids=ids, max_segments=3, return_residual=True)

print(explain(q, k, v, is_causal=True))
print(cost(q, k, v, is_causal=True))
assert o.shape == q.shape and lse.shape == (2, 128, 8) and each.shape == (1, *q.shape)
assert all(bool(jnp.isfinite(g).all()) for g in gradients)
