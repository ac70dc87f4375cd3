"""The layouts, parsed from their names."""

import pytest
import torch

import transformer_engine_torch as tex
from transformer_engine_torch.layouts import Layout, layout_of

EXPECTED = {
    "NVTE_SB3HD": Layout("sbhd", "sbhd", 3, -3, False),
    "NVTE_BSH3D": Layout("bshd", "bshd", 3, -2, False),
    "NVTE_THD_T2HD": Layout("thd", "thd", 2, -3, False),
    "NVTE_SBHD_SBH2D": Layout("sbhd", "sbhd", 2, -2, False),
    "NVTE_BSHD_SBHD_SBHD": Layout("bshd", "sbhd", 1, 0, False),
    "NVTE_Paged_KV_THD_SBHD_SBHD": Layout("thd", "sbhd", 1, 0, True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_names(name: str) -> None:
    assert layout_of(tex.NVTE_QKV_Layout[name]) == EXPECTED[name]


def test_a_number_that_is_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 is not a valid NVTE_QKV_Layout"):
        layout_of(-1)


def test_gradients_lie_as_the_inputs_do() -> None:
    q, k, v = torch.empty(7, 2, 4, 8), torch.empty(7, 2, 2, 8), torch.empty(7, 2, 2, 8)
    dq, dk, dv = layout_of(tex.NVTE_QKV_Layout.NVTE_SBHD_SBH2D).new_gradients(q, k, v)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert dk.stride() == (2 * 2 * 2 * 8, 2 * 2 * 8, 2 * 8, 1)
    assert dv.data_ptr() - dk.data_ptr() == 8 * dv.element_size()
