"""The constants: dtypes both ways, and the names of options."""

import torch

import transformer_engine
import transformer_engine_torch as tex
from transformer_engine.pytorch import constants


def test_dtypes_map_both_ways() -> None:
    assert constants.TE_DType[torch.bfloat16] == tex.DType.kBFloat16
    for dtype, number in constants.TE_DType.items():
        assert constants.TE_DType_To_Torch[number] == dtype


def test_names() -> None:
    assert len(constants.QKVLayouts) == 25
    assert constants.QKVLayouts[1] == "sbh3d"
    assert "arbitrary" in constants.AttnMaskTypes
    assert constants.AttnTypes == ("self", "cross")


def test_the_version_says_whose_interface_and_whose_code() -> None:
    assert transformer_engine.__version__.startswith("2.13.0+te.attention.")
