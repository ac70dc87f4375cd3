"""Attention for Flax: the `attention_fn` of MultiHeadAttention, of Linen and of NNX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from te_attention.jax._arguments import refuse
from te_attention.jax.functional import attention


def attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """A function for ``MultiHeadAttention(attention_fn=...)`` of flax.linen or flax.nnx.

    Args:
        options: of :func:`te_attention.jax.attention`, for every call: ``is_causal``, ``alibi``,
            ...

    The modules pass a mask ``[..., heads, rows, columns]`` (True: attend), their dropout rate and
    key; dropout needs ``broadcast_dropout=False``, because each probability is dropped on its own.
    Leading dimensions beyond one are joined. ``sow_weights`` is refused: there are no weights in
    memory.
    """

    def run(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        if module is not None:
            raise refuse("module", "given", "None (sow_weights=False): there are no weights to sow")
        if precision is not None:
            raise refuse("precision", precision, "None: products are accumulated in float32")
        drops = dropout_rate > 0 and not deterministic
        if drops and broadcast_dropout:
            raise refuse("broadcast_dropout", True, "False: each probability is dropped on its own")
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        leading = query.shape[:-3]

        def joined(x: Any) -> Any:
            """With one batch dimension; broadcast ones of masks and biases stay."""
            if x is None or x.ndim <= 4:
                return x
            if x.shape[:-3] != leading:
                x = jnp.broadcast_to(x, (*leading, *x.shape[-3:]))
            return x.reshape(-1, *x.shape[-3:])

        given = dict(options)
        given["is_causal"] = bool(given.get("is_causal", False) or is_causal)
        if drops:
            given |= {"dropout": dropout_rate, "dropout_key": dropout_rng}
        allowed = None if mask is None else joined(jnp.asarray(mask).astype(bool))  # numbers, too
        out = attention(*(joined(x) for x in (query, key, value)), joined(bias), allowed, **given)
        return out.reshape(*leading, *out.shape[-3:])

    return run
