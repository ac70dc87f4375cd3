"""The backends without DotProductAttention around them: seeds 000 and 001, autograd, flash-attn."""

import types

import pytest
import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode

import te_attention.torch as tea
import transformer_engine_torch as tex
from dpa import only
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import _flash, _flash_package
from transformer_engine.pytorch.attention.dot_product_attention.backends import (
    FlashAttention,
    FP8EmulationFunc,
    FusedAttention,
    FusedAttnFunc,
    UnfusedDotProductAttention,
    _PrepareQKVForFA,
)
from transformer_engine.pytorch.attention.dot_product_attention.utils import get_full_cu_seqlens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ARBITRARY = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def inputs(device: str, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(*shape, generator=generator) for _ in range(3)]
    return [t.to(device, torch.bfloat16).requires_grad_() for t in draw]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_seed_000(device: str) -> None:
    q, k, v = (t.detach() for t in inputs(device, 2, 64, 4, 64))
    cu = torch.tensor([0, 64, 128], dtype=torch.int32, device=device)
    # fmt: off
    output, softmax_lse, rng_state = tex.fused_attn_fwd(
        64, 64, True, 0.125, 0.0, True, tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD,
        tex.NVTE_Bias_Type.NVTE_NO_BIAS, tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, (-1, 0), False, cu, cu, q, k, v, q.dtype,
        None, None, None, None, None, None, None, None, None, 16, False, False,
    )
    # fmt: on
    want, lse = tea.attention(q, k, v, format="bshd", mask="causal", return_lse=True)
    assert torch.equal(output, want)
    assert torch.equal(softmax_lse.squeeze(-1), lse)
    assert rng_state.shape == (2,)


@pytest.mark.parametrize("device", DEVICES)
def test_seed_001(device: str) -> None:
    q, k, v = inputs(device, 2, 32, 4, 64)
    flash_attn = FlashAttention()
    output = flash_attn(
        query_layer=q,
        key_layer=k,
        value_layer=v,
        qkv_layout="bshd_bshd_bshd",
        attn_mask_type="causal",
    )
    assert torch.equal(output, tea.attention(q, k, v, format="bshd", mask="causal").flatten(-2))
    unfused = UnfusedDotProductAttention(0.125)
    close(unfused({}, q, k, v, "bshd_bshd_bshd", attn_mask_type="causal"), output)
    cu = get_full_cu_seqlens(2, 32, q.device)
    fused = FusedAttention()
    close(fused(q, k, v, "bshd_bshd_bshd", cu, cu, None, None, 32, 32, "causal"), output)


def test_layer_scaling_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (t.detach().half() for t in inputs("cpu", 2, 32, 4, 64))
    bias, sink = torch.randn(1, 4, 32, 32).half(), torch.randn(1, 4, 1, 1)
    options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    options |= {"softmax_offset": sink, "qkv_layout": "bshd_bshd_bshd"}
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv("NVTE_APPLY_QK_LAYER_SCALING", value)
        unfused = UnfusedDotProductAttention(
            0.125, layer_number=4, softmax_type="learnable", return_max_logit=True
        )
        assert unfused.apply_qk_layer_scaling == (value == "1")
        found.append(unfused({}, q, k, v, **options))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=4e-3, rtol=4e-3)


def node(q, k, v, cu, layout: str, bias=None, sink=None, max_logit=False) -> object:
    # fmt: off
    return FusedAttnFunc.apply(
        True, 32, 32, cu, cu, None, None, None, None, q, k, v, bias, 0.125, 0.0, True, layout,
        "no_bias" if bias is None else "post_scale_bias", "causal",
        "vanilla" if sink is None else "learnable", (-1, 0), None, None, ARBITRARY, False, False,
        None, None, False, sink, False, 1, max_logit,
    )
    # fmt: on


