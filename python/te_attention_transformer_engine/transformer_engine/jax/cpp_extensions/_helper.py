"""Which backend a call has, and the sizes of its arrays."""

from dataclasses import astuple, dataclass
from typing import Any

import transformer_engine_jax as tex
from te_attention import environment
from transformer_engine.jax._arrays import Sizes, sizes_of
from transformer_engine.jax._enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from transformer_engine.jax.cpp_extensions.misc import jax_dtype_to_te_dtype


@dataclass(frozen=True)
class FusedAttnHelper:
    """The options of a call by which a backend is chosen."""

    is_training: bool
    q_dtype: Any
    kv_dtype: Any
    qkv_layout: QKVLayout
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    dropout_probability: float
    q_num_heads: int
    kv_num_heads: int
    q_max_seqlen: int
    kv_max_seqlen: int
    head_dim_qk: int
    head_dim_v: int
    window_size: tuple[int, int]

    def is_fused_attn_kernel_available(self) -> bool:
        """Whether an engine of the library takes the call."""
        return self.get_fused_attn_backend() != tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend

    def get_fused_attn_backend(self) -> tex.NVTE_Fused_Attn_Backend:
        """The backend of the call; NVTE_No_Backend if there is none."""
        dtypes = [jax_dtype_to_te_dtype(x) for x in (self.q_dtype, self.kv_dtype)]
        kinds = (self.qkv_layout, self.attn_bias_type, self.attn_mask_type, self.softmax_type)
        return tex.get_fused_attn_backend(
            self.is_training,
            *dtypes,
            *(kind.value for kind in kinds),
            *astuple(self)[7:14],
            *((-1, -1) if self.window_size is None else self.window_size),
            not self.is_non_deterministic_allowed(),
        )

    @staticmethod
    def is_non_deterministic_allowed() -> bool:
        """Whether sums may have any order: NVTE_ALLOW_NONDETERMINISTIC_ALGO, 1 unless set."""
        return environment.switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO")

    @staticmethod
    def parse_qkv_aval(q_aval: Any, k_aval: Any, v_aval: Any, qkv_layout: QKVLayout) -> Sizes:
        """Batch shape, rows, keys, heads, groups and both head dims, checked."""
        return sizes_of(q_aval, k_aval, v_aval, qkv_layout)


def is_fused_attn_kernel_available(
    is_training: bool,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: QKVLayout,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    softmax_type: AttnSoftmaxType,
    dropout_probability: float,
    q_num_heads: int,
    kv_num_heads: int,
    q_max_seqlen: int,
    kv_max_seqlen: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size: tuple[int, int] | None = None,
) -> bool:
    """Whether an engine of the library takes a call with these options."""
    return FusedAttnHelper(
        *(is_training, q_dtype, kv_dtype, qkv_layout, attn_bias_type, attn_mask_type),
        *(softmax_type, dropout_probability, q_num_heads, kv_num_heads),
        *(q_max_seqlen, kv_max_seqlen, head_dim_qk, head_dim_v),
        (-1, -1) if window_size is None else window_size,
    ).is_fused_attn_kernel_available()
