"""tex in FP8: casts, the step of scaling, and fused attention with quantizers of both packages."""

import pytest
import torch

import fp8_decoy
import transformer_engine_torch as tex
from fp8_reference import check, reference
from te_attention.torch import fp8
from te_attention.torch.fp8.cast import quantize_together
from te_attention.torch.fp8.formats import is_fp8_tensor
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)
from transformer_engine_torch import DType

B, S, H, D = 2, 64, 4, 32
FP8 = FusedAttnBackend["FP8"]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value])


def quantizers(kind: str) -> dict[str, object]:
    """All six, by name. S has a scale of 448, dP one that fits the test."""
    e4m3, e5m2 = DType.kFloat8E4M3, DType.kFloat8E5M2
    make, current = fp8.Float8Quantizer, fp8.Float8CurrentScalingQuantizer
    if kind.startswith("foreign"):
        e4m3, e5m2, make = fp8_decoy.E4M3, fp8_decoy.E5M2, fp8_decoy.Quantizer
        current = lambda dtype, _device: fp8_decoy.CurrentQuantizer(dtype)  # noqa: E731
    out = {
        "s": make(scalar(448.0), scalar(0.0), e4m3),
        "dp": make(scalar(2000.0), scalar(0.0), e5m2),
    }
    if kind.endswith("delayed"):
        scales = {"qkv": 100.0, "o": 100.0, "dqkv": 2000.0, "do": 8000.0}
        types = {"qkv": e4m3, "o": e4m3, "dqkv": e5m2, "do": e5m2}
        out |= {n: make(scalar(scales[n]), scalar(0.0), types[n]) for n in scales}
    else:
        out |= {n: current(e4m3, "cpu") for n in ("qkv", "o")}
        out |= {n: current(e5m2, "cpu") for n in ("dqkv", "do")}
    for quantizer in out.values():
        quantizer.columnwise_usage = False
    return out


def quantized(quantizer: object, *tensors: torch.Tensor) -> list:
    codes, scale_inv = quantize_together(list(tensors), quantizer)
    return [tex.fp8.wrapped(quantizer, c, scale_inv, torch.bfloat16) for c in codes]


def plain(tensor: object) -> torch.Tensor:
    return tensor.dequantize(dtype=torch.float32) if is_fp8_tensor(tensor) else tensor.float()