@pytest.mark.parametrize("device", DEVICES)
def test_fused_attn_func(device: str) -> None:
    q, k, v = inputs(device, 2, 32, 4, 64)
    bias = torch.randn(1, 4, 32, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    sink = torch.randn(1, 4, 1, 1, device=device, requires_grad=True)
    cu = get_full_cu_seqlens(2, 32, q.device)
    o, largest = node(q, k, v, cu, "bshd_bshd_bshd", bias, sink, max_logit=True)
    options = {"bias": bias, "sink": sink.flatten(), "return_max_logit": True}
    want, most = tea.attention(q, k, v, format="bshd", mask="causal", **options)
    assert torch.equal(o, want)
    close(largest, most.amax((0, 2)).to(o.dtype))
    dout = torch.randn_like(o)
    every = (q, k, v, bias, sink)
    for a, b in zip(
        torch.autograd.grad(o, every, dout), torch.autograd.grad(want, every, dout), strict=True
    ):
        close(a, b)


def test_gradients_of_a_packed_layout_lie_in_one_buffer() -> None:
    qkv = torch.randn(2, 32, 3, 4, 64).bfloat16()
    q, k, v = (t.detach().requires_grad_() for t in qkv.unbind(2))
    cu = get_full_cu_seqlens(2, 32, q.device)
    o = node(q, k, v, cu, "bs3hd")
    gradients = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    assert len({t.untyped_storage().data_ptr() for t in gradients}) == 1
    assert gradients[1].storage_offset() - gradients[0].storage_offset() == 4 * 64


def test_prepare_for_flash() -> None:
    qkv = torch.randn(5, 2, 3, 3 * 16).bfloat16().requires_grad_()
    views = qkv.split(16, dim=-1)
    prepared = _PrepareQKVForFA.apply(*views)
    for got, view in zip(prepared, views, strict=True):
        assert torch.equal(got, view.transpose(0, 1))
    weights = [torch.randn_like(t) for t in prepared]
    torch.autograd.backward(prepared, weights)
    want = torch.cat([w.transpose(0, 1) for w in weights], dim=-1)
    assert torch.equal(qkv.grad, want)


def halves(t: torch.Tensor) -> torch.Tensor:
    return (t * 2).round() / 2


class Rounded:
    """A quantizer that keeps halves."""

    def __call__(self, t: torch.Tensor) -> "Rounded":
        self.value = halves(t)
        return self

    def dequantize(self, *, dtype: torch.dtype) -> torch.Tensor:
        return self.value.to(dtype)


@pytest.mark.parametrize("name", ["QKV_quantizer", "S_quantizer", "dQKV_quantizer", "dP_quantizer"])
def test_fp8_emulation(name: str) -> None:
    tensors = [torch.randn(4, 6, requires_grad=True) for _ in range(3)]
    out = FP8EmulationFunc.apply(*tensors, Rounded(), name, "bshd_bshd_bshd")
    weights = [torch.randn(4, 6) for _ in range(3)]
    gradients = torch.autograd.grad(out, tensors, weights)
    forward = {"QKV_quantizer": 3, "S_quantizer": 1}.get(name, 0)
    backward = {"dQKV_quantizer": 3, "dP_quantizer": 1}.get(name, 0)
    for i in range(3):
        assert torch.equal(out[i], halves(tensors[i]) if i < forward else tensors[i])
        assert torch.equal(gradients[i], halves(weights[i]) if i < backward else weights[i])


class FakePackage:
    """The arguments of a call of flash-attn."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def flash_attn_func(self, q, k, v, **options) -> torch.Tensor:  # noqa: ARG002
        self.calls.append(("dense", tuple(q.shape), options))
        return torch.zeros_like(q)

    def flash_attn_varlen_func(self, q, k, v, *lengths, **options) -> torch.Tensor:  # noqa: ARG002
        self.calls.append(("varlen", lengths[2:], options))
        return torch.zeros_like(q)


@pytest.mark.parametrize("version", ["2.8.3", "3.0.0b1"])
def test_an_installed_flash_attn_is_called(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    package = FakePackage()
    name = "package3" if version.startswith("3") else "package"
    monkeypatch.setattr(_flash_package.FlashAttentionUtils, name, package)
    cuda = types.SimpleNamespace(is_cuda=True)  # where it serves; the tensors here are the host's
    served = _flash._served
    monkeypatch.setattr(_flash, "_served", lambda call, v, _: served(call, v, cuda))
    q, k, v = (t.detach() for t in inputs("cpu", 32, 2, 4, 64))
    flash = FlashAttention(0.1).eval()
    options = {"flash_attention_backend": Version(version), "attn_mask_type": "causal"}
    out = flash(q, k, v, qkv_layout="sbhd_sbhd_sbhd", window_size=(8, 0), **options)
    assert out.shape == (32, 2, 256)
    kind, shape, passed = package.calls.pop()
    assert (kind, shape) == ("dense", (2, 32, 4, 64))
    assert (passed["causal"], passed["softmax_scale"]) == (True, 0.1)
    assert passed["window_size"] == (8, 0)
    assert ("num_splits" in passed) == (name == "package3")
    cu = torch.tensor([0, 32], dtype=torch.int32)
    options |= {"attn_mask_type": "padding_causal", "qkv_layout": "thd_thd_thd"}
    options |= {"cu_seqlens_q": cu, "max_seqlen_q": 32, "max_seqlen_kv": 32}
    ragged = [t[:, 0].contiguous() for t in (q, k, v)]
    flash(*ragged, cu_seqlens_kv=cu, **options)
    assert package.calls.pop()[:2] == ("varlen", (32, 32))
    # Its causal mask sits at the bottom right: not what top left means if the lengths may differ.
    flash(*ragged, cu_seqlens_kv=cu.clone(), **options)
    assert not package.calls


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_splits": 2}, "num_splits is 2; needs 1"),
        ({"fp8": True}, "quantizers is None; needs those of a module with fp8"),
        ({"cp_group": object()}, "cp_group is of object; needs a process group"),
        ({"attn_mask_type": "padding"}, "cu_seqlens_q or cu_seqlens_kv is None; needs int32"),
        ({"window_size": (-1, 3), "attn_mask_type": "no_mask"}, r"window_size is \(-1, 3\)"),
    ],
)
def test_flash_refuses(options: dict, text: str) -> None:
    q, k, v = inputs("cpu", 2, 32, 4, 64)
    with pytest.raises(ValueError, match=text):
        FlashAttention()(q, k, v, **{"qkv_layout": "bshd_bshd_bshd"} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"qkv_layout": "bhsd"}, "qkv_layout is bhsd; needs one of QKVLayouts"),
        ({"cu_seqlens_q": None}, "cu_seqlens_q is None; needs int32"),
        ({"fp8_output": True}, "fp8_output is True; needs False without fp8"),
        ({"core_attention_bias_type": "post_scale_bias"}, "core_attention_bias is None; needs one"),
        ({"softmax_offset": torch.zeros(4)}, "softmax_offset is a tensor; needs None with vanilla"),
        ({"cp_group": object()}, "cp_group is of object; needs a process group"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is a tensor; needs None with no_bias"),
    ],
)
def test_fused_refuses(options: dict, text: str) -> None:
    q, k, v = inputs("cpu", 2, 32, 4, 64)
    cu = get_full_cu_seqlens(2, 32, q.device)
    given = {"qkv_layout": "bshd_bshd_bshd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    with pytest.raises(ValueError, match=text):
        FusedAttention()(q, k, v, **given | options)


class NothingLarge(TorchFunctionMode):
    """Fails where an operation of PyTorch returns as many elements as one head has scores."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_function__(self, func, types, args=(), kwargs=None) -> object:
        out = func(*args, **(kwargs or {}))
        size = out.numel() if isinstance(out, torch.Tensor) else 0
        assert size < self.most, f"{func} returns {size} elements"
        return out


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bs3hd"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_fused_makes_no_bias_of_slopes(layout: str, shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(2, 512, 3, 4, 8).bfloat16().unbind(2)
    if layout != "bs3hd":
        q, k, v = (t.contiguous() for t in (q, k, v))
    slopes = torch.rand(shape)
    module = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="causal")
    options = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    with only("FUSED"), NothingLarge(512 * 512):
        out = module(q, k, v, **options)
    want = tea.attention(q, k, v, format="bshd", mask="causal", alibi=slopes)
    assert torch.equal(out, want.flatten(-2))


def test_fused_refuses_the_backward_pass_of_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN_USE_FAv2_BWD", "1")
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN_USE_FAv2_BWD is set; needs 0"):
        FusedAttention()


@pytest.mark.parametrize("backend", [FusedAttention, FlashAttention])
def test_a_mask_that_is_a_tensor_is_refused(backend: type) -> None:
    q, k, v = inputs("cpu", 2, 32, 4, 64)
    cu = get_full_cu_seqlens(2, 32, q.device)
    options = {"qkv_layout": "bshd_bshd_bshd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    with pytest.raises(ValueError, match="attn_mask_type is arbitrary; needs a mask that has a na"):
        backend()(q, k, v, attn_mask_type="arbitrary", **options)


def test_flash_of_no_version_given_is_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_flash, "_served", lambda _call, version, _q: asked.append(version))
    q, k, v = (torch.randn(2, 8, 4, 32) for _ in range(3))
    flash = FlashAttention(32**-0.5)
    flash(q, k, v, qkv_layout="bshd_bshd_bshd", flash_attention_backend=None)
    assert [_flash_package.is_v3(version) for version in asked] == [False]
