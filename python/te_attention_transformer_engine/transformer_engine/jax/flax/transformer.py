"""DotProductAttention for Flax Linen: the fused call where it can, or products and a softmax."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_attention import environment
from transformer_engine._refusal import check_dropout, refuse, require
from transformer_engine.jax._arrays import given, separate, sizes_of, window_of
from transformer_engine.jax._enums import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    canonicalize_attn_mask_type,
)
from transformer_engine.jax._fused import fused_attn
from transformer_engine.jax.cpp_extensions._helper import is_fused_attn_kernel_available
from transformer_engine.jax.flax._unfused import unfused_attention
from transformer_engine.jax.sharding import HEAD_AXES

STRATEGIES = {
    "DEFAULT": CPStrategy.DEFAULT,
    "ALL_GATHER": CPStrategy.ALL_GATHER,
    "ALLGATHER": CPStrategy.ALL_GATHER,
    "RING": CPStrategy.RING,
}


class _Backend(nn.Module):
    """The options of both ways, and the learnable number for the softmax."""

    attention_dropout: float
    attn_mask_type: AttnMaskType
    attn_bias_type: AttnBiasType
    softmax_type: AttnSoftmaxType
    dropout_rng_name: str
    scale_factor: float
    window_size: tuple[int, int] | None

    def softmax_offset(self, heads: int) -> jax.Array | None:
        """The parameter, where the softmax has one."""
        if self.softmax_type != AttnSoftmaxType.LEARNABLE_SOFTMAX:
            return None
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None, HEAD_AXES, None, None))
        return self.param("softmax_offset", init, (1, heads, 1, 1), jnp.float32)

    def dropout_key(self, deterministic: bool) -> jax.Array | None:
        """A key, where probabilities are dropped."""
        if deterministic or not self.attention_dropout:
            return None
        return self.make_rng(self.dropout_rng_name)


class _FusedDotProductAttention(_Backend):
    """One call of fused_attn()."""

    qkv_layout: QKVLayout
    max_segments_per_seq: int
    context_parallel_causal_load_balanced: bool
    context_parallel_axis: str
    context_parallel_strategy: CPStrategy
    context_checkpoint_name: str

    @nn.compact
    def __call__(
        self, qkv: tuple, sequence_descriptor: Any, bias: Any, deterministic: bool
    ) -> jax.Array:
        key = self.dropout_key(deterministic)
        seed = None
        if key is not None:  # one for each device
            seed = jax.random.split(key, jax.device_count())
        return fused_attn(
            *(qkv, bias, sequence_descriptor, seed, self.attn_bias_type, self.attn_mask_type),
            *(self.qkv_layout, self.softmax_type, self.scale_factor, self.attention_dropout),
            is_training=not deterministic,
            max_segments_per_seq=self.max_segments_per_seq,
            window_size=self.window_size,
            context_parallel_strategy=self.context_parallel_strategy,
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_checkpoint_name=self.context_checkpoint_name,
            softmax_offset=self.softmax_offset(qkv[0].shape[-2]),
        )


class _UnfusedDotProductAttention(_Backend):
    """Two products with a softmax between them, by operations of JAX."""

    float32_logits: bool

    @nn.compact
    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, bias: Any, deterministic: bool
    ) -> jax.Array:
        return unfused_attention(
            *(q, k, v, mask, bias, self.attn_bias_type, self.attn_mask_type, self.window_size),
            *(self.softmax_type, self.softmax_offset(q.shape[-2]), self.scale_factor),
            self.float32_logits,
            self.attention_dropout,
            self.dropout_key(deterministic),
        )


def _bias_type(name: str | None, bias: Any) -> AttnBiasType:
    if name is None:
        return AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
    known = [member.name.lower() for member in AttnBiasType]
    require(name.lower() in known, "attn_bias_type", repr(name), f"one of {', '.join(known)}")
    kind = AttnBiasType[name.upper()]
    has_bias = kind != AttnBiasType.NO_BIAS
    needed = f"{'an array' if has_bias else None}: attn_bias_type is {name!r}"
    require((bias is not None) == has_bias, "bias", "given" if not has_bias else None, needed)
    return kind


class DotProductAttention(nn.Module):
    """Attention of projected queries, keys and values.

    Attributes:
        head_dim: of query and key.
        num_attention_heads: of query.
        num_gqa_groups: heads of key and value. Default: num_attention_heads.
        attention_dropout: the probability of dropping a probability in training.
        attn_mask_type: no_mask, padding, causal, causal_bottom_right, padding_causal or
            padding_causal_bottom_right.
        attn_bias_type: no_bias, pre_scale_bias or post_scale_bias. Default: post_scale_bias if
            there is a bias.
        dtype: that of the inputs; deprecated.
        dropout_rng_name: the name of the random stream.
        float32_logits: whether scores of the unfused way are float32.
        qkv_layout: bshd_bshd_bshd, bs3hd, bshd_bs2hd or those of thd; which arrays are packed.
        scale_factor: of the scores. Default: 1 / sqrt(head_dim).
        transpose_batch_sequence: whether inputs and output are ``[rows, batch, ...]``.
        window_size: (left, right), both inclusive; negative: no limit.
        max_segments_per_seq: of thd, a bound of the sequences in a row.
        context_parallel_causal_load_balanced, context_parallel_axis, context_parallel_strategy: of
            fused_attn().
        context_checkpoint_name: the name of the results for checkpoint policies.
        softmax_type: vanilla, off_by_one or learnable.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: Any = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"

    @nn.compact
    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        sequence_descriptor: Any = None,
        bias: Any = None,
        *,
        deterministic: bool = False,
        mask: Any = None,
    ) -> jax.Array:
        """O in the dtype of query. `mask` is a deprecated name of sequence_descriptor."""
        if mask is not None:
            if sequence_descriptor is not None:
                raise ValueError("mask is given; needs None: sequence_descriptor is given")
            warnings.warn("mask is deprecated; use sequence_descriptor", DeprecationWarning, 2)
            sequence_descriptor = mask
        layout = self._layout()
        unused = (None, None) if layout.is_qkvpacked() else (key, None)
        unused = (key, value) if layout.is_separate() else unused
        qkv = tuple(jnp.asarray(x) for x in (query, *unused) if x is not None)
        is_transposed = self._is_transposed()
        if is_transposed:
            qkv = tuple(x.swapaxes(0, 1) for x in qkv)
        arrays = given(qkv, layout)
        if self.dtype is not None:
            seen, needed = jnp.dtype(self.dtype).name, f"that of the inputs, {qkv[0].dtype.name}"
            require(jnp.dtype(self.dtype) == qkv[0].dtype, "dtype", seen, needed)
        kind = _bias_type(self.attn_bias_type, bias)
        bias = None if bias is None else jnp.asarray(bias, qkv[0].dtype)
        strategy = STRATEGIES.get(self.context_parallel_strategy.upper())
        needed = f"one of {', '.join(STRATEGIES)}"
        seen = repr(self.context_parallel_strategy)
        require(strategy is not None, "context_parallel_strategy", seen, needed)
        sizes = sizes_of(*arrays, layout)
        heads, groups = self.num_attention_heads, self.num_gqa_groups
        groups = heads if groups is None else groups
        for name, seen, needed in (
            ("heads of query", sizes.attn_heads, heads),
            ("heads of key", sizes.num_gqa_groups, groups),
            ("head dim of query", sizes.q_head_dim, self.head_dim),
        ):
            require(seen == needed, name, seen, str(needed))
        check_dropout("attention_dropout", self.attention_dropout)
        scale = self.scale_factor  # 0 is a scale
        options = {
            "attention_dropout": self.attention_dropout,
            "attn_mask_type": canonicalize_attn_mask_type(self.attn_mask_type),
            "attn_bias_type": kind,
            "softmax_type": AttnSoftmaxType.from_str(self.softmax_type),
            "dropout_rng_name": self.dropout_rng_name,
            "scale_factor": self.head_dim**-0.5 if scale is None else scale,
            "window_size": None if self.window_size is None else window_of(self.window_size),
        }
        if self._is_fused(qkv[0].dtype, layout, options, sizes, deterministic):
            fused = _FusedDotProductAttention(
                **options,
                qkv_layout=layout,
                max_segments_per_seq=self.max_segments_per_seq,
                context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
                context_parallel_axis=self.context_parallel_axis,
                context_parallel_strategy=strategy,
                context_checkpoint_name=self.context_checkpoint_name,
            )
            out = fused(qkv, sequence_descriptor, bias, deterministic)
            return out.swapaxes(0, 1) if is_transposed else out
        if layout.is_thd():
            refuse("qkv_layout", layout.name, "one of bshd: the fused way is not available")
        unfused = _UnfusedDotProductAttention(**options, float32_logits=self.float32_logits)
        q, k, v = separate(arrays, layout)
        out = unfused(q, k, v, sequence_descriptor, bias, deterministic)
        return out.swapaxes(0, 1) if is_transposed else out

    def _layout(self) -> QKVLayout:
        known = [member.name.lower() for member in QKVLayout]
        name = self.qkv_layout.lower()
        require(name in known, "qkv_layout", repr(self.qkv_layout), f"one of {', '.join(known)}")
        return QKVLayout[name.upper()]

    def _is_transposed(self) -> bool:
        if self.transpose_batch_sequence is None:
            warnings.warn("transpose_batch_sequence is None; False is taken", stacklevel=3)
        return bool(self.transpose_batch_sequence)

    def _is_fused(
        self,
        dtype: Any,
        layout: QKVLayout,
        options: dict,
        sizes: Any,
        deterministic: bool,
    ) -> bool:
        if not environment.switch("NVTE_FUSED_ATTN"):
            return False
        available = is_fused_attn_kernel_available(
            *(not deterministic, dtype, dtype, layout, options["attn_bias_type"]),
            *(options["attn_mask_type"], options["softmax_type"], self.attention_dropout),
            *(sizes.attn_heads, sizes.num_gqa_groups, sizes.q_max_seqlen, sizes.kv_max_seqlen),
            *(sizes.q_head_dim, sizes.v_head_dim, options["window_size"]),
        )
        if not available:
            warnings.warn(
                "Fused attention is not enabled because there is no available kernel. The unfused "
                "way is used, whose scores take memory of rows times keys.",
                stacklevel=3,
            )
        return available
