"""FP8: attention against the oracle; casts, the largest magnitude and fills against torch's."""

import pytest
import torch

from cases import run_fp8, saturates
from kit import Case, draw
from te_attention.torch._library import OPS

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@pytest.mark.parametrize("dtype", LARGEST)
def test_quantize_with_a_known_scale(dtype: str) -> None:
    x = torch.randn(3, 50)
    scale, amax = torch.tensor([2.0]), torch.tensor([0.5])
    y, scale_inv = OPS.fp8_quantize(x, scale, amax, dtype)
    assert torch.equal(y.float(), (x * 2).to(getattr(torch, dtype)).float())
    assert scale_inv.item() == 0.5
    assert amax.item() == x.abs().max()
    back = OPS.fp8_dequantize(y, scale_inv, "float32")
    assert torch.equal(back, y.float() * 0.5)


@pytest.mark.parametrize("dtype", LARGEST)
def test_quantize_by_what_is_there(dtype: str) -> None:
    x = torch.randn(100)
    y, scale, scale_inv, amax = OPS.fp8_quantize_current(x, dtype)
    assert amax.item() == x.abs().max()
    torch.testing.assert_close(scale, torch.tensor([LARGEST[dtype]]) / amax)
    torch.testing.assert_close(scale_inv, 1 / scale)
    assert y.float().abs().max() == LARGEST[dtype]


def test_amax_and_fills() -> None:
    x, largest = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([2.5])
    OPS.amax(x, largest)
    assert largest.item() == 3
    OPS.fill(x, 1.5)
    assert x.tolist() == [1.5] * 3
    OPS.fill_bytes(x, 0)
    assert x.tolist() == [0] * 3


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(RuntimeError, match='dtype is "int4"; needs a floating-point dtype'):
        OPS.fp8_quantize(torch.zeros(2), None, None, "int4")


def _saturates(line: str) -> bool:
    with Case(line) as case:
        case.fill(False)
        return saturates(case)


def cases(count: int) -> list[tuple[int, str]]:
    """So many random cases of FP8 whose probabilities have a scale that fits."""
    found: list[tuple[int, str]] = []
    seed = 0
    while len(found) < count:
        line = draw(seed)
        if line.split("|")[0].startswith("dtype=e") and not _saturates(line):
            found.append((seed, line))
        seed += 1
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_cases_agree_with_the_oracle(device: str) -> None:
    wrong = [
        run_fp8(line, seed, large=seed // 2 % 2 == 0, device=device) for seed, line in cases(60)
    ]
    assert not any(wrong), "\n".join(w for w in wrong if w)


def test_a_scale_of_s_that_saturates_is_refused() -> None:
    line = (
        "dtype=e4m3 dqkv_dtype=bf16 training=1 heads_q=1 heads_kv=1 dim_qk=16 batch=1 seqlen_q=4 "
        "seqlen_kv=4 dropout={} | scales=shared seed=1"
    )
    assert _saturates(line.format(0.9))
    with pytest.raises(RuntimeError, match="s_scale is so large that probabilities saturate"):
        run_fp8(line.format(0.9), 0, large=False)
    assert not run_fp8(line.format(0.5), 0, large=False)


def test_wrong_scales_and_types_are_named() -> None:
    q = torch.zeros(1, 2, 4, 16).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    OPS.fp8_forward(one, None, None, None, None, None, "bfloat16", q, q, q)
    with pytest.raises(RuntimeError, match=r"v_scale_inv is of shape \[2\]; needs float32 \[1\]"):
        OPS.fp8_forward(one, None, one.repeat(2), None, None, None, "bfloat16", q, q, q)
    with pytest.raises(RuntimeError, match=r"s_scale\.dtype is float64; needs float32"):
        OPS.fp8_forward(one, None, None, one.double(), None, None, "bfloat16", q, q, q)
    with pytest.raises(RuntimeError, match='o_dtype is "bf16"; needs a floating-point dtype'):
        OPS.fp8_forward(one, None, None, None, None, None, "bf16", q, q, q)


@pytest.mark.parametrize("o_dtype", ["bfloat16", "float8_e4m3fn"])
def test_fakes_of_attention(o_dtype: str) -> None:
    q, k, v = (torch.randn(2, 4, 9, 16).to(torch.float8_e4m3fn) for _ in range(3))
    one = torch.ones(1)
    of_o = one if o_dtype.startswith("float8") else None  # other types have no scale
    given = (one, None, None, one, one, of_o, o_dtype, q, k, v, "bhsd", "causal", True)
    checks = ("test_faketensor",)
    torch.library.opcheck(OPS.fp8_forward.default, given, test_utils=checks)
    o, lse, _, _ = OPS.fp8_forward(*given)
    scales = [*[one] * 5, of_o, of_o, one, one, None, None, None]
    given = (torch.randn(o.shape).to(o.dtype), None, o, lse, False, False, *scales, "bfloat16")
    given = (*given, q, k, v, "bhsd", "causal", True)
    torch.library.opcheck(OPS.fp8_backward.default, given, test_utils=checks)
