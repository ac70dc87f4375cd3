"""The enums of attention. Values are members of the enums of transformer_engine_jax."""

from enum import Enum

from transformer_engine._refusal import RefusedError
from transformer_engine_jax import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
    nvte_get_qkv_format,
)

MASKS = {
    "no_mask": "NO_MASK",
    "padding": "PADDING_MASK",
    "causal": "CAUSAL_MASK",
    **dict.fromkeys(("causal_bottom_right", "bottom_right_causal"), "CAUSAL_BOTTOM_RIGHT_MASK"),
    **dict.fromkeys(("padding_causal", "causal_padding"), "PADDING_CAUSAL_MASK"),
    **dict.fromkeys(
        (
            "padding_causal_bottom_right",
            "causal_padding_bottom_right",
            "bottom_right_causal_padding",
            "bottom_right_padding_causal",
        ),
        "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
}


class AttnBiasType(Enum):
    """Where the bias is added: before or after the scale."""

    NO_BIAS = NVTE_Bias_Type.NVTE_NO_BIAS
    PRE_SCALE_BIAS = NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS
    POST_SCALE_BIAS = NVTE_Bias_Type.NVTE_POST_SCALE_BIAS


class AttnMaskType(Enum):
    """Which scores are masked."""

    NO_MASK = NVTE_Mask_Type.NVTE_NO_MASK
    PADDING_MASK = NVTE_Mask_Type.NVTE_PADDING_MASK
    CAUSAL_MASK = NVTE_Mask_Type.NVTE_CAUSAL_MASK
    PADDING_CAUSAL_MASK = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
    CAUSAL_BOTTOM_RIGHT_MASK = NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK

    def is_causal(self) -> bool:
        """Whether the mask has a diagonal."""
        return "CAUSAL" in self.name

    def is_padding(self) -> bool:
        """Whether sequences have lengths."""
        return "PADDING" in self.name

    def is_bottom_right(self) -> bool:
        """Whether the diagonal ends in the last row and the last key."""
        return "BOTTOM_RIGHT" in self.name


class AttnSoftmaxType(Enum):
    """The term in the softmax's denominator that has no key: none, 1, or a learnable one."""

    VANILLA_SOFTMAX = NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    OFF_BY_ONE_SOFTMAX = NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX
    LEARNABLE_SOFTMAX = NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX

    @classmethod
    def from_str(cls, softmax_type: str) -> "AttnSoftmaxType":
        """The member of one of the names vanilla, off_by_one and learnable."""
        names = {member.name.removesuffix("_SOFTMAX").lower(): member for member in cls}
        if softmax_type not in names:
            raise ValueError(f"softmax_type is {softmax_type!r}; needs one of {', '.join(names)}")
        return names[softmax_type]


class QKVFormat(Enum):
    """The order of dimensions."""

    SBHD = NVTE_QKV_Format.NVTE_SBHD
    BSHD = NVTE_QKV_Format.NVTE_BSHD
    THD = NVTE_QKV_Format.NVTE_THD


class QKVLayout(Enum):
    """The order of dimensions, and which of Q, K and V are packed in one array."""

    BS3HD = NVTE_QKV_Layout.NVTE_BS3HD
    BSHD_BS2HD = NVTE_QKV_Layout.NVTE_BSHD_BS2HD
    BSHD_BSHD_BSHD = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    T3HD = NVTE_QKV_Layout.NVTE_T3HD
    THD_T2HD = NVTE_QKV_Layout.NVTE_THD_T2HD
    THD_THD_THD = NVTE_QKV_Layout.NVTE_THD_THD_THD

    def get_qkv_format(self) -> QKVFormat:
        """BSHD or THD."""
        return QKVFormat(nvte_get_qkv_format(self.value))

    def is_qkvpacked(self) -> bool:
        """Whether the three are one array."""
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        """Whether K and V are one array."""
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)

    def is_separate(self) -> bool:
        """Whether the three are arrays of their own."""
        return self in (QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD)

    def is_thd(self) -> bool:
        """Whether a row has several sequences."""
        return self.get_qkv_format() == QKVFormat.THD

    def to_qkvpacked(self) -> "QKVLayout":
        """The layout of this format with the three in one array."""
        return QKVLayout.T3HD if self.is_thd() else QKVLayout.BS3HD

    def to_kvpacked(self) -> "QKVLayout":
        """The layout of this format with K and V in one array."""
        return QKVLayout.THD_T2HD if self.is_thd() else QKVLayout.BSHD_BS2HD

    def to_separate(self) -> "QKVLayout":
        """The layout of this format with three arrays."""
        return QKVLayout.THD_THD_THD if self.is_thd() else QKVLayout.BSHD_BSHD_BSHD


class CPStrategy(Enum):
    """How context parallelism moves K and V. DEFAULT is ALL_GATHER."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


class ReorderStrategy(Enum):
    """In which order tokens are distributed, so that every rank has as much work under causality.

    DualChunkSwap: rank r of n has the chunks r and 2n - 1 - r of 2n. Striped: rank r has every
    n-th stripe, from the r-th on.
    """

    DualChunkSwap = 0
    Striped = 1


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """The member of a name, whose parts may be in another order."""
    if attn_mask_type not in MASKS:
        raise ValueError(f"attn_mask_type is {attn_mask_type!r}; needs one of {', '.join(MASKS)}")
    return AttnMaskType[MASKS[attn_mask_type]]


def require_enum(name: str, value: object, kind: type[Enum]) -> None:
    """Refuses what is no member of that enum."""
    if not isinstance(value, kind):
        raise RefusedError(f"{name} is {value!r}; needs a member of {kind.__name__}")
