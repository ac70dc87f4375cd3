"""The primitives of attention, lowered to TransformerEngine's custom calls."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from te_attention.jax import custom_calls
from transformer_engine.jax._arrays import Sizes, sizes_of
from transformer_engine.jax._descriptor import SequenceDescriptor, sequences_of
from transformer_engine.jax._enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
)
from transformer_engine.jax.cpp_extensions._helper import FusedAttnHelper
from transformer_engine.jax.cpp_extensions.base import BasePrimitive, register_primitive
from transformer_engine.jax.cpp_extensions.misc import jax_dtype_to_te_dtype

DESCRIPTOR = 8  # leaves, the last operands


@jax.tree_util.register_static
@dataclass(frozen=True)
class FusedAttnConfig:
    """The static options of a call."""

    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    qkv_layout: QKVLayout
    scaling_factor: float
    dropout_probability: float
    is_training: bool
    max_segments_per_seq: int
    window_size: tuple[int, int]
    bottom_right_diagonal: bool
    context_parallel_load_balanced: bool
    cp_axis: str
    cp_striped_window_size: tuple[int, int] | None
    stripe_size: int | None


def _attributes(sizes: Sizes, bias: Any, config: FusedAttnConfig) -> custom_calls.FusedAttnConfig:
    """The attributes of the custom calls."""
    has_bias = config.attn_bias_type != AttnBiasType.NO_BIAS
    return custom_calls.FusedAttnConfig(
        input_batch=math.prod(sizes.batch_shape),
        bias_batch=math.prod(bias.shape[:-3]) if has_bias else 0,
        q_max_seqlen=sizes.q_max_seqlen,
        kv_max_seqlen=sizes.kv_max_seqlen,
        attn_heads=sizes.attn_heads,
        num_gqa_groups=sizes.num_gqa_groups,
        bias_heads=bias.shape[-3] if has_bias else 0,
        qk_head_dim=sizes.q_head_dim,
        v_head_dim=sizes.v_head_dim,
        max_segments_per_seq=config.max_segments_per_seq,
        window_size_left=config.window_size[0],
        window_size_right=config.window_size[1],
        scaling_factor=config.scaling_factor,
        dropout_probability=config.dropout_probability,
        bias_type=config.attn_bias_type.value,
        mask_type=config.attn_mask_type.value,
        qkv_layout=config.qkv_layout.value,
        softmax_type=config.softmax_type.value,
        is_training=config.is_training,
        deterministic=not FusedAttnHelper.is_non_deterministic_allowed(),
        bottom_right_diagonal=config.bottom_right_diagonal,
    )


def _lengths(leaves: tuple, sizes: Sizes, config: FusedAttnConfig) -> list[jax.Array]:
    """cu_seqlens and starts as the custom calls take them; empty ones where they are not read."""
    found = sequences_of(
        SequenceDescriptor(*(tuple(leaves[i : i + 2]) for i in range(0, DESCRIPTOR, 2))),
        config.attn_mask_type,
        config.qkv_layout,
        config.window_size,
        config.max_segments_per_seq,
        (math.prod(sizes.batch_shape), sizes.q_max_seqlen, sizes.kv_max_seqlen),
    )
    none = jnp.zeros(0, jnp.int32)
    return [none if x is None else x for x in found] if found else [none] * 4


def _call(primitive: type[BasePrimitive], operands: tuple, config: FusedAttnConfig) -> tuple:
    """The custom call of a primitive, without its last result, the workspace."""
    before, leaves = operands[:-DESCRIPTOR], operands[-DESCRIPTOR:]
    q, k, v, bias, *_ = before
    sizes = sizes_of(q, k, v, config.qkv_layout)
    attributes = _attributes(sizes, bias, config)
    custom_calls.register()
    both = custom_calls.fused_attn_workspace(attributes, jax_dtype_to_te_dtype(q.dtype))
    workspace = jax.ShapeDtypeStruct((both[primitive is FusedAttnBwdPrimitive],), jnp.uint8)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in primitive.outer_abstract(*operands, config=config)
    ]
    run = jax.ffi.ffi_call(primitive.name, [*results, workspace])
    lengths = _lengths(leaves, sizes, config)
    return tuple(run(*before, *lengths, *leaves[-4:], **attributes.attributes())[:-1])


class FusedAttnFwdPrimitive(BasePrimitive):
    """Forward: 14 operands, the last 8 the leaves of a SequenceDescriptor; O, LSE, rng_state."""

    name = "te_fused_attn_forward_ffi"
    impl_static_args = (14,)

    @staticmethod
    def outer_abstract(*operands: Any, config: FusedAttnConfig) -> tuple:
        """Shapes and types of the results."""
        q, k, v, _, _, seed, *_ = operands
        sizes = sizes_of(q, k, v, config.qkv_layout)
        batch, rows, heads = sizes.batch_shape, sizes.q_max_seqlen, sizes.attn_heads
        inner = (rows, heads) if config.qkv_layout.is_thd() else (heads, rows)
        return (
            jax.core.ShapedArray((*batch, rows, heads, sizes.v_head_dim), q.dtype),
            jax.core.ShapedArray((*batch, *inner, 1), jnp.float32),
            jax.core.ShapedArray((seed.shape[0], 4), jnp.uint32),
        )

    @staticmethod
    def impl(*operands: Any, config: FusedAttnConfig) -> tuple:
        """The results, by the custom call."""
        return _call(FusedAttnFwdPrimitive, operands, config)


class FusedAttnBwdPrimitive(BasePrimitive):
    """Backward: 17 operands; the gradients of the first five, in their shapes and types."""

    name = "te_fused_attn_backward_ffi"
    impl_static_args = (17,)

    @staticmethod
    def outer_abstract(*operands: Any, config: FusedAttnConfig) -> tuple:  # noqa: ARG004
        """Shapes and types of the results."""
        return tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in operands[:5])

    @staticmethod
    def impl(*operands: Any, config: FusedAttnConfig) -> tuple:
        """The results, by the custom call."""
        return _call(FusedAttnBwdPrimitive, operands, config)


register_primitive(FusedAttnFwdPrimitive)
register_primitive(FusedAttnBwdPrimitive)
