"""Recipes: how scales of FP8 tensors are chosen. Names and defaults are TransformerEngine's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from te_attention import environment


class FormatMaxValues(NamedTuple):
    """The largest finite numbers of the formats of the forward and the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """The formats of tensors. HYBRID: E4M3 in the forward pass, E5M2 for gradients."""

    E2M1 = FormatMaxValues(6, 6)
    E4M3 = FormatMaxValues(448, 448)
    E5M2 = FormatMaxValues(57344, 57344)
    HYBRID = FormatMaxValues(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """Options of matrix products, which attention does not read."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Options of a cast: scales rounded to powers of two, and the least amax."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """The base class of recipes. Its predicates tell which one it is."""

    def nvfp4(self) -> bool:
        """Whether it is NVFP4BlockScaling."""
        return isinstance(self, NVFP4BlockScaling)

    def mxfp8(self) -> bool:
        """Whether it is MXFP8BlockScaling."""
        return isinstance(self, MXFP8BlockScaling)

    def delayed(self) -> bool:
        """Whether it is DelayedScaling."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether it is Float8CurrentScaling."""
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        """Whether each tensor has one scale."""
        return isinstance(self, (DelayedScaling, Float8CurrentScaling))

    def float8_block_scaling(self) -> bool:
        """Whether it is Float8BlockScaling."""
        return isinstance(self, Float8BlockScaling)

    def custom(self) -> bool:
        """Whether it is CustomRecipe."""
        return isinstance(self, CustomRecipe)


def _check_format(fp8_format: Format) -> None:
    name = getattr(fp8_format, "name", None)
    if name not in ("E4M3", "HYBRID"):
        seen = repr(fp8_format) if name is None else name
        raise AssertionError(f"fp8_format is {seen}; needs E4M3 or HYBRID")


@dataclass()
class DelayedScaling(Recipe):
    """Scales from a history of amaxes: largest / amax / 2**margin.

    Args:
        margin: see above.
        fp8_format: HYBRID or E4M3.
        amax_history_len: iterations that the history holds.
        amax_compute_algo: "max" of the history, or "most_recent".
        scaling_factor_compute_algo: None; a function of one's own is refused.
        reduce_amax: whether the amax is the largest of all ranks of the group of autocast().
        fp8_dpa: whether DotProductAttention runs in FP8.
        fp8_mha: the same, with FP8 tensors as its inputs and output.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        """Refuses what no state of scales can do."""
        _check_format(self.fp8_format)
        length = self.amax_history_len
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"amax_history_len is {length!r}; needs an integer from 1")
        if not isinstance(self.margin, (int, float)):
            raise ValueError(f"margin is {self.margin!r}; needs a number")
        if self.amax_compute_algo not in ("max", "most_recent"):
            seen = self.amax_compute_algo
            raise ValueError(f"amax_compute_algo is {seen!r}; needs 'max' or 'most_recent'")
        if self.scaling_factor_compute_algo is not None:
            raise ValueError("scaling_factor_compute_algo is a function; needs None")

    def __repr__(self) -> str:
        """A key that distinguishes recipes whose amaxes are reduced together."""
        return (
            f"recipe_type={type(self).__name__}, margin={self.margin}, "
            f"format={self.fp8_format.name}, amax_history_len={self.amax_history_len}, "
            f"reduce_amax={self.reduce_amax}, fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}"
        )


def _power_2_scales() -> bool:
    return environment.switch("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")


def _current_params() -> QParams:
    return QParams(power_2_scale=_power_2_scales())


@dataclass()
class Float8CurrentScaling(Recipe):
    """Scales from the tensor itself: largest / amax, in one more pass over it.

    Args:
        use_power_2_scales: rounds scales down to powers of two. Default:
            NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES in the environment.
        fp8_format: HYBRID or E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: options of the casts.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: not read by attention.
        fp8_dpa, fp8_mha: as in DelayedScaling.
    """

    use_power_2_scales: bool = field(default_factory=_power_2_scales)
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = field(default_factory=_current_params)
    fp8_quant_fwd_weight: QParams = field(default_factory=_current_params)
    fp8_quant_bwd_grad: QParams = field(default_factory=_current_params)
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        """Refuses E5M2 alone."""
        _check_format(self.fp8_format)


@dataclass()
class MXFP8BlockScaling(Recipe):
    """Scales for blocks of 32 elements. Constructs; DotProductAttention refuses it in FP8."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass()
class Float8BlockScaling(Recipe):
    """Scales for tiles of 128. Constructs; DotProductAttention refuses it in FP8."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass()
class NVFP4BlockScaling(Recipe):
    """Four bits with scales for blocks. Constructs; DotProductAttention refuses it in FP8."""

    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass()
class CustomRecipe(Recipe):
    """Quantizers from a function. Constructs; DotProductAttention refuses it in FP8."""

    qfactory: Callable[..., Any] | None = None
    fp8_dpa: bool = False
    fp8_mha: bool = False
