"""The code of docs/transformer-engine-jax.md, as a program."""

import jax
import jax.numpy as jnp

from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
from transformer_engine.jax.flax import DotProductAttention

# [batch, rows, heads, dim]: two rows with two sequences each; 0 is padding.
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64), jnp.bfloat16)
ids = jnp.repeat(jnp.array([[1, 1, 2, 0], [1, 2, 2, 2]]), 32, axis=1)


@jax.jit
def loss(q, k, v, ids):
    """The mean square of O."""
    o = fused_attn(
        (q, k, v),
        bias=None,
        sequence_descriptor=SequenceDescriptor.from_segment_ids_and_pos(ids, None, is_thd=True),
        seed=None,
        attn_bias_type=AttnBiasType.NO_BIAS,
        attn_mask_type=AttnMaskType.PADDING_CAUSAL_MASK,
        qkv_layout=QKVLayout.THD_THD_THD,
        softmax_type=AttnSoftmaxType.VANILLA_SOFTMAX,
        scaling_factor=0.125,
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=2,
    )
    return (o.astype(jnp.float32) ** 2).mean()


gradients = jax.grad(loss, argnums=(0, 1, 2))(q, k, v, ids)

core = DotProductAttention(64, 8, attn_mask_type="causal", transpose_batch_sequence=False)
o = core.apply({}, q, k, v)
print(o.shape, *(float(jnp.abs(g).max()) for g in gradients))
