"""Values of enums are ABI: they are compared with the C headers of the same interface."""

import re
from pathlib import Path

import pytest

import transformer_engine_torch as tex

INCLUDE = Path(__file__).parents[4] / "include" / "transformer_engine"


def declared(header: str, enum: str) -> dict[str, int]:
    """The members of an enum of a header, which all have values."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (INCLUDE / header).read_text(), flags=re.DOTALL)
    body = re.search(rf"enum {enum} *{{(.*?)}}", text, re.DOTALL).group(1)
    return {name: int(value) for name, value in re.findall(r"(\w+) *= *(-?\d+)", body)}


@pytest.mark.parametrize(
    "enum",
    [
        tex.NVTE_QKV_Layout,
        tex.NVTE_QKV_Format,
        tex.NVTE_Bias_Type,
        tex.NVTE_Mask_Type,
        tex.NVTE_Softmax_Type,
        tex.NVTE_Fused_Attn_Backend,
    ],
)
def test_the_enums_of_attention_are_those_of_the_header(enum: type) -> None:
    assert {member.name: member.value for member in enum} == declared("fused_attn.h", enum.__name__)


def test_dtypes_are_those_of_the_header() -> None:
    want = declared("transformer_engine.h", "NVTEDType")
    for member in tex.DType:
        assert want[member.name.replace("k", "kNVTE", 1)] == member.value


def test_fp8_tensors_index_lists() -> None:
    assert list(range(9))[tex.FP8FwdTensors.GEMM3_OUTPUT] == 8
    assert list(range(6))[tex.FP8BwdTensors.GRAD_INPUT3] == 5
