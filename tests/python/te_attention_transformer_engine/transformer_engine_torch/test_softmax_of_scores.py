"""The scaled softmax functions against double precision, and the transposes of flash attention."""

import pytest
import torch

import transformer_engine_torch as tex

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16]
SCALE = 0.5  # exact in every type: TransformerEngine rounds it to the type of the scores
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def probabilities(x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    scores = x.double() * SCALE
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0)


def case(kind: str, dtype: torch.dtype, device: str) -> tuple:
    """Scores, arguments before the scale, and what is hidden."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, 8, 24, device=device).to(dtype)
    rows, cols = torch.arange(8, device=device)[:, None], torch.arange(24, device=device)[None]
    if kind == "masked":
        mask = torch.rand(2, 1, 8, 24, device=device) < 0.3
        mask[1, 0, 5] = True  # nothing to see
        return x, (mask,), mask
    if kind == "upper_triang_masked":
        x = x[..., :8].flatten(0, 1).contiguous()
        return x, (), cols[:, :8] > rows
    return x, (), {"": None, "aligned_causal_masked": cols > rows + 16}[kind]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["", "masked", "upper_triang_masked", "aligned_causal_masked"])
def test_forward_and_backward(kind: str, dtype: torch.dtype, device: str) -> None:
    x, arguments, hidden = case(kind, dtype, device)
    name = f"scaled_{kind}_softmax" if kind else "scaled_softmax"
    scale = torch.tensor([SCALE])[0]  # TransformerEngine passes a tensor of the CPU
    y = getattr(tex, f"{name}_forward")(x, *arguments, scale)
    want = probabilities(x, hidden)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), want, atol=tolerance, rtol=tolerance)
    assert y.dtype == dtype
    dy = torch.randn_like(x)
    dx = getattr(tex, f"{name}_backward")(dy, y, scale)
    p = y.double()
    want = SCALE * p * (dy.double() - (p * dy.double()).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), want, atol=tolerance, rtol=tolerance)


def test_masks_of_bytes_and_strided_inputs() -> None:
    x, (mask,), hidden = case("masked", torch.bfloat16, "cpu")
    want = tex.scaled_masked_softmax_forward(x, mask, SCALE)
    assert torch.equal(tex.scaled_masked_softmax_forward(x, mask.to(torch.uint8), SCALE), want)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(tex.scaled_masked_softmax_forward(strided, mask, SCALE), want)
    one = mask[:1].contiguous()
    shared = tex.scaled_masked_softmax_forward(x, one, SCALE)
    torch.testing.assert_close(
        shared.double(), probabilities(x, one.expand_as(hidden)), atol=8e-3, rtol=8e-3
    )


def test_wrong_ranks_are_named() -> None:
    with pytest.raises(ValueError, match=r"input has shape \[2, 2, 2\]; needs 4 dimensions"):
        tex.scaled_softmax_forward(torch.zeros(2, 2, 2), SCALE)
    with pytest.raises(ValueError, match=r"input has shape \[2, 2, 2, 2\]; needs 3 dimensions"):
        tex.scaled_upper_triang_masked_softmax_forward(torch.zeros(2, 2, 2, 2), SCALE)


@pytest.mark.parametrize("device", DEVICES)
def test_prepare_and_back(device: str) -> None:
    buffer = torch.randn(6, 2, 3, 3 * 128, device=device).bfloat16()
    q, k, v = buffer.chunk(3, dim=-1)
    out = tex.fa_prepare_fwd(q)
    assert out.shape == (3, 2, 6, 3, 128)
    for got, want in zip(out, (q, k, v), strict=True):
        assert torch.equal(got, want.transpose(0, 1))
    assert torch.equal(tex.fa_prepare_bwd(*out), buffer)


def test_prepare_wants_q_of_an_interleaved_buffer() -> None:
    with pytest.raises(ValueError, match=r"qkvi has strides .*; needs .*: Q of layout sbh3d"):
        tex.fa_prepare_fwd(torch.zeros(6, 2, 3, 128))
