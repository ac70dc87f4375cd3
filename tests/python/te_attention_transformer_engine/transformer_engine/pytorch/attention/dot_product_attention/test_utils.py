"""The description of a call: layouts, masks, lengths, and the rules that choose a backend."""

import logging
import subprocess
import sys

import pytest
import torch
from packaging.version import Version

import transformer_engine_torch as tex
from dpa import BACKENDS, LAYOUTS, laid_out, only
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import _selection, utils
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    FlashAttentionUtils,
    check_set_window_size,
    get_attention_backend,
    get_qkv_format,
    get_qkv_layout,
)

CU = torch.tensor([0, 3, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_found(layout: str) -> None:
    shape = (6, 4, 16) if layout[0] == "t" else (2, 6, 4, 16)
    q, k, v = laid_out(layout, *(torch.randn(shape) for _ in range(3)))
    form = get_qkv_format(layout)[0]
    found, *same, q_format, kv_format = get_qkv_layout(q, k, v, form)
    assert found == layout
    assert (q_format, kv_format) == (form, form)
    assert all(a is b for a, b in zip(same, (q, k, v), strict=True))


def test_layouts_that_only_look_interleaved() -> None:
    buffer = torch.randn(2, 6, 3, 4, 16)
    q, k, v = buffer.unbind(2)
    assert get_qkv_layout(k, q, v, "bshd")[0] == "bshd_bshd_bshd"
    assert get_qkv_layout(q.clone(), k, v, "bshd")[0] == "bshd_bshd_bshd"  # rows 3 apart, not 2
    strided = torch.randn(2, 6, 4, 32)[..., ::2]
    assert get_qkv_layout(strided, k, v, "bshd")[1].is_contiguous()
    with pytest.raises(ValueError, match="qkv_format is 'bhsd'; needs sbhd, bshd or thd"):
        get_qkv_layout(q, k, v, "bhsd")


def test_formats_of_a_cache() -> None:
    assert get_qkv_format("paged_kv_thd_bshd_bshd", object()) == ("thd_2bshd", "thd", "bshd")
    assert get_qkv_format("bshd_bshd_bshd", object()) == ("bshd", "bshd", "bshd")
    assert get_qkv_format("sb3hd") == ("sbhd", "sbhd", "sbhd")


@pytest.mark.parametrize(
    ("mask", "window", "want"),
    [
        ("no_mask", None, (-1, -1)),
        ("padding", (-1, 0), (-1, -1)),
        ("no_mask", [2, 2], [2, 2]),
        ("causal", None, (-1, 0)),
        ("causal", (-1, -1), (-1, 0)),
        ("padding_causal", (5, -1), (5, 0)),
    ],
)
def test_a_window_is_settled(mask: str, window: object, want: object) -> None:
    assert check_set_window_size(mask, window) == want


def test_a_causal_window_has_no_right_side() -> None:
    with pytest.warns(UserWarning, match="a causal mask has no right side"):
        assert check_set_window_size("causal", [2, 2]) == (2, 0)


@pytest.mark.parametrize(("mask", "window"), [("no_mask", (3, -1)), ("causal", (-1, -3))])
def test_a_window_is_refused(mask: str, window: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="window_size is"):
        check_set_window_size(mask, window)


@pytest.mark.parametrize("window", [3, (3,), (1, 2, 3)])
def test_a_window_that_is_no_pair_is_refused_by_name(window: object) -> None:
    with pytest.raises(ValueError, match=r"window_size is .*; needs \(left, right\), two integers"):
        check_set_window_size("causal", window)


def test_full_mask_counts_from_the_diagonal_of_the_lengths() -> None:
    hidden = utils.get_padding_mask(3, CU, CU, 8, 8, "cross")
    kind, mask, of_q, of_kv = utils.get_full_mask(8, 8, "padding", hidden, (1, 1), "cross", True)
    assert kind == "arbitrary"
    assert of_q.flatten().tolist() == of_kv.flatten().tolist() == [3, 0, 5]
    rows, cols = torch.arange(8)[:, None], torch.arange(8)[None]
    for i, n in enumerate((3, 0, 5)):
        want = ~((rows < n) & (cols < n) & ((cols - rows).abs() <= 1))
        assert torch.equal(mask[i, 0], want)
    _, mask, _, _ = utils.get_full_mask(5, 3, "causal_bottom_right")
    assert (~mask).sum((0, 1, 3)).tolist() == [0, 0, 1, 2, 3]
    _, mask, _, _ = utils.get_full_mask(5, 3, "causal")  # no key is lost on the left
    assert (~mask).sum((0, 1, 3)).tolist() == [1, 2, 3, 3, 3]


def test_alibi() -> None:
    slopes, bias = utils.get_alibi({}, 6, 2, 4, device="cpu")
    want = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert slopes.tolist() == want
    assert bias.shape == (1, 6, 2, 4)
    assert bias[0, 4].tolist() == [[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]
    _, top_left = utils.get_alibi({}, 6, 2, 4, bottom_right_alignment=False, device="cpu")
    assert top_left[0, 4, 0].tolist() == [0.0, -0.5, -1.0, -1.5]


def test_the_last_bias_is_kept() -> None:
    cache: dict = {}
    _, bias = utils.get_alibi(cache, 6, 2, 4, device="cpu")
    assert utils.get_alibi(cache, 6, 2, 4, device="cpu")[1] is bias
    utils.get_alibi(cache, 6, 3, 4, device="cpu")
    assert len(cache) == 1


def test_full_lengths_are_kept_and_serve_training_after_inference() -> None:
    device = torch.device("cpu")
    with torch.inference_mode():
        cu = utils.get_full_cu_seqlens(3, 77, device)
    assert cu.tolist() == [0, 77, 154, 231]
    assert not cu.is_inference()
    assert utils.get_full_cu_seqlens(3, 77, device) is cu


def test_packing_and_back() -> None:
    mask = torch.arange(5).view(1, 1, 1, 5) >= torch.tensor([3, 0, 5]).view(3, 1, 1, 1)
    cu, indices = utils.get_cu_seqlens_and_indices(mask)
    assert cu.tolist() == CU.tolist()
    padded = torch.randn(15, 2, 4, requires_grad=True)
    packed = utils.PackTensors.apply(indices, padded)
    assert torch.equal(packed[:8], padded.detach()[~mask.flatten()])
    assert packed[8:].abs().max() == 0
    back = utils.UnpackTensor.apply(indices, 15, packed)
    assert torch.equal(back, padded * ~mask.flatten()[:, None, None])
    (gradient,) = torch.autograd.grad(back.sum(), padded)
    assert torch.equal(gradient[:, 0, 0], (~mask.flatten()).float())


def test_thd_to_bshd_and_back() -> None:
    thd = torch.randn(9, 2, 4, requires_grad=True)
    bshd = utils.ConvertTHDtoBSHD.apply(thd, CU, 6)
    assert torch.equal(bshd[2, :5], thd[3:8])
    assert bshd[0, 3:].abs().max() == 0
    back = utils.ConvertBSHDtoTHD.apply(bshd, CU)
    assert torch.equal(back, thd[:8])
    (gradient,) = torch.autograd.grad(back.sum(), thd)
    assert gradient[:, 0, 0].tolist() == [1.0] * 8 + [0.0]


ARBITRARY = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def test_the_choice() -> None:
    with only(*BACKENDS):
        choice = get_attention_backend(AttentionParams())
    assert choice == (False, Version("2.8.3"), True, ARBITRARY, False, [True, True, True])
    with only("FLASH"):
        flash, _, fused, _, unfused, available = get_attention_backend(AttentionParams())
    assert (flash, fused, unfused, available) == (True, False, False, [True, False, False])


@pytest.mark.parametrize(
    ("params", "refused"),
    [
        (
            {"qkv_dtype": torch.float32},
            {"FlashAttention 2": "16 bits"},
        ),
        ({"qkv_type": torch.nn.Parameter}, {"FusedAttention": "needs torch.Tensor"}),
        ({"num_splits": 2}, {"FusedAttention": "num_splits is 2; needs 1"}),
        ({"return_max_logit": True}, {"FlashAttention 2": "return_max_logit is True"}),
        ({"head_dim_v": 32}, {"FusedAttention": "layout sbh3d; needs three separate tensors"}),
        ({"head_dim_qk": 320, "head_dim_v": 320}, {"FlashAttention 2": "head_dim_qk is 320"}),
        ({"softmax_type": "learnable"}, {"FlashAttention 2": "softmax_type is learnable"}),
        ({"attn_mask_type": "arbitrary"}, {"FusedAttention": "an arbitrary mask"}),
        (
            {"attn_mask_type": "causal", "max_seqlen_kv": 256},
            {"FlashAttention 2": "mask causal with lengths 128 and 256; needs equal ones"},
        ),
        ({"context_parallel": True}, {"UnfusedDotProductAttention": "context_parallel is True"}),
        (
            {
                "context_parallel": True,
                "fp8": True,
                "fp8_meta": {"recipe": DelayedScaling(fp8_dpa=True)},
            },
            {"FusedAttention": "context parallelism in FP8; needs 16 bits"},
        ),
        (
            {"fp8": True, "fp8_meta": {"recipe": DelayedScaling(fp8_dpa=True)}},
            {"UnfusedDotProductAttention": "NVTE_UnfusedDPA_Emulate_FP8=1"},
        ),
        (
            {"qkv_dtype": torch.float8_e4m3fn, "return_max_logit": True},
            {"FusedAttention": "tex.get_fused_attn_backend"},
        ),
    ],
)
def test_a_refusal_has_its_reason(params: dict, refused: dict[str, str]) -> None:
    with only(*BACKENDS):
        reasons, _ = _selection.refusals(AttentionParams(**params))
    for backend, text in refused.items():
        assert text in reasons[backend]


SEPARATE = {"qkv_layout": "bshd_bshd_bshd"}
WINDOW = {"attn_mask_type": "causal", "window_size": (8, 0)}
BIAS = {"core_attention_bias_type": "post_scale_bias"}


@pytest.mark.parametrize(
    "params",
    [
        {"qkv_dtype": torch.float32},
        {**WINDOW, "attention_dropout": 0.1},
        {**WINDOW, **SEPARATE, "max_seqlen_q": 256},
        {**BIAS, "core_attention_bias_shape": "11ss"},
        {**BIAS, "core_attention_bias_shape": "bhss", "deterministic": True},
        {"deterministic": True, "softmax_type": "learnable"},
    ],
)
def test_fused_takes_what_our_engines_take(params: dict) -> None:
    with only(*BACKENDS):
        reasons, _ = _selection.refusals(AttentionParams(**params))
    assert "FusedAttention" not in reasons


def test_slopes_of_ones_own_go_to_flash() -> None:
    params = AttentionParams(core_attention_bias_type="alibi", alibi_slopes_shape=torch.Size([16]))
    with only(*BACKENDS):
        flash, _, fused, _, _, available = get_attention_backend(params)
    assert (flash, fused, available) == (True, False, [True, True, True])


@pytest.mark.gpu
def test_importing_starts_no_gpu() -> None:
    code = "import torch, transformer_engine.pytorch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags_of_flash_attention() -> None:
    assert FlashAttentionUtils.is_installed
    assert FlashAttentionUtils.v2_3_plus
    assert not FlashAttentionUtils.v3_is_installed


def test_reasons_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    utils.AttentionLogging.setup_logging()
    with caplog.at_level(logging.DEBUG, logger="DotProductAttention"), only("UNFUSED"):
        get_attention_backend(AttentionParams())
    assert "Disabling FusedAttention: NVTE_FUSED_ATTN is 0" in caplog.text
    assert "Running with UnfusedDotProductAttention" in caplog.text


@pytest.mark.parametrize("backend", ["FLASH", "FUSED", "UNFUSED"])
@pytest.mark.parametrize("value", ["false", "off", "-1", "00", "2"])
def test_a_switch_of_a_backend_that_is_neither_0_nor_1_is_named(
    backend: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, name = torch.zeros(2, 1, 1, 8), f"NVTE_{backend}_ATTN"
    core = DotProductAttention(1, 8)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is '{value}'; needs 0 or 1"):
        core(q, q, q)
    monkeypatch.setenv(name, "")
    assert core(q, q, q).shape == (2, 1, 8)
