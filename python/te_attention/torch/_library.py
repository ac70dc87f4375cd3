"""Loads the operators: schemas here, kernels from libte_attention_torch.so."""

import torch

from te_attention import _library as core
from te_attention.torch import _schemas

MINIMUM = (2, 10)


def _check_torch() -> None:
    version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM:
        raise ImportError(f"te_attention.torch: torch is {torch.__version__}; needs 2.10 or later")


def _check_built() -> None:
    if not (core.FOLDER / "libte_attention_torch.so").exists():
        raise ImportError(
            "te_attention.torch: libte_attention_torch.so is not part of this build; "
            "needs torch 2.10 or later installed when the package is built"
        )


_check_torch()
_check_built()
core.library()  # first, so that the operators find it
LIBRARY = torch.library.Library(_schemas.NAMESPACE, "DEF")
_schemas.define(LIBRARY)
torch.ops.load_library(str(core.FOLDER / "libte_attention_torch.so"))
OPS = torch.ops.te_attention
