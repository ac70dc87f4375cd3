"""xformers' function and masks against the mask as a tensor, in float64."""

import math

import pytest
import torch
from torch import Tensor

import te_attention.torch.xformers as xops
from te_attention.torch.xformers import fmha


def definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """O of [b, s, heads, d] with a mask that is added."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    x = q @ k.mT / math.sqrt(q.shape[-1])
    x = x if mask is None else x + mask.double()
    return (torch.softmax(x, -1).nan_to_num() @ v).transpose(1, 2)


DENSE = {
    "none": None,
    "causal": xops.LowerTriangularMask(),
    "bottom right": xops.LowerTriangularFromBottomRightMask(),
    "local": xops.LowerTriangularFromBottomRightMask().make_local_attention(3),
    "two-sided": xops.LocalAttentionFromBottomRightMask(2, 1),
    "tensor": torch.randn(2, 4, 6, 9),
    "causal and tensor": xops.LowerTriangularMask().add_bias(torch.randn(2, 4, 6, 9)),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    torch.manual_seed(0)
    bias = DENSE[name]
    q, k, v = (torch.randn(2, n, 4, 16, requires_grad=True) for n in (6, 9, 9))
    mask = bias
    if isinstance(bias, xops.AttentionBias):
        mask = bias.materialize((2, 4, 6, 9))
    o = xops.memory_efficient_attention(q, k, v, attn_bias=bias)
    want = definition(q, k, v, mask)
    torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), upstream)
    for a, b in zip(got, torch.autograd.grad(want, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


LENGTHS, KEYS = [3, 6, 2], [5, 6, 4]
BLOCKS = {
    "plain": fmha.BlockDiagonalMask.from_seqlens(LENGTHS, KEYS),
    "self": fmha.BlockDiagonalMask.from_seqlens(LENGTHS),
    "causal": fmha.BlockDiagonalMask.from_seqlens(LENGTHS, KEYS).make_causal(),
    "bottom right": fmha.BlockDiagonalMask.from_seqlens(
        LENGTHS, KEYS
    ).make_causal_from_bottomright(),
    "local": fmha.BlockDiagonalCausalMask.from_seqlens(LENGTHS).make_local_attention(2),
    "local bottom right": fmha.BlockDiagonalMask.from_seqlens(
        LENGTHS, KEYS
    ).make_local_attention_from_bottomright(2),
    "padded keys": fmha.BlockDiagonalPaddedKeysMask.from_seqlens(LENGTHS, 8, KEYS),
    "causal padded keys": fmha.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        LENGTHS, 8, KEYS
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    torch.manual_seed(0)
    mask = BLOCKS[name]
    keys = mask.k_seqinfo.seqstart_py[-1]
    q, k, v = (torch.randn(1, n, 4, 16, requires_grad=True) for n in (11, keys, keys))
    o = fmha.memory_efficient_attention(q, k, v, mask)
    want = definition(q, k, v, mask.materialize((1, 4, 11, keys)))
    torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), upstream)
    for a, b in zip(got, torch.autograd.grad(want, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_the_example_of_its_documentation() -> None:
    k_dim, dtype = 16, torch.float16
    list_x = [torch.randn([1, n, 1, k_dim], dtype=dtype) for n in (3, 6, 2)]
    attn_bias, x = fmha.BlockDiagonalMask.from_tensor_list(list_x)
    linear = torch.nn.Linear(k_dim, k_dim * 3).to(dtype)
    q, k, v = linear(x).reshape([1, -1, 1, 3, k_dim]).unbind(-2)
    out = fmha.memory_efficient_attention(q, k, v, attn_bias)
    list_out = attn_bias.split(out)
    assert tuple(list_out[0].shape) == (1, 3, 1, k_dim)
    for part, given in zip(list_out, list_x, strict=True):
        alone = linear(given).reshape([1, -1, 1, 3, k_dim]).unbind(-2)
        torch.testing.assert_close(part, xops.memory_efficient_attention(*alone))


def test_lists_of_batches_come_back_as_they_were() -> None:
    lists = [torch.randn(2, 3, 1, 8), torch.randn(1, 5, 1, 8)]
    mask, x = fmha.BlockDiagonalMask.from_tensor_list(lists)
    assert mask.q_seqinfo.seqlens == [3, 3, 5]
    for part, given in zip(mask.split(x), lists, strict=True):
        assert part.equal(given)
    mask, q, k, v = fmha.BlockDiagonalMask.from_tensor_lists_qkv(lists, lists, lists)
    assert fmha.memory_efficient_attention(q, k, v, mask).shape == q.shape


def test_other_numbers_of_dimensions() -> None:
    q = torch.randn(2, 6, 4, 16)
    want = xops.memory_efficient_attention(q, q, q)
    three = [q.transpose(1, 2).flatten(0, 1)] * 3
    got = xops.memory_efficient_attention(*three)
    torch.testing.assert_close(got.unflatten(0, (2, 4)).transpose(1, 2), want)
    kv = torch.randn(2, 6, 2, 16)
    grouped = xops.memory_efficient_attention(
        q.unflatten(2, (2, 2)), *[kv[:, :, :, None].expand(2, 6, 2, 2, 16)] * 2
    )
    expanded = kv.repeat_interleave(2, 2)
    torch.testing.assert_close(
        grouped.flatten(2, 3), xops.memory_efficient_attention(q, expanded, expanded)
    )


@pytest.mark.parametrize("expanded", ["none", "key"])
def test_groups_whose_heads_have_keys_or_values_of_their_own(expanded: str) -> None:
    q, k, v = (torch.randn(2, 6, 2, 3, 16) for _ in range(3))
    if expanded == "key":
        k = k[:, :, :, :1].expand_as(k)
    o = xops.memory_efficient_attention(q, k, v)
    want = definition(*(t.flatten(2, 3) for t in (q, k, v)), None).unflatten(2, (2, 3))
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)


def test_lse_and_dropout_and_types() -> None:
    q = torch.randn(2, 6, 4, 16, requires_grad=True)
    o, lse = xops.fmha.memory_efficient_attention_forward_requires_grad(q, q, q)
    assert lse.shape == (2, 4, 6) and not o.requires_grad
    assert not xops.memory_efficient_attention_forward(q, q, q).requires_grad
    assert not xops.memory_efficient_attention(q, q, q, p=0.5).equal(o)
    assert xops.memory_efficient_attention(q, q, q, output_dtype=torch.float64).dtype.itemsize == 8


def test_what_is_not_there_is_refused() -> None:
    q = torch.zeros(2, 3, 1, 8)
    with pytest.raises(ValueError, match="op is given; needs None"):
        xops.memory_efficient_attention(q, q, q, op=1)
    with pytest.raises(TypeError, match="attn_bias is of type str; needs a tensor or a mask"):
        xops.memory_efficient_attention(q, q, q, "causal")
    mask = fmha.BlockDiagonalMask.from_seqlens([3, 3])
    with pytest.raises(ValueError, match=r"query is of shape .*; needs \[1, tokens"):
        xops.memory_efficient_attention(q, q, q, mask)
    with pytest.raises(ValueError, match="kv_padding is 3; needs at least 4"):
        fmha.BlockDiagonalPaddedKeysMask.from_seqlens([1], 3, [4])
