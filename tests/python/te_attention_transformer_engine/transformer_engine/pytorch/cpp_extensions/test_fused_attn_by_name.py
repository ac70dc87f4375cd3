"""Fused attention with its options as strings: tables, defaults, and what is returned."""

import pytest
import torch

import transformer_engine_torch as tex
from te_attention import torch as tea
from transformer_engine.pytorch import cpp_extensions as ext
from transformer_engine.pytorch.cpp_extensions import fused_attn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F16 = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
CU = torch.tensor([0, 33, 66], dtype=torch.int32)


def inputs(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    return [torch.randn(2, 33, heads, 64, **options) for heads in (4, 2, 2)]


def forward(q, k, v, **options) -> tuple:
    cu = CU.to(q.device)
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal", **options}
    return fused_attn.fused_attn_fwd(True, 33, 33, cu, cu, q, k, v, q.dtype, F16, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_attention(device: str) -> None:
    q, k, v = (t.requires_grad_() for t in inputs(device))
    want = tea.attention(q, k, v, format="bshd", mask="causal", window=(9, None), return_lse=True)
    dout = torch.randn_like(want[0])
    gradients = torch.autograd.grad(want[0], (q, k, v), dout)
    with torch.no_grad():
        o, aux = forward(q, k, v, window_size=(9, 0))
        cu = CU.to(device)
        got = ext.fused_attn_bwd(
            *(33, 33, cu, cu, q, k, v, o, dout, q.dtype, tex.DType.kBFloat16, aux, F16),
            qkv_layout="bshd_bshd_bshd",
            attn_mask_type="causal",
            window_size=(9, 0),
            deterministic=True,
        )
    assert torch.equal(o, want[0])
    assert torch.equal(aux[0], want[1].unsqueeze(-1))
    assert got[3:] == [None, None]
    for a, b in zip(got[:3], gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ragged", [False, True])
def test_max_logit_leaves_the_lse_for_backward(ragged: bool, device: str) -> None:
    q, k, v = inputs(device)
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "padding_causal"}
    if ragged:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        options["qkv_layout"] = "thd_thd_thd"
    o, aux, largest = forward(q, k, v, return_max_logit=True, **options)
    plain, aux_plain = forward(q, k, v, **options)
    assert torch.equal(o, plain)
    assert torch.equal(aux[0], aux_plain[0])
    assert len(aux) == len(aux_plain)
    shape = (2, 33, 4, 64)
    scores = torch.einsum("bqhd,bkhd->hbqk", q.view(shape).double(), _repeated(k).double()) / 8
    visible = torch.ones(33, 33, dtype=torch.bool, device=device).tril()
    want = scores.masked_fill(~visible, -torch.inf).amax((1, 2, 3))
    assert (largest.shape, largest.dtype) == ((4,), torch.bfloat16)
    torch.testing.assert_close(largest.double(), want, atol=0, rtol=1e-2)


def _repeated(k: torch.Tensor) -> torch.Tensor:
    return k.view(2, 33, 2, 64).repeat_interleave(2, dim=2)


def test_the_default_scale_and_diagonal() -> None:
    q, k, v = inputs("cpu")
    k, v = k[:, :20].contiguous(), v[:, :20].contiguous()
    cu, cu_kv = CU, torch.tensor([0, 20, 40], dtype=torch.int32)
    o, _ = ext.fused_attn_fwd(
        *(False, 33, 20, cu, cu_kv, q, k, v, q.dtype, F16),
        qkv_layout="bshd_bshd_bshd",
        attn_mask_type="causal_bottom_right",
    )
    want = tea.attention(q, k, v, format="bshd", mask="causal_bottom_right")
    assert torch.equal(o, want)


def test_tables() -> None:
    assert fused_attn.QKVLayout["sbh3d"] == tex.NVTE_QKV_Layout.NVTE_SBH3D
    assert fused_attn.QKVLayout["paged_kv_thd_bshd_bshd"] == 23
    assert fused_attn.QKVFormat["thd_2bshd"] == tex.NVTE_QKV_Format.NVTE_THD_2BSHD
    assert set(fused_attn.AttnBiasType) == {
        "no_bias",
        "pre_scale_bias",
        "post_scale_bias",
        "alibi",
    }
    assert set(fused_attn.AttnMaskType) == {
        "no_mask",
        "padding",
        "causal",
        "padding_causal",
        "causal_bottom_right",
        "padding_causal_bottom_right",
    }
    assert set(fused_attn.SoftmaxType) == {"vanilla", "off-by-one", "learnable"}
    assert set(fused_attn.FusedAttnBackend) == {
        "F16_max512_seqlen",
        "F16_arbitrary_seqlen",
        "FP8",
        "No_Backend",
    }
    indices = ("QKV", "O", "S", "DQKV", "DO", "DP")
    assert [int(getattr(fused_attn, f"META_{name}")) for name in indices] == [2, 3, 8, 0, 3, 5]
    assert fused_attn.__all__ == ["fused_attn_bwd", "fused_attn_fwd"]


def test_the_package_has_every_name_of_the_extension_module() -> None:
    for name in tex.__all__:
        assert hasattr(ext, name)
    assert ext.fused_attn_fwd is fused_attn.fused_attn_fwd
    assert not hasattr(ext, "META_QKV")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"attn_bias_type": "post_scale_bias"}, ValueError, "attn_bias is None; needs a tensor of"),
        ({"attn_mask_type": "arbitrary"}, KeyError, "^attn_mask_type is 'arbitrary'; needs"),
        ({"attn_mask_type": "arbitrary"}, ValueError, "attn_mask_type is 'arbitrary'; needs one"),
        ({"attn_bias_type": "x"}, ValueError, "attn_bias_type is 'x'; needs one of no_bias, pre"),
        ({"softmax_type": "x"}, ValueError, "softmax_type is 'x'; needs one of vanilla, off-by-"),
        ({"qkv_layout": "x"}, ValueError, "qkv_layout is 'x'; needs one of sb3hd, sbh3d, sbhd_"),
        ({"window_size": 3}, ValueError, r"window_size is 3; needs \(left, right\), two"),
        ({"window_size": (1,)}, ValueError, r"window_size is \(1,\); needs \(left, right\)"),
        ({"bottom_right_diagonal": "x"}, ValueError, "bottom_right_diagonal is 'x'; needs None"),
        ({"dropout": -0.1}, RuntimeError, "dropout is -0.1; needs at least 0 and below 1"),
        ({"dropout": float("nan")}, RuntimeError, "dropout is nan; needs at least 0 and below 1"),
        ({"s_quantizer": 1}, ValueError, "s_quantizer is a int; needs None"),
    ],
)
def test_what_is_refused(options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        forward(*inputs("cpu"), **options)


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("FP8", ValueError, "fused_attention_backend is .*FP8.*; needs one of F16 without FP8"),
        ("No_Backend", ValueError, "fused_attention_backend is .*No_Backend.*; needs F16_max512"),
    ],
)
def test_backends_that_are_refused(name: str, error: type, text: str) -> None:
    q, k, v = inputs("cpu")
    backend = fused_attn.FusedAttnBackend[name]
    with pytest.raises(error, match=text):
        fused_attn.fused_attn_fwd(True, 33, 33, CU, CU, q, k, v, q.dtype, backend)
