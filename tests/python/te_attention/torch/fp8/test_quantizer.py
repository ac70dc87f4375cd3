"""Both quantizers: every member, casts against a cast in float64, several tensors at once."""

import pytest
import torch

from fp8_decoy import E4M3, CurrentQuantizer, Quantizer
from te_attention.torch import fp8
from te_attention.torch.fp8 import DType, Float8Tensor, Float8TensorStorage
from te_attention.torch.fp8.cast import quantize_together

FORMATS = {
    DType.kFloat8E4M3: (torch.float8_e4m3fn, 448.0),
    DType.kFloat8E5M2: (torch.float8_e5m2, 57344.0),
}
REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def delayed(scale: float = 1.0, dtype: DType = DType.kFloat8E4M3, **usage: bool):
    return fp8.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **usage)


def current(dtype: DType = DType.kFloat8E4M3, **options: object):
    return fp8.Float8CurrentScalingQuantizer(dtype, "cpu", columnwise=False, **options)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("real", REALS)
def test_delayed_cast(dtype: DType, real: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(33, 7).to(real) * 3
    quantizer = delayed(100.0, dtype, columnwise=False)
    quantizer.amax.fill_(2.0)
    t = quantizer(x)
    kind, largest = FORMATS[dtype]
    wanted = (x.float() * 100).clamp(-largest, largest).to(kind)
    assert torch.equal(t._data, wanted.view(torch.uint8))
    assert t._scale_inv.item() == pytest.approx(0.01)
    assert quantizer.amax.item() == x.abs().max().float().item()
    assert t.dtype == real


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("power", [False, True])
def test_current_cast(dtype: DType, power: bool) -> None:
    torch.manual_seed(0)
    x, (kind, largest) = torch.randn(5, 70), FORMATS[dtype]
    quantizer = current(dtype, force_pow_2_scales=power)
    t = quantizer(x)
    scale = torch.tensor(largest) / x.abs().max()
    scale = torch.exp2(torch.floor(torch.log2(scale))) if power else scale
    assert torch.equal(quantizer.scale, scale.view(1))
    assert quantizer.amax.item() == x.abs().max()
    assert torch.equal(t._data, (x * scale).clamp(-largest, largest).to(kind).view(torch.uint8))


def test_a_scale_without_a_use() -> None:
    assert current()(torch.zeros(3))._scale_inv.item() == 1
    assert current()(torch.tensor([1.0, torch.inf]))._scale_inv.item() == 1
    nan = current()(torch.tensor([torch.nan, 2.0]))
    assert nan._scale_inv.item() == pytest.approx(2 / 448)
    assert nan.dequantize().isnan().tolist() == [True, False]


def test_given_amax_and_least_amax() -> None:
    quantizer = current(use_existing_amax=True, amax=torch.tensor([56.0]))
    assert quantizer(torch.ones(2))._scale_inv.item() == 0.125
    assert quantizer.amax.item() == 56
    assert current(amax_epsilon=56.0)(torch.ones(2))._scale_inv.item() == 0.125


def test_strides_of_the_data_follow_the_tensor() -> None:
    x = torch.randn(2, 3, 8).transpose(0, 1)
    t = delayed(columnwise=False)(x)
    assert t._data.stride() == x.stride()
    assert torch.equal(t.dequantize(), x.to(torch.float8_e4m3fn).float())
    holes = torch.randn(4, 16)[:, :8]
    assert torch.equal(delayed()(holes).dequantize(), holes.to(torch.float8_e4m3fn).float())


def test_usages() -> None:
    quantizer = delayed()
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}
    assert quantizer(torch.ones(2, 4))._transpose.shape == (4, 2)
    quantizer.set_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    assert quantizer(torch.ones(2, 4))._transpose is None
    quantizer.set_usage(rowwise=False)
    assert not quantizer.rowwise_usage


def test_copies() -> None:
    for quantizer, kept in ((delayed(), False), (current(), True)):
        quantizer.internal = quantizer.optimize_for_gemm = True
        other = quantizer.copy()
        assert other is not quantizer
        assert other.scale is quantizer.scale
        assert other.amax is quantizer.amax
        assert (other.internal, other.optimize_for_gemm) == (True, kept)


def test_internal_and_nominal_dtype() -> None:
    quantizer = delayed()
    assert type(quantizer(torch.ones(2))) is Float8Tensor
    assert quantizer.quantize(torch.ones(2), dtype=torch.half).dtype == torch.half
    quantizer.internal = True
    x = torch.ones(2, requires_grad=True)
    assert type(quantizer(x)) is Float8TensorStorage


