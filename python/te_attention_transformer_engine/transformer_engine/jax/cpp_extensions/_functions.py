"""fused_attn_fwd() and fused_attn_bwd(): the two directions without differentiation."""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_engine._refusal import require
from transformer_engine.jax._arrays import given, seed_of
from transformer_engine.jax._context import shared_axis
from transformer_engine.jax._descriptor import SequenceDescriptor
from transformer_engine.jax._enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
)
from transformer_engine.jax.cpp_extensions._parallel import call_of
from transformer_engine.jax.cpp_extensions._primitives import FusedAttnConfig


def _operands(
    qkv: tuple, layout: QKVLayout, bias: Any, kind: AttnBiasType, offset: Any, softmax: object
) -> tuple:
    """Q, K, V, bias and softmax offset; empty arrays for those that the call has not."""
    q, k, v = given(qkv, layout)
    if kind == AttnBiasType.NO_BIAS:
        require(bias is None or not bias.size, "bias", "given", "None with NO_BIAS")
        bias = jnp.zeros(0, q.dtype)
    require(bias is not None, "bias", None, f"an array with {kind.name}")
    require(bias.dtype == q.dtype, "bias.dtype", bias.dtype.name, f"{q.dtype.name}, as q")
    if softmax == AttnSoftmaxType.VANILLA_SOFTMAX:
        return q, k, v, bias, jnp.zeros(0, jnp.float32)
    heads = q.shape[-2]
    if offset is None:
        needed = "an array with LEARNABLE_SOFTMAX"
        require(softmax == AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, "softmax_offset", None, needed)
        offset = jnp.zeros((1, heads, 1, 1), jnp.float32)
    seen = f"of shape {list(offset.shape)}"
    require(offset.shape == (1, heads, 1, 1), "softmax_offset", seen, f"[1, {heads}, 1, 1]")
    return q, k, v, bias, offset


def _config(
    bias: AttnBiasType,
    mask: AttnMaskType,
    layout: QKVLayout,
    softmax: AttnSoftmaxType,
    scale: float,
    dropout: float,
    is_training: bool,
    segments: int,
    window: tuple[int, int] | None,
    strategy: CPStrategy,
    is_balanced: bool,
    axis: str,
    stripe: int | None,
) -> FusedAttnConfig:
    axis = shared_axis(strategy, axis)
    return FusedAttnConfig(
        attn_bias_type=bias,
        attn_mask_type=mask,
        softmax_type=softmax,
        qkv_layout=layout,
        scaling_factor=float(scale),
        dropout_probability=float(dropout),
        is_training=is_training,
        max_segments_per_seq=segments,
        window_size=(-1, -1) if window is None else tuple(window),
        bottom_right_diagonal=mask.is_bottom_right(),
        context_parallel_load_balanced=is_balanced,
        cp_axis=axis or "",
        cp_striped_window_size=None,
        stripe_size=stripe,
    )


def fused_attn_fwd(
    qkv: tuple,
    bias: Any,
    softmax_offset: Any,
    sequence_descriptor: SequenceDescriptor,
    seed: Any,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    stripe_size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """O, LSE (float32; the residual of backward) and rng_state. Arguments: of fused_attn()."""
    config = _config(
        *(attn_bias_type, attn_mask_type, qkv_layout, softmax_type, scaling_factor),
        *(dropout_probability, is_training, max_segments_per_seq, window_size),
        *(context_parallel_strategy, context_parallel_causal_load_balanced),
        *(context_parallel_axis, stripe_size),
    )
    operands = _operands(qkv, qkv_layout, bias, attn_bias_type, softmax_offset, softmax_type)
    offset = operands[-1]
    require(offset.dtype == jnp.float32, "softmax_offset.dtype", offset.dtype.name, "float32")
    words = seed_of(seed, is_training and dropout_probability > 0)
    leaves = jax.tree.leaves(sequence_descriptor)
    run = call_of("Fwd", config, context_parallel_strategy)
    return tuple(run(*operands, words, *leaves, config=config))


def fused_attn_bwd(
    qkv: tuple,
    bias: Any,
    softmax_offset: Any,
    softmax_aux: Any,
    rng_state: Any,
    output: Any,
    doutput: Any,
    sequence_descriptor: SequenceDescriptor,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    stripe_size: int | None = None,
) -> tuple[tuple, jax.Array, jax.Array]:
    """The gradients of qkv, as a tuple like it, of bias and of softmax_offset.

    Empty arrays where there is no bias or offset. Arguments: of fused_attn_fwd(), and its results.
    """
    config = _config(
        *(attn_bias_type, attn_mask_type, qkv_layout, softmax_type, scaling_factor),
        *(dropout_probability, is_training, max_segments_per_seq, window_size),
        *(context_parallel_strategy, context_parallel_causal_load_balanced),
        *(context_parallel_axis, stripe_size),
    )
    *operands, offset = _operands(
        qkv, qkv_layout, bias, attn_bias_type, softmax_offset, softmax_type
    )
    operands += [offset.astype(jnp.float32), softmax_aux, rng_state, output, doutput]
    leaves = jax.tree.leaves(sequence_descriptor)
    run = call_of("Bwd", config, context_parallel_strategy)
    out = run(*operands, *leaves, config=config)
    return tuple(out[: len(qkv)]), out[3], out[4]
