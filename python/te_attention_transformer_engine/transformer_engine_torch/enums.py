"""The enums of transformer_engine_torch. Their names and values are TransformerEngine's."""

from enum import IntEnum

from te_attention.torch.fp8 import DType


def _counted(name: str, prefix: str, members: str) -> type[IntEnum]:
    """An enum with members numbered from 0."""
    names = [prefix + member for member in members.split()]
    return IntEnum(name, {member: i for i, member in enumerate(names)}, module=__name__)


NVTE_QKV_Layout = _counted(
    "NVTE_QKV_Layout",
    "NVTE_",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD "
    "BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD "
    "SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD "
    "Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD",
)
NVTE_QKV_Format = _counted(
    "NVTE_QKV_Format", "NVTE_", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD"
)
NVTE_Bias_Type = _counted("NVTE_Bias_Type", "NVTE_", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")
NVTE_Mask_Type = _counted(
    "NVTE_Mask_Type",
    "NVTE_",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _counted(
    "NVTE_Softmax_Type", "NVTE_", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX"
)
NVTE_Fused_Attn_Backend = IntEnum(
    "NVTE_Fused_Attn_Backend",
    {
        "NVTE_No_Backend": -1,
        "NVTE_F16_max512_seqlen": 0,
        "NVTE_F16_arbitrary_seqlen": 1,
        "NVTE_FP8": 2,
    },
    module=__name__,
)
FP8FwdTensors = _counted(
    "FP8FwdTensors",
    "",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _counted(
    "FP8BwdTensors",
    "",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)

__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]