def test_gradients_pass_as_they_are() -> None:
    x = torch.randn(4, requires_grad=True)
    for quantizer in (delayed(), current()):
        (gradient,) = torch.autograd.grad(quantizer(x).dequantize(), x, torch.arange(4.0))
        assert torch.equal(gradient, torch.arange(4.0))


def test_out_and_update() -> None:
    quantizer = delayed(2.0)
    t = quantizer.make_empty((3, 8), dtype=torch.bfloat16)
    assert (t.shape, t.dtype, t._data.device.type) == ((3, 8), torch.bfloat16, "cpu")
    assert quantizer.quantize(torch.full((3, 8), 0.5), out=t) is t
    assert t.dequantize().eq(0.5).all()
    assert t._transpose.eq(t._data[0, 0]).all()
    quantizer.update_quantized(torch.full((3, 8), 0.25), t)
    assert t.dequantize().eq(0.25).all()
    assert t._transpose.eq(t._data[0, 0]).all()
    with pytest.raises(ValueError, match="noop_flag is a tensor; needs None"):
        quantizer.update_quantized(torch.ones(3, 8), t, noop_flag=torch.zeros(1))


def test_from_data() -> None:
    data = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    for given in (data, data.view(torch.uint8)):
        t = delayed(2.0).create_tensor_from_data(given, fake_dtype=torch.half, requires_grad=True)
        assert (t.dtype, t.requires_grad) == (torch.half, True)
        assert t.dequantize().tolist() == [0.5, 1.0]
    assert type(delayed().create_tensor_from_data(data, internal=True)) is Float8TensorStorage


def test_calibrate_and_onnx() -> None:
    quantizer = delayed()
    quantizer.calibrate(torch.tensor([-3.0, 2.0]))
    assert quantizer.amax.item() == 3
    assert current().calibrate(torch.ones(2)) is None
    t = quantizer.onnx_quantize(torch.ones(2))
    assert quantizer.onnx_dequantize(t).tolist() == [1, 1]


def test_types_that_cannot_be_cast() -> None:
    with pytest.raises(ValueError, match=r"tensor\.dtype is int32; needs float16"):
        delayed()(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"fp8_dtype is .*kInt32"):
        delayed(dtype=DType.kInt32)


PACKINGS = {
    "separate": lambda: [torch.randn(2, 5, h, 8) for h in (4, 2, 2)],
    "sb3hd": lambda: list(torch.randn(5, 2, 3, 4, 8).unbind(2)),
    "bsh3d": lambda: list(torch.randn(5, 2, 4, 3, 8).unbind(3)),
    "bshd_bs2hd": lambda: [torch.randn(2, 5, 4, 8), *torch.randn(2, 5, 2, 2, 8).unbind(2)],
    "grouped": lambda: list(torch.randn(2, 5, 8, 8).split([4, 2, 2], 2)),
    "transposed": lambda: [torch.randn(2, 5, 4, 8).transpose(1, 2) for _ in range(3)],
    "with_holes": lambda: [torch.randn(2, 5, 4, 16)[..., :8] for _ in range(3)],
    "two_of_three": lambda: [*torch.randn(2, 5, 2, 4, 8).unbind(2), torch.randn(2, 3)],
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("kind", ["delayed", "current", "given", "foreign", "foreign current"])
def test_several_tensors_under_one_scale(name: str, kind: str) -> None:
    torch.manual_seed(3)
    tensors = PACKINGS[name]()
    largest = max(t.abs().max() for t in tensors)
    quantizer = {
        "delayed": lambda: delayed(50.0),
        "current": current,
        "given": lambda: current(use_existing_amax=True, amax=torch.tensor([8.96])),
        "foreign": lambda: Quantizer(torch.tensor([50.0]), torch.zeros(1), E4M3),
        "foreign current": lambda: CurrentQuantizer(E4M3),
    }[kind]()
    scale = 448 / largest if "current" in kind else torch.tensor(50.0)
    codes, scale_inv = quantize_together(tensors, quantizer)
    assert scale_inv.item() == pytest.approx(1 / scale.item(), rel=1e-6)
    for code, tensor in zip(codes, tensors, strict=True):
        assert code.shape == tensor.shape
        wanted = (tensor * quantizer.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(code.float(), wanted.float())
    if kind != "given":
        assert quantizer.amax.item() == largest
    shared = len({c.untyped_storage().data_ptr() for c in codes})
    packed = {"sb3hd": 1, "bsh3d": 1, "grouped": 1, "bshd_bs2hd": 2}
    assert shared == packed.get(name, 3)
    if name != "with_holes":
        strides = [t.stride() for t in tensors]
        assert [c.stride() for c in codes] == strides or name == "two_of_three"
