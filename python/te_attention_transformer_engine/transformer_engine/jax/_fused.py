"""fused_attn(): one call of te_attention.jax, with its gradients."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from te_attention.jax import attention, ragged_attention
from transformer_engine._refusal import check_dropout, refuse, require
from transformer_engine.jax import _context
from transformer_engine.jax._arrays import (
    Sizes,
    given,
    seed_of,
    separate,
    sizes_of,
    window_of,
)
from transformer_engine.jax._descriptor import (
    SequenceDescriptor,
    descriptor_of_mask,
    sequences_of,
)
from transformer_engine.jax._enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    require_enum,
)
from transformer_engine.jax.cpp_extensions import FusedAttnHelper

CHECKPOINT_NAME = "context"
BIAS = {AttnBiasType.PRE_SCALE_BIAS: "pre_scale", AttnBiasType.POST_SCALE_BIAS: "post_scale"}


def _require_options(
    mask: object, layout: object, bias: Any, kind: object, softmax: object, offset: Any, heads: int
) -> None:
    """Refuses what only together is wrong."""
    seen = None if bias is None else "given"
    has_bias = kind != AttnBiasType.NO_BIAS
    needed = f"{'an array' if has_bias else None}: attn_bias_type is {kind.name}"
    require((bias is not None) == has_bias, "bias", seen, needed)
    if layout.is_thd():
        needed = f"one with padding: qkv_layout is {layout.name}"
        require(mask.is_padding(), "attn_mask_type", mask.name, needed)
    if softmax == AttnSoftmaxType.LEARNABLE_SOFTMAX:
        seen = None if offset is None else f"{offset.dtype.name}{list(offset.shape)}"
        fits = offset is not None and offset.shape == (1, heads, 1, 1)
        fits = fits and offset.dtype == jnp.float32
        require(fits, "softmax_offset", seen, f"float32[1, {heads}, 1, 1]")
    elif softmax == AttnSoftmaxType.VANILLA_SOFTMAX:
        needed = f"None: softmax_type is {softmax.name}"
        require(offset is None, "softmax_offset", "given", needed)


def _descriptor(given: Any, mask: AttnMaskType, layout: QKVLayout, segments: int, shape: tuple):
    if isinstance(given, SequenceDescriptor):
        return given
    warnings.warn(
        "sequence_descriptor is a mask or None, which is deprecated; pass a SequenceDescriptor",
        DeprecationWarning,
        stacklevel=3,
    )
    seen = "a mask or None"
    require(not layout.is_thd(), "sequence_descriptor", seen, f"a descriptor: {layout.name}")
    needed = f"a descriptor: max_segments_per_seq is {segments}"
    require(segments == 1, "sequence_descriptor", seen, needed)
    return descriptor_of_mask(given, mask, shape)


def fused_attn(
    qkv: tuple,
    bias: Any,
    sequence_descriptor: Any,
    seed: Any,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = CHECKPOINT_NAME,
    softmax_offset: Any = None,
    stripe_size: int | None = None,
) -> jax.Array:
    """Attention ``[batch, rows, heads, dim_v]``, differentiable in qkv, bias and softmax_offset.

    Args:
        qkv: one, two or three arrays ``[batch, rows, (3 or 2,) heads, dim]``, as the layout packs
            them, also with a layout of THD.
        bias: ``[1 or batch, 1 or heads, rows, keys]`` in the dtype of qkv; None iff NO_BIAS.
        sequence_descriptor: a SequenceDescriptor. Deprecated: a mask ``[batch, 1, rows, keys]``, 1
            where masked, or None.
        seed: the data of a random key, for dropout.
        attn_bias_type, attn_mask_type, qkv_layout, softmax_type: members of the enums.
        scaling_factor: of the scores.
        dropout_probability: applied only in training.
        is_training: False: without dropout.
        max_segments_per_seq: of THD, a bound of the sequences in a row.
        window_size: (left, right), both inclusive; -1: no limit. None: (-1, -1).
        context_parallel_strategy: how keys reach the devices that share the rows.
        context_parallel_causal_load_balanced: whether rows are in the order of DualChunkSwap, those
            of THD in that of Striped, as reorder_causal_load_balancing() makes it.
        context_parallel_axis: the mesh axis that shares the rows. Default: cp_resource of the
            MeshResource. One of one device is without effect.
        stripe_size: of Striped: adjacent rows of a stripe.
        context_checkpoint_name: the name of the results for checkpoint policies.
        softmax_offset: float32 ``[1, heads, 1, 1]``, for LEARNABLE_SOFTMAX.
    """
    for name, value, kind in (
        ("attn_bias_type", attn_bias_type, AttnBiasType),
        ("attn_mask_type", attn_mask_type, AttnMaskType),
        ("qkv_layout", qkv_layout, QKVLayout),
        ("softmax_type", softmax_type, AttnSoftmaxType),
    ):
        require_enum(name, value, kind)
    axis = _context.shared_axis(context_parallel_strategy, context_parallel_axis)
    if stripe_size is not None and stripe_size < 1:
        refuse("stripe_size", stripe_size, "None, or at least 1")
    arrays = given(qkv, qkv_layout)
    sizes = sizes_of(*arrays, qkv_layout)
    q, k, v = separate(arrays, qkv_layout)
    _require_options(
        *(attn_mask_type, qkv_layout, bias, attn_bias_type, softmax_type, softmax_offset),
        sizes.attn_heads,
    )
    if bias is not None:
        require(bias.dtype == q.dtype, "bias.dtype", bias.dtype.name, f"{q.dtype.name}, as q")
    window = window_of(window_size)
    check_dropout("dropout_probability", dropout_probability)
    shape = (math.prod(sizes.batch_shape), sizes.q_max_seqlen, sizes.kv_max_seqlen)
    descriptor = _descriptor(
        sequence_descriptor, attn_mask_type, qkv_layout, max_segments_per_seq, shape
    )
    where = (attn_mask_type, qkv_layout, window, max_segments_per_seq, shape)
    is_dropping = is_training and dropout_probability > 0
    options = {
        **{"scale": scaling_factor, "is_causal": attn_mask_type.is_causal()},
        **{"bottom_right": attn_mask_type.is_bottom_right()},
        "local_window_size": tuple(None if x < 0 else x for x in window),
        **{"bias": bias, "bias_type": BIAS.get(attn_bias_type, "post_scale")},
        "sink": _sink(softmax_type, softmax_offset),
        "deterministic": not FusedAttnHelper.is_non_deterministic_allowed(),
        "checkpoint_name": context_checkpoint_name,
    }
    words = seed_of(seed, is_dropping)
    if is_dropping:
        options |= {"dropout": dropout_probability, "dropout_key": words.ravel()[:2]}
    if axis is None:
        return _attention(q, k, v, sizes, sequences_of(descriptor, *where), options)
    how = (context_parallel_strategy, qkv_layout, context_parallel_causal_load_balanced)
    sharing = _context.sharing_of(axis, *how, stripe_size)
    arrays, bound = _context.sequence_options(descriptor, *where)
    names = ("query", "key", "value")
    rows = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)]
    arrays |= dict(zip(names, rows, strict=True))
    out = _context.forward(sharing, arrays, options | bound)["o"]
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _sink(softmax: AttnSoftmaxType, offset: Any) -> Any:
    if softmax == AttnSoftmaxType.LEARNABLE_SOFTMAX:
        return offset.ravel()
    return "off_by_one" if softmax == AttnSoftmaxType.OFF_BY_ONE_SOFTMAX else None


def _attention(q: Any, k: Any, v: Any, sizes: Sizes, sequences: Any, options: dict) -> jax.Array:
    """The call of te_attention.jax: of rows in a batch, or of sequences in all tokens."""
    shape = (*q.shape[:-1], v.shape[-1])
    if sequences is not None and sequences.offsets_q is not None:
        tokens = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
        lengths = sequences._asdict()
        lengths |= {"max_seqlen_q": sizes.q_max_seqlen, "max_seqlen_kv": sizes.kv_max_seqlen}
        return ragged_attention(*tokens, **lengths, **options).reshape(shape)
    if sequences is not None:
        options["query_seq_lengths"] = jnp.diff(sequences.cu_seqlens_q)
        options["key_value_seq_lengths"] = jnp.diff(sequences.cu_seqlens_kv)
    rows = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)]
    return attention(*rows, **options).reshape(shape)


def fused_attn_thd(
    qkv: tuple,
    bias: Any,
    q_seq_lens: Any,
    kv_seq_lens: Any,
    q_seq_offsets: Any,
    kv_seq_offsets: Any,
    seed: Any,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    softmax_offset: Any = None,
) -> jax.Array:
    """fused_attn() of THD with lengths and starts. Deprecated: pass a SequenceDescriptor."""
    warnings.warn(
        "fused_attn_thd() is deprecated; use fused_attn() with a SequenceDescriptor",
        DeprecationWarning,
        stacklevel=2,
    )
    require(qkv_layout.is_thd(), "qkv_layout", qkv_layout.name, "T3HD, THD_T2HD or THD_THD_THD")
    for name, lengths, starts in (
        ("q_seq_offsets", q_seq_lens, q_seq_offsets),
        ("kv_seq_offsets", kv_seq_lens, kv_seq_offsets),
    ):
        needed = f"one column more than lengths, {list(lengths.shape)}"
        fits = starts.shape == (*lengths.shape[:-1], lengths.shape[-1] + 1)
        require(fits, name, f"of shape {list(starts.shape)}", needed)
    descriptor = SequenceDescriptor.from_seqlens_and_offsets(
        (q_seq_lens, kv_seq_lens), (q_seq_offsets, kv_seq_offsets)
    )
    return fused_attn(
        *(qkv, bias, descriptor, seed, attn_bias_type, attn_mask_type, qkv_layout),
        *(AttnSoftmaxType.VANILLA_SOFTMAX, scaling_factor, dropout_probability, is_training),
        max_segments_per_seq=max_segments_per_seq,
        window_size=window_size,
        context_parallel_strategy=context_parallel_strategy,
        context_parallel_causal_load_balanced=context_parallel_causal_load_balanced,
        context_parallel_axis=context_parallel_axis,
        softmax_offset=softmax_offset,
    )
