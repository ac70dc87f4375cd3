"""Every operator has a schema, a kernel for both devices and a fake implementation."""

import subprocess

import pytest
import torch

from te_attention import _library as core
from te_attention.torch import functional
from te_attention.torch._arguments import Arguments, trimmed
from te_attention.torch._library import OPS
from te_attention.torch._schemas import SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_kernels_are_there(name: str) -> None:
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"te_attention::{name}", key)


@pytest.mark.parametrize("name", [n for n in SCHEMAS if n != "explain"])
def test_fakes_are_there(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"te_attention::{name}", "Meta")


def test_arguments_are_those_of_the_schema() -> None:
    schema = OPS.forward.default._schema.arguments
    assert tuple(a.name for a in schema) == Arguments._fields
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    assert defaults == Arguments._field_defaults


def test_trimming_leaves_what_differs_from_the_defaults() -> None:
    q = torch.zeros(1)
    assert len(trimmed(Arguments(q, q, q))) == 3
    assert trimmed(Arguments(q, q, q, mask="causal"))[3:] == ("bhsd", "causal")


def test_what_attention_passes_is_trimmed() -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert len(trimmed(functional.describe(q, q, q, softcap=0.0, dropout=0.0))) == 3
    assert len(trimmed(functional.describe(q, q, q, mask="causal"))) == 5


def test_the_library_needs_neither_python_nor_the_classes_of_torch() -> None:
    path = core.FOLDER / "libte_attention_torch.so"
    done = subprocess.run(
        ["nm", "-DC", "--undefined-only", path], capture_output=True, text=True, check=True
    )
    names = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()]
    assert any("torch_library_impl" in name for name in names)
    assert not [n for n in names if n.startswith("Py") or "at::" in n or "c10::" in n]
