"""The environment variables of the Python packages: one table, and the only reads of os.environ.

The variables of the library itself, such as TE_ATTENTION_ENGINE, are in src/core/env.cpp.
docs/environment.md lists both tables.
"""

import os
from collections.abc import Callable

# Each variable with its default and its meaning. They are TransformerEngine's: the Python packages
# have none of their own.
VARIABLES: dict[str, tuple[str, str]] = {
    "NVTE_FLASH_ATTN": ("1", "0: FlashAttention is not selected"),
    "NVTE_FUSED_ATTN": ("1", "0: FusedAttention is not selected"),
    "NVTE_UNFUSED_ATTN": ("1", "0: UnfusedDotProductAttention is not selected"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("1", "0: attention is deterministic"),
    "NVTE_MASKED_SOFTMAX_FUSION": ("1", "0: FusedScaleMaskSoftmax uses PyTorch's functions"),
    "NVTE_APPLY_QK_LAYER_SCALING": ("0", "1: Unfused divides the scores by the layer number first"),
    "NVTE_FUSED_ATTN_USE_FAv2_BWD": ("0", "refused unless it is 0"),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("0", "1: scales are rounded to powers of two"),
    "NVTE_FP8_DPA_BWD": ("1", "0: the backward pass of FP8 attention runs in 16 bits"),
    "NVTE_DPA_FP8CS_O_in_F16": ("1", "0: current scaling saves O in FP8 for backward"),
    "NVTE_UnfusedDPA_Emulate_FP8": ("0", "1: Unfused rounds to FP8 where the others compute in it"),
    "NVTE_DPA_FP8_RECIPE": ("", "the recipe of DotProductAttention, instead of autocast's"),
    "NVTE_DPA_FP8_FORMAT": ("HYBRID", "HYBRID or E4M3: its formats"),
    "NVTE_DPA_FP8DS_AMAX_ALGO": ("most_recent", "max or most_recent: its amax"),
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": ("1", "the length of its amax history"),
    "NVTE_DPA_FP8DS_REDUCE_AMAX": ("1", "0: its amaxes are not reduced over the group"),
    "NVTE_DEBUG": ("0", "1: the selection of backends is logged, at NVTE_DEBUG_LEVEL"),
    "NVTE_DEBUG_LEVEL": ("0", "0: warnings; 1: also choices; 2: also their reasons"),
}
_PREFIXES = ("TE_ATTENTION_", "NVTE_")


def read(variable: str) -> str:
    """The current value of a variable of the table, or its default. KeyError for other names."""
    default, _ = VARIABLES[variable]
    return os.environ.get(variable, default)


def switch(variable: str) -> bool:
    """Whether a variable whose values are 0 and 1 is 1. Empty means the default."""
    text = read(variable) or VARIABLES[variable][0]
    if text not in ("0", "1"):
        raise ValueError(f"{variable} is {text!r}; needs 0 or 1")
    return text == "1"


def number(variable: str) -> int:
    """The value of a variable that is a number, 0 or more. Empty means the default."""
    text = (read(variable) or VARIABLES[variable][0]).strip()
    if not text.isdecimal():
        raise ValueError(f"{variable} is {text!r}; needs a number")
    return int(text)


def reader(*variables: str) -> Callable[[], tuple]:
    """A function that returns the raw values of variables, to notice a change of any.

    It takes 0.3 microseconds for five, where os.environ.get() would take 3: it reads the mapping
    behind os.environ, whose keys are encoded. Variables that the table lacks may be given.
    """
    raw, names = os.environ._data, tuple(map(os.environ.encodekey, variables))
    return lambda: tuple(map(raw.get, names))


def variables_set() -> dict[str, str]:
    """The variables of TE Attention and TransformerEngine that are set, for bug reports."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIXES)}
