"""The selector: what it accepts, what it declines, and what it refuses to be asked."""

import os

import pytest

import transformer_engine_torch as tex

DENSE = tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
THD = tex.NVTE_QKV_Layout.NVTE_THD_THD_THD
PAGED = tex.NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD
BIASES, MASKS = tuple(tex.NVTE_Bias_Type), tuple(tex.NVTE_Mask_Type)
SOFTMAXES = tuple(tex.NVTE_Softmax_Type)
F16 = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
NONE = tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend


def backend(**changes: object) -> tex.NVTE_Fused_Attn_Backend:
    fields = {
        "is_training": True,
        "q_dtype": tex.DType.kBFloat16,
        "kv_dtype": tex.DType.kBFloat16,
        "layout": DENSE,
        "bias": BIASES[0],
        "mask": MASKS[2],
        "softmax": SOFTMAXES[0],
        "dropout": 0.0,
        "heads": 16,
        "groups": 4,
        "max_q": 128,
        "max_kv": 256,
        "dim_qk": 64,
        "dim_v": 64,
        "left": -1,
        "right": 0,
        "max_logit": False,
        "cuda_graph": False,
        "deterministic": False,
    }
    assert not changes.keys() - fields.keys()
    return tex.get_fused_attn_backend(*{**fields, **changes}.values())


@pytest.mark.skipif("NVTE_FUSED_ATTN_BACKEND" in os.environ, reason="it decides the answer")
def test_the_selector_accepts_what_runs() -> None:
    assert backend() == F16
    assert backend(bias=BIASES[1], dropout=0.5, deterministic=True) == F16
    assert backend(layout=THD, mask=MASKS[3], left=4, right=4, softmax=SOFTMAXES[2]) == F16
    assert backend(is_training=False, layout=PAGED, mask=MASKS[5], dim_qk=512) == F16


def test_ragged_and_paged_sides_need_no_padding_mask() -> None:
    for mask in (MASKS[0], MASKS[2], MASKS[4]):
        assert backend(layout=THD, mask=mask) == F16
        assert backend(is_training=False, layout=PAGED, mask=mask) == F16


def test_the_selector_says_no_where_the_call_would() -> None:
    assert backend(layout=PAGED, mask=MASKS[1]) == NONE  # pages in training
    assert backend(dim_qk=60) == NONE
    assert backend(groups=3) == NONE
    assert backend(left=-2) == NONE
    assert int(NONE) == -1


@pytest.mark.parametrize("dtype", [tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2])
def test_fp8_is_a_backend_of_its_own(dtype: tex.DType) -> None:
    fp8 = {"q_dtype": dtype, "kv_dtype": dtype}
    found = tex.NVTE_Fused_Attn_Backend.NVTE_FP8
    for more in ({}, {"mask": MASKS[3]}, {"layout": THD, "mask": MASKS[1]}, {"left": 5}):
        assert backend(**fp8, **more) == found
    assert backend(**fp8, max_logit=True) == NONE
    assert backend(**fp8, dim_qk=60) == NONE


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_dtype": tex.DType.kFloat16}, "kv_dtype is kFloat16; needs q_dtype, kBFloat16"),
        ({"heads": -1}, r"the head counts, lengths and head dims are \[-1, 4, .*; need 0 to"),
        ({"mask": 9}, "9 is not a valid NVTE_Mask_Type"),
    ],
)
def test_what_the_selector_refuses(changes: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        backend(**changes)


def test_the_version_of_cudnn_passes_every_rule() -> None:
    assert tex.get_cudnn_version() >= 91801
