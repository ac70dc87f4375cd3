"""Attention by operations of JAX, for calls that no engine takes."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_engine._refusal import refuse, require
from transformer_engine.jax._descriptor import SequenceDescriptor
from transformer_engine.jax._enums import AttnBiasType, AttnMaskType, AttnSoftmaxType
from transformer_engine.jax._masks import make_swa_mask


def _attends(mask: Any, kind: AttnMaskType, window: Any, rows: int, keys: int) -> jax.Array:
    """Which scores count: bool, broadcast to ``[batch, heads, rows, keys]``."""
    if isinstance(mask, SequenceDescriptor):
        refuse("sequence_descriptor", "a SequenceDescriptor", "a mask or None without fusion")
    if mask is None and (kind.is_padding() or kind.is_bottom_right()):
        raise ValueError(f"mask is None; needs an array without fusion: {kind.name}")
    out = make_swa_mask(jnp.arange(rows)[None], jnp.arange(keys)[None], window, jnp.bool_)
    if kind.is_causal() and not kind.is_bottom_right():
        out &= jnp.tri(rows, keys, dtype=jnp.bool_)
    if mask is None or kind == AttnMaskType.NO_MASK:
        return out
    return out & (jnp.asarray(mask) == 0)


def _softmax(scores: jax.Array, attends: jax.Array, kind: AttnSoftmaxType, offset: Any) -> Any:
    """Probabilities in float32; 0 in rows that attend to nothing."""
    scores = jnp.where(attends, scores.astype(jnp.float32), -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    has_sink = kind != AttnSoftmaxType.VANILLA_SOFTMAX
    sink = jnp.zeros((1, 1, 1, 1)) if offset is None else offset
    largest = jax.lax.stop_gradient(jnp.maximum(largest, sink) if has_sink else largest)
    extra = jnp.exp(sink - largest) if has_sink else 0.0
    powers = jnp.exp(scores - largest)
    total = jnp.sum(powers, axis=-1, keepdims=True) + extra
    return powers / jnp.where(total == 0, 1, total)


def unfused_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any,
    bias: Any,
    bias_type: AttnBiasType,
    mask_type: AttnMaskType,
    window: tuple[int, int] | None,
    softmax_type: AttnSoftmaxType,
    softmax_offset: Any,
    scale: float,
    float32_logits: bool,
    dropout: float,
    dropout_key: Any,
) -> jax.Array:
    """O ``[batch, rows, heads, dim_v]`` of ``[batch, rows, heads, dim]``.

    Args:
        mask: 1 where masked, ``[batch, 1, rows, keys]``, or None.
        window: sliding window; also without a mask.
        dropout_key: None: nothing is dropped.
    """
    batch, rows, heads, dim = q.shape
    keys, groups = k.shape[1:3]
    require(heads % groups == 0, "heads of query", heads, f"a multiple of {groups}, those of key")
    dtype = q.dtype
    if float32_logits:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    grouped = q.reshape(batch, rows, groups, heads // groups, dim)
    scores = jnp.einsum("bqghd,bkgd->bghqk", grouped, k).reshape(batch, heads, rows, keys)
    if bias_type == AttnBiasType.PRE_SCALE_BIAS:
        scores = (scores + bias) * scale
    elif bias_type == AttnBiasType.POST_SCALE_BIAS:
        scores = scores * scale + bias
    else:
        scores = scores * scale
    attends = _attends(mask, mask_type, window, rows, keys)
    p = _softmax(scores, attends, softmax_type, softmax_offset)
    if dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1 - dropout, p.shape)
        p = jnp.where(kept, p / (1 - dropout), 0)
    p = p.astype(dtype).reshape(batch, groups, heads // groups, rows, keys)
    out = jnp.einsum("bghqk,bkgd->bqghd", p, v)
    return out.reshape(batch, rows, heads, v.shape[-1])
