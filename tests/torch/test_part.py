"""Operators for parts of a problem: wider results, slices, an origin for each sequence."""

import pytest
import torch

from te_attention.torch import attention
from te_attention.torch._arguments import Arguments
from te_attention.torch._library import OPS

ROWS, KEYS, HEADS, DIM = 12, 20, 2, 16


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(2, n, HEADS, DIM, generator=generator).to(dtype) for n in (ROWS, KEYS, KEYS)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_may_be_wider_than_the_inputs(dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    dout = torch.randn(2, ROWS, HEADS, DIM).to(dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    o = attention(*exact, format="bshd", mask="causal")
    o.backward(dout.double())
    arguments = Arguments(q, k, v, "bshd", "causal", True)
    got, got_lse = torch.empty(2, ROWS, HEADS, DIM), torch.empty(2, HEADS, ROWS)
    OPS.part_forward(got, got_lse, None, False, *arguments)
    torch.testing.assert_close(got.double(), o, atol=6e-3, rtol=6e-3)
    assert (got != got.to(dtype).float()).any()  # more than the type of q can say
    grads = tuple(torch.empty(t.shape) for t in (q, k, v))
    OPS.part_backward(*grads, dout, None, got.to(dtype), got_lse, False, False, 0, *arguments)
    for gradient, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(gradient.double(), wanted.grad, atol=2e-2, rtol=2e-2)


def test_forward_writes_into_slices() -> None:
    q, k, v = tensors(torch.float32)
    o, lse = torch.full((2, 3 * ROWS, HEADS, DIM), 7.0), torch.full((2, HEADS, 3 * ROWS), 7.0)
    most = torch.full((2, HEADS, 3 * ROWS), 7.0)
    rows = slice(ROWS, 2 * ROWS)
    arguments = Arguments(q, k, v, "bshd", max_logit=True)
    OPS.part_forward(o[:, rows], lse[..., rows], most[..., rows], False, *arguments)
    wanted, wanted_lse, largest = attention(
        q, k, v, format="bshd", return_lse=True, return_max_logit=True
    )
    assert torch.equal(o[:, rows], wanted)
    assert torch.equal(lse[..., rows], wanted_lse)
    assert torch.equal(most[..., rows], largest)
    for outside in (slice(ROWS), slice(2 * ROWS, None)):
        assert (o[:, outside] == 7).all() and (lse[..., outside] == 7).all()


def test_a_part_in_fp8_is_the_call_in_fp8_in_given_memory() -> None:
    q, k, v = (t.to(torch.float8_e4m3fn) for t in tensors(torch.float32))
    arguments, scale = Arguments(q, k, v, "bshd", "causal", True), torch.tensor([2.0])
    scales = (scale, scale / 4, None, 64 * scale, 1 / (64 * scale))
    wanted = OPS.fp8_forward(*scales, None, "float32", *arguments)
    o, lse = torch.zeros(2, 2 * ROWS, HEADS, DIM), torch.zeros(2, HEADS, 2 * ROWS)
    OPS.fp8_part_forward(o[:, ROWS:], lse[..., ROWS:], None, *scales, None, *arguments)
    assert torch.equal(o[:, ROWS:], wanted[0]) and torch.equal(lse[..., ROWS:], wanted[1])
    assert not o[:, :ROWS].any() and not lse[..., :ROWS].any()
    dout = torch.randn(2, ROWS, HEADS, DIM).to(torch.float8_e5m2)
    incoming = (dout, None, wanted[0].bfloat16(), wanted[1], False, False)
    scales = (*scales, None, scale, scale, 1 / scale, None, None, None)
    gradients = OPS.fp8_backward(*incoming, *scales, "float32", *arguments)[:3]
    found = [torch.empty(t.shape) for t in (q, k, v)]
    OPS.fp8_part_backward(*found, *incoming, *scales, *arguments)
    for one, exact in zip(found, gradients, strict=True):
        assert exact.any() and torch.equal(one, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_parts_of_the_keys_add_up(dtype: torch.dtype) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(dtype))
    o, lse = attention(q, k, v, format="bshd", return_lse=True)
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    wanted = torch.autograd.grad([o, lse], [q, k, v], [dout, dlse])
    with torch.no_grad():
        total = [torch.zeros_like(t) for t in (q, k, v)]
        for keys in (slice(8), slice(8, None)):
            some = (q, k[:, keys], v[:, keys])
            grads = [torch.empty_like(t) for t in some]
            arguments = Arguments(*some, "bshd", "none", True)
            OPS.part_backward(*grads, dout, dlse, o, lse, False, False, 0, *arguments)
            for to, part in zip((total[0], *(t[:, keys] for t in total[1:])), grads, strict=True):
                to.add_(part)
    for got, exact in zip(total, wanted, strict=True):
        torch.testing.assert_close(got, exact)


def test_each_sequence_has_its_origin_and_shift() -> None:
    q, k, v = tensors(torch.float32)
    origin = torch.tensor([[0, 0, 3, 1, 4], [0, 0, 0, 2, -1]])
    rng = torch.tensor([5, 6])
    options = {"format": "bshd", "mask": "causal", "dropout": 0.3, "rng_state": rng}
    o = attention(q, k, v, origin=origin, **options)
    for b, (batch, head, row, col, shift) in enumerate(origin.tolist()):
        alone = [t[b : b + 1] for t in (q, k, v)]
        numbers = torch.tensor([[batch + b, head, row, col, shift]])
        assert torch.equal(attention(*alone, origin=numbers, **options), o[b : b + 1])
        if shift >= 0:  # a shift moves the mask alone, as a wider window does
            numbers = torch.tensor([batch + b, head, row, col])
            wider = options | {"mask": None, "window": (None, shift)}
            torch.testing.assert_close(attention(*alone, origin=numbers, **wider), o[b : b + 1])


def test_merge_into_slices_of_larger_tensors() -> None:
    q, k, v = tensors(torch.float32)
    wanted, wanted_lse = attention(q, k, v, format="bshd", return_lse=True)
    o, part = (torch.zeros(2, 2 * ROWS, HEADS, DIM) for _ in range(2))
    lse, part_lse = (torch.full((2, HEADS, 2 * ROWS), -torch.inf) for _ in range(2))
    rows = slice(ROWS, None)
    for half in (slice(8), slice(8, None)):
        arguments = Arguments(q, k[:, half], v[:, half], "bshd")
        OPS.part_forward(part[:, rows], part_lse[..., rows], None, False, *arguments)
        OPS.merge_into(o[:, rows], lse[..., rows], part[:, rows], part_lse[..., rows])
    torch.testing.assert_close(o[:, rows], wanted)
    torch.testing.assert_close(lse[..., rows], wanted_lse)
    assert (o[:, :ROWS] == 0).all()


def test_o_is_rounded_without_rows_that_have_no_keys() -> None:
    sums = torch.randn(2, HEADS, 2 * ROWS, DIM).transpose(1, 2)
    lse = torch.randn(2, HEADS, 2 * ROWS)
    o = torch.zeros(2, 2 * ROWS, HEADS, DIM, dtype=torch.bfloat16)
    lse[1, 0, 3], sums[1, 3, 0] = -torch.inf, torch.nan
    OPS.round_o(o[:, :ROWS], sums[:, :ROWS], lse[..., :ROWS])
    sums[1, 3, 0] = 0
    assert torch.equal(o[:, :ROWS], sums[:, :ROWS].bfloat16())
    assert (o[:, ROWS:] == 0).all()


def test_refusals() -> None:
    q, k, v = tensors(torch.bfloat16)
    arguments = Arguments(q, k, v, "bshd")
    lse = torch.empty(2, HEADS, ROWS)
    with pytest.raises(RuntimeError, match="o_dtype is fp16; needs bf16, fp32"):
        OPS.part_forward(torch.empty_like(q, dtype=torch.float16), lse, None, False, *arguments)
    with pytest.raises(RuntimeError, match="lse is of shape"):
        OPS.part_forward(torch.empty_like(q), lse[..., :3], None, False, *arguments)
    with pytest.raises(RuntimeError, match="max_logit is of other strides; needs those of lse"):
        most = torch.empty(2, ROWS, HEADS).transpose(1, 2)
        OPS.part_forward(torch.empty_like(q), lse, most, False, *arguments._replace(max_logit=True))
    with pytest.raises(RuntimeError, match=r"origin is of shape \[2, 4\]; needs .* \[2, 5\]"):
        attention(q, k, v, format="bshd", origin=torch.zeros(2, 4, dtype=torch.int64))
    o = torch.zeros(2, ROWS, HEADS, DIM)
    with pytest.raises(RuntimeError, match="part_o is of other strides"):
        OPS.merge_into(o[:, :4], lse[..., :4], o[:, :4].contiguous(), lse[..., :4])
    with pytest.raises(RuntimeError, match="part_lse is of shape"):
        OPS.merge_into(o, lse, o, lse[..., :4])
    with pytest.raises(RuntimeError, match="o is of shape"):
        OPS.round_o(o[:, :4], o, lse)
    with pytest.raises(RuntimeError, match=r"lse\.dtype is float64; needs float32"):
        OPS.round_o(o, o, lse.double())
