"""The options of attention, as the extension's table (src/frontend/options.def) has them."""

import ast
import ctypes
import sys
from typing import NamedTuple

import torch

from te_attention import _library as core

MINIMUM = (2, 10)
PATH = core.FOLDER / "libte_attention_torch.so"


class Option(NamedTuple):
    """An option; `type` is PyTorch's name of it in schemas."""

    type: str
    name: str
    default: object

    @property
    def is_tensor(self) -> bool:
        """Whether its value is a tensor or None."""
        return self.type.startswith("Tensor")


def _check_torch() -> None:
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM:
        raise ImportError(f"te_attention.torch: torch is {torch.__version__}; needs 2.10 or later")


def _check_built() -> None:
    if not PATH.exists():
        raise ImportError(
            f"te_attention.torch: {PATH.name} is not part of this build; "
            "needs torch 2.10 or later installed when the package is built"
        )


def _read_schema() -> str:
    read = ctypes.CDLL(str(PATH)).te_attention_torch_options
    read.restype = ctypes.c_char_p
    return read().decode()


def _parse(argument: str) -> Option:
    kind, _, rest = argument.partition(" ")
    name, _, text = rest.partition("=")
    default = ast.literal_eval(text) if text else None
    if isinstance(default, str):
        default = sys.intern(default)  # trimmed() compares defaults by identity
    return Option(kind, name, default)


_check_torch()
_check_built()
core.library()  # first: the extension links against it

SCHEMA = _read_schema()
OPTIONS = tuple(map(_parse, SCHEMA.split(", ")))
NAMES = tuple(option.name for option in OPTIONS)
# Operators with the first arguments alone are faster: PyTorch looks for each default by its name.
MINIMAL = NAMES.index("scale") + 1
MINIMAL_SCHEMA = ", ".join(SCHEMA.split(", ")[:MINIMAL])
