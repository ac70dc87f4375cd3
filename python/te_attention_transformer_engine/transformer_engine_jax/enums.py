"""The enums of transformer_engine_jax, with TransformerEngine's values for JAX."""

from enum import IntEnum


def _enum(name: str, prefix: str = "NVTE_", **members: int) -> type[IntEnum]:
    return IntEnum(name, {prefix + key: n for key, n in members.items()}, module=__name__)


DType = _enum(
    "DType",
    "k",
    **{"Byte": 0, "Int32": 2, "Int64": 3, "Float32": 4, "Float16": 5, "BFloat16": 6},
    **{"Float8E4M3": 7, "Float8E5M2": 8, "Float8E8M0": 9, "Float4E2M1": 10},
)
NVTE_Bias_Type = _enum("NVTE_Bias_Type", NO_BIAS=0, PRE_SCALE_BIAS=1, POST_SCALE_BIAS=2)
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    **{"NO_MASK": 0, "PADDING_MASK": 1, "CAUSAL_MASK": 2, "PADDING_CAUSAL_MASK": 3},
    **{"CAUSAL_BOTTOM_RIGHT_MASK": 4, "PADDING_CAUSAL_BOTTOM_RIGHT_MASK": 5},
)
NVTE_Softmax_Type = _enum(
    "NVTE_Softmax_Type", VANILLA_SOFTMAX=0, OFF_BY_ONE_SOFTMAX=1, LEARNABLE_SOFTMAX=2
)
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    **{"BS3HD": 5, "BSHD_BS2HD": 7, "BSHD_BSHD_BSHD": 9},
    **{"T3HD": 10, "THD_T2HD": 12, "THD_THD_THD": 14},
)
NVTE_QKV_Format = _enum("NVTE_QKV_Format", SBHD=0, BSHD=1, THD=2)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend",
    **{"No_Backend": -1, "F16_max512_seqlen": 0, "F16_arbitrary_seqlen": 1, "FP8": 2},
)
