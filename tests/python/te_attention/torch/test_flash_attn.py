"""flash-attn's functions against their definition in float64."""

import math

import pytest
import torch
from torch import Tensor

from te_attention.torch.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """O and LSE of [s, heads, d], as flash-attn's documentation defines them."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - k.shape[1] + q.shape[1]
    x = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    if alibi_slopes is not None:
        x = x - alibi_slopes.double()[:, None, None] * ahead.abs()
    left, right = window_size
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= ahead > (0 if causal else right)
    if left >= 0:
        hidden |= ahead < -left
    x = x.masked_fill(hidden, -math.inf)
    o = torch.softmax(x, -1).nan_to_num() @ v
    return o.transpose(0, 1), x.logsumexp(-1)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left window": {"window_size": (3, -1)},
    "causal window": {"causal": True, "window_size": (3, 0)},
    "softcap": {"softcap": 5.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
}


def tensors(*rows: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, rows[0], 4), (2, rows[1], 2), (2, rows[1], 2)]
    return [torch.randn(*shape, 16, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("rows", [(7, 7), (5, 11), (11, 5)])
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str, rows: tuple[int, int]) -> None:
    q, k, v = tensors(*rows)
    o, lse, none = flash_attn_func(q, k, v, **OPTIONS[name], return_attn_probs=True)
    assert none is None and lse.shape == (2, 4, rows[0])
    each = [definition(*t, **OPTIONS[name]) for t in zip(q, k, v, strict=True)]
    want, want_lse = zip(*each, strict=True)
    torch.testing.assert_close(o.double(), torch.stack(want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), torch.stack(want_lse), atol=1e-5, rtol=1e-5)
    assert flash_attn_func(q, k, v, **OPTIONS[name]).equal(o)
    upstream = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), upstream)
    expected = torch.autograd.grad(torch.stack(want), (q, k, v), upstream.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_ragged(name: str) -> None:
    torch.manual_seed(0)
    lengths_q, lengths_k = (5, 0, 7), (8, 3, 7)
    q = torch.randn(12, 4, 16, requires_grad=True)
    k, v = (torch.randn(18, 2, 16, requires_grad=True) for _ in range(2))
    cu_q, cu_k = (
        torch.tensor([0, a, a + b, a + b + c], dtype=torch.int32)
        for a, b, c in (lengths_q, lengths_k)
    )
    o, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 7, 8, **OPTIONS[name], return_attn_probs=True
    )
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    want, want_lse = zip(*(definition(*t, **OPTIONS[name]) for t in parts), strict=True)
    torch.testing.assert_close(o.double(), torch.cat(want), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), torch.cat(want_lse, -1), atol=1e-5, rtol=1e-5)


def test_packed_forms_are_the_others() -> None:
    qkv = torch.randn(2, 7, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    want = flash_attn_func(q, k, v, causal=True)
    assert flash_attn_qkvpacked_func(qkv, causal=True).equal(want)
    assert flash_attn_kvpacked_func(q, qkv[:, :, 1:], 0.0, None, True).equal(want)
    cu = torch.tensor([0, 7, 14], dtype=torch.int32)
    flat = want.flatten(0, 1)
    packed = flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 7, causal=True)
    assert packed.equal(flat)
    kv = qkv[:, :, 1:].flatten(0, 1)
    got = flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv, cu, cu, 7, 7, causal=True)
    assert got.equal(flat)


def test_dropout_scales_what_it_keeps() -> None:
    q = torch.zeros(1, 64, 2, 16)
    v = torch.ones(1, 64, 2, 16)
    o = flash_attn_func(q, q, v, dropout_p=0.5)
    assert o.std() > 0
    torch.testing.assert_close(o.mean(), torch.tensor(1.0), atol=0.1, rtol=0)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, at: int, interleaved: bool) -> Tensor:
    """x [s, heads, d] turned as complex numbers, in float64."""
    half = cos.shape[-1]
    x = x.double()
    first = x[..., 0 : 2 * half : 2] if interleaved else x[..., :half]
    second = x[..., 1 : 2 * half : 2] if interleaved else x[..., half : 2 * half]
    angle = torch.complex(cos.double(), sin.double())[at : at + x.shape[0], None]
    turned = torch.complex(first, second) * angle
    out = x.clone()
    if interleaved:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary", [None, True, False])
def test_kv_cache(rotary: bool | None, paged: bool) -> None:
    torch.manual_seed(0)
    lengths, rows = [5, 0, 9], 16
    q, k, v = (torch.randn(3, 2, heads, 16) for heads in (4, 2, 2))
    cached = [torch.randn(3, rows, 2, 16) for _ in range(2)]
    if paged:  # pages of 4, in reverse order
        caches = [t.reshape(12, 4, 2, 16).flip(0).contiguous() for t in cached]
        where = {"block_table": torch.arange(11, -1, -1, dtype=torch.int32).view(3, 4)}
    else:
        caches = [torch.cat([torch.zeros(1, rows, 2, 16), t]) for t in cached]
        where = {"cache_batch_idx": torch.tensor([1, 2, 3])}
    angles = torch.randn(rows + 4, 4)
    tables = {}
    if rotary is not None:
        tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        tables["rotary_interleaved"] = rotary
    o, lse = flash_attn_with_kvcache(
        q,
        *caches,
        k,
        v,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        causal=True,
        return_softmax_lse=True,
        **where,
        **tables,
    )
    for i, n in enumerate(lengths):
        query, key = q[i], k[i]
        if rotary is not None:
            query, key = (rotated(t, angles.cos(), angles.sin(), n, rotary) for t in (query, key))
        keys = torch.cat([cached[0][i, :n].double(), key.double()])
        values = torch.cat([cached[1][i, :n], v[i]])
        want, want_lse = definition(query, keys, values, causal=True)
        torch.testing.assert_close(o[i].double(), want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[i].double(), want_lse, atol=1e-5, rtol=1e-5)


def test_kv_cache_without_new_tokens() -> None:
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    for lengths in (6, torch.tensor([6, 6]), None):
        n = 8 if lengths is None else 6
        want = flash_attn_func(q, k[:, :n].contiguous(), v[:, :n].contiguous())
        torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths), want)


def test_what_is_not_there_is_refused() -> None:
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 2, 8)
    one = torch.zeros(1, dtype=torch.int32)
    for options, text in (
        ({"cache_leftpad": one}, "cache_leftpad is given; needs None"),
        ({"k": q, "v": q}, "cache_seqlens is None; needs the tokens before those of k"),
        ({"k": q}, "k is given without the other of k, v"),
        ({"rotary_sin": q}, "rotary_sin is given without the other"),
        ({"num_splits": -1}, "num_splits is -1; needs 0 or more"),
        ({"block_table": one[None], "cache_batch_idx": one}, "cache_batch_idx is given with block"),
    ):
        with pytest.raises(ValueError, match=text):
            flash_attn_with_kvcache(q, cache, cache, **options)


@pytest.mark.parametrize("lengths", [(0, 7), (-1, 0)])
def test_a_cache_without_a_place_for_new_tokens_is_refused_by_name(lengths: tuple) -> None:
    q, cache = torch.zeros(2, 2, 2, 8), torch.zeros(2, 8, 2, 8)
    index = 0 if lengths[0] else 1
    seen = rf"cache_seqlens\[{index}\] is {lengths[index]}, before 2 new tokens"
    with pytest.raises(RuntimeError, match=f"{seen}; needs from 0 to 6"):
        flash_attn_with_kvcache(
            q, cache, cache.clone(), q, q, cache_seqlens=torch.tensor(lengths, dtype=torch.int32)
        )