def inputs(layout: str, form: str) -> list[torch.Tensor]:
    """q, k and v in a layout, and dO in the format."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(B, S, H, D).bfloat16() for _ in range(4))
    q, k, v, dout = (t.transpose(0, 1) if form[0] == "s" else t for t in (q, k, v, dout))
    q, k, v = (t.contiguous() for t in (q, k, v))
    if "3" in layout:
        q, k, v = torch.stack((q, k, v), -3 if "3hd" in layout else -2).unbind(
            -3 if "3hd" in layout else -2
        )
    elif "2" in layout:
        k, v = torch.stack((k, v), -3 if "2hd" in layout else -2).unbind(
            -3 if "2hd" in layout else -2
        )
    return [q, k, v, dout.contiguous()]


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bs3hd", "sbh3d", "sbhd_sb2hd"])
@pytest.mark.parametrize("kind", ["delayed", "current", "foreign delayed", "foreign current"])
@pytest.mark.parametrize("mask", ["no_mask", "padding_causal"])
def test_fused_attention(layout: str, kind: str, mask: str) -> None:
    form = "sbhd" if layout[0] == "s" else "bshd"
    q, k, v, dout = inputs(layout, form)
    of = quantizers(kind)
    q8, k8, v8 = quantized(of["qkv"], q, k, v)
    lens = [S, 37] if "padding" in mask else [S, S]
    cu = torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32)
    options = {"qkv_layout": layout, "attn_mask_type": mask}
    common = (S, S, cu, cu)
    o, aux = fused_attn_fwd(
        *(True, *common, q8, k8, v8, torch.bfloat16, FP8),
        **(options | {"s_quantizer": of["s"], "o_quantizer": of["o"]}),
    )
    delayed = kind.endswith("delayed")
    assert is_fp8_tensor(o) is delayed
    assert len(aux) == 3
    assert aux[0].shape == (B, H, S, 1)
    (do8,) = quantized(of["do"], dout)
    *gradients, dbias, dsink = fused_attn_bwd(
        *(*common, q8, k8, v8, o, do8, torch.bfloat16, DType.kFloat8E5M2, aux, FP8),
        **options,
        **{f"{n}_quantizer": of[n] for n in ("s", "dp", "dqkv")},
    )
    assert dbias is dsink is None
    assert all(is_fp8_tensor(g) is delayed for g in gradients)
    if kind.startswith("foreign") and delayed:
        assert type(o) is type(gradients[0]) is fp8_decoy.Tensor8
    count = len({(g._data if delayed else g).untyped_storage().data_ptr() for g in gradients})
    assert count == (1 if "3" in layout else 2 if "2" in layout else 3)
    names = ("o", "dq", "dk", "dv")
    move = (lambda t: t.transpose(0, 1)) if form == "sbhd" else (lambda t: t)
    found = {n: move(plain(t)) for n, t in zip(names, (o, *gradients), strict=True)}
    wanted = reference(
        *map(move, (q, k, v, dout)), causal="causal" in mask, lens=lens if lens[1] < S else None
    )
    for b, n in enumerate(lens):
        assert not any(value[b, n:].any() for value in found.values())
    check(found, wanted, slack=1.2)  # 64 tokens: the statistics are coarse
    assert of["s"].amax.item() == 1
    assert of["dp"].amax.item() > 0
    amax = plain(o).abs().max().item()
    assert of["o"].amax.item() == pytest.approx(amax, rel=0.07)
    if delayed:
        largest = max(plain(g).abs().max().item() for g in gradients)
        assert of["dqkv"].amax.item() == pytest.approx(largest, rel=0.13)


def test_storages_without_autograd() -> None:
    q, k, v, _ = inputs("bshd_bshd_bshd", "bshd")
    of = quantizers("delayed")
    of["qkv"].internal = of["o"].internal = True
    q8, k8, v8 = quantized(of["qkv"], q, k, v)
    assert type(q8) is fp8.Float8TensorStorage
    cu = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    o, _ = fused_attn_fwd(
        *(False, S, S, cu, cu, q8, k8, v8, torch.bfloat16, FP8),
        **{"s_quantizer": of["s"], "o_quantizer": of["o"]},
        **{"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "no_mask"},
    )
    assert type(o) is fp8.Float8TensorStorage
    check({"o": plain(o)}, reference(q, k, v), slack=1.2)


def test_what_does_not_fit_together_is_refused() -> None:
    q, k, v, _ = inputs("bshd_bshd_bshd", "bshd")
    of = quantizers("delayed")
    q8, k8, v8 = quantized(of["qkv"], q, k, v)
    cu = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "no_mask"}

    def run(tensors: tuple, backend: object, **more: object) -> None:
        fused_attn_fwd(*(True, S, S, cu, cu, *tensors, torch.bfloat16, backend), **(options | more))

    both = {"s_quantizer": of["s"], "o_quantizer": of["o"]}
    with pytest.raises(ValueError, match="o_quantizer is None; needs a quantizer with the"):
        run((q8, k8, v8), FP8, s_quantizer=of["s"])
    with pytest.raises(ValueError, match="needs one of F16 without FP8 tensors"):
        run((q, k, v), FP8, **both)
    with pytest.raises(ValueError, match="needs FP8 with FP8 tensors"):
        run((q8, k8, v8), FusedAttnBackend["F16_arbitrary_seqlen"], **both)
    with pytest.raises(ValueError, match="K is a Tensor; needs FP8 as Q"):
        run((q8, k, v8), FP8, **both)
    with pytest.raises(ValueError, match="return_max_logit is True; needs False with FP8"):
        run((q8, k8, v8), FP8, return_max_logit=True, **both)
    with pytest.raises(ValueError, match="s_quantizer is a Float8Quantizer; needs None without"):
        run((q, k, v), FusedAttnBackend["F16_arbitrary_seqlen"], **both)
    of["s"].scale.fill_(500.0)
    with pytest.raises(RuntimeError, match="s_scale is so large that probabilities saturate"):
        run((q8, k8, v8), FP8, **both)


@pytest.mark.parametrize("kind", ["delayed", "current", "foreign delayed", "foreign current"])
def test_casts(kind: str) -> None:
    x, quantizer = torch.randn(5, 16), quantizers(kind)["qkv"]
    t = tex.quantize(x, quantizer)
    assert torch.allclose(tex.dequantize(t, DType.kFloat32), x, atol=1e-3, rtol=0.07)
    other = tex.quantize(x * 2, quantizer, output=t)
    assert other is t
    assert torch.allclose(plain(t), (x * 2).clamp(-4.5, 4.5) if "delayed" in kind else x * 2,
                          atol=1e-3, rtol=0.07)  # fmt: skip
    with pytest.raises(ValueError, match="noop is a tensor; needs None"):
        tex.quantize(x, quantizer, None, torch.zeros(1))
    with pytest.raises(ValueError, match="otype is kByte; needs kFloat32"):
        tex.dequantize(t, DType.kByte)


def test_amax_and_scales() -> None:
    amax = scalar(50.0)
    tex.compute_amax(torch.tensor([1.0, -3.0]), amax)
    assert amax.item() == 3
    histories = [torch.ones(3, 2), torch.full((1, 1), 2.0)]
    scales = [torch.ones(2), torch.ones(1)]
    buffer = torch.tensor([7.0, 0.5, 14.0])
    tex.fused_amax_and_scale_update_after_reduction(
        buffer, histories, scales, "max", DType.kFloat8E4M3, 1.0
    )
    assert [s.tolist() for s in scales] == [[32, 224], [16]]
    assert histories[0].tolist() == [[0, 0], [1, 1], [7, 0.5]]
    assert histories[1].tolist() == [[0]]


def test_fill() -> None:
    x = torch.ones(4, 2, 3)
    tex.mha_fill(x, torch.tensor([3], dtype=torch.int32))
    assert x.sum((1, 2)).tolist() == [6, 6, 6, 0]
    tex.mha_fill(x, 2.0)
    assert x.eq(2).all()
    t = fp8.Float8Quantizer(scalar(1.0), scalar(0.0), DType.kFloat8E4M3)(torch.ones(3, 2))
    tex.mha_fill(t, torch.tensor(1, dtype=torch.int32))
    assert t.dequantize().tolist() == [[1, 1], [0, 0], [0, 0]]
