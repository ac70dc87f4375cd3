"""FP8 keys and values with 16-bit queries: attention(), KVCache and append()."""

import pytest
import torch
from torch import Tensor

from te_attention import torch as tea
from te_attention.torch.operators import ops

BATCH, HEADS, HEADS_KV, DIM = 2, 4, 2, 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def close(actual: Tensor, want: Tensor) -> None:
    """P and O are rounded to bf16, the wanted ones are not."""
    torch.testing.assert_close(actual.float(), want.float(), atol=0.02, rtol=0.02)


def widened(code: Tensor, descale: Tensor | None, head_dim: int) -> Tensor:
    """The values of codes in float32."""
    shape = [1] * code.dim()
    shape[head_dim] = -1
    return code.float() * (1 if descale is None else descale.view(shape))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [None, 1, HEADS_KV])
@pytest.mark.parametrize("rows", [1, 9])
def test_attention_is_that_of_the_values(dtype, half, count, rows) -> None:
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, rows, DIM).to(half)
    k, v = (torch.randn(BATCH, HEADS_KV, 300, DIM).to(dtype) for _ in range(2))
    scales = [None if count is None else torch.rand(count) + 0.5 for _ in range(2)]
    options = {"mask": "causal_bottom_right", "softcap": 20.0}
    o, lse = tea.attention(
        q, k, v, k_descale=scales[0], v_descale=scales[1], return_lse=True, **options
    )
    wide = [widened(t, s, 1) for t, s in zip((k, v), scales, strict=True)]
    want, want_lse = tea.attention(q.float(), *wide, return_lse=True, **options)
    assert o.dtype == half
    close(o, want)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-4)


def test_minimal_signature() -> None:
    q = torch.randn(BATCH, HEADS, 3, DIM).bfloat16()
    k, v = (torch.randn(BATCH, HEADS_KV, 5, DIM).to(E4M3) for _ in range(2))
    close(tea.attention(q, k, v), tea.attention(q.float(), k.float(), v.float()))
    assert "kv_dtype=e4m3" in tea.explain(q, k, v)


def test_ragged() -> None:
    torch.manual_seed(1)
    cu = torch.tensor([0, 3, 10], dtype=torch.int32)
    q = torch.randn(10, HEADS, DIM).bfloat16()
    k, v = (torch.randn(10, HEADS_KV, DIM).to(E4M3) for _ in range(2))
    options = {"format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu, "mask": "causal"}
    scale = torch.tensor([0.5, 2.0])
    o = tea.attention(q, k, v, k_descale=scale, v_descale=scale, **options)
    wide = (widened(t, scale, 1) for t in (k, v))
    close(o, tea.attention(q.float(), *wide, **options))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("count", [None, 1, HEADS_KV])
def test_cache_casts_and_attends(dtype: torch.dtype, count: int | None) -> None:
    """A prompt and single tokens, against the same cast by PyTorch."""
    torch.manual_seed(2)
    scales = [None if count is None else torch.rand(count) + 0.5 for _ in range(2)]
    cache = tea.KVCache(
        *(BATCH, 20, HEADS_KV, DIM),
        page_size=4,
        dtype=dtype,
        k_descale=scales[0],
        v_descale=scales[1],
    )
    keys, values = [], []
    for rows in (7, 1, 1):
        q = torch.randn(BATCH, rows, HEADS, DIM).bfloat16()
        k, v = (torch.randn(BATCH, rows, HEADS_KV, DIM).bfloat16() for _ in range(2))
        o = cache.prefill(q, k, v)
        for tensor, kept, scale in zip((k, v), (keys, values), scales, strict=True):
            one = torch.ones(1) if scale is None else scale
            code = (tensor.float() / one.view(1, 1, -1, 1)).to(dtype)
            kept.append(widened(code, one, 2))
        wide = (torch.cat(kept, 1) for kept in (keys, values))
        want = tea.attention(q.float(), *wide, format="bshd", mask="causal_bottom_right")
        close(o, want)


def test_append_saturates() -> None:
    cache = tea.KVCache(1, 2, 1, 8, page_size=2, dtype=E4M3)
    big = torch.full((1, 2, 1, 8), 1e4)
    cache.append(big, -big)
    assert cache.k.float().unique().tolist() == [448.0]
    assert cache.v.float().unique().tolist() == [-448.0]


def test_compiled() -> None:
    q = torch.randn(BATCH, HEADS, 3, DIM).bfloat16()
    k, v = (torch.randn(BATCH, HEADS_KV, 5, DIM).to(E4M3) for _ in range(2))
    scale = torch.tensor([0.5])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tea.attention(q, k, v, k_descale=scale, v_descale=scale)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def _attention(**changes: object) -> None:
    arguments = {
        "q": torch.randn(1, HEADS, 2, DIM).bfloat16(),
        "k": torch.randn(1, HEADS_KV, 2, DIM).to(E4M3),
        "v": torch.randn(1, HEADS_KV, 2, DIM).to(E4M3),
    }
    tea.attention(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.randn(1, HEADS, 2, DIM)}, r"k\.dtype is float8_e4m3fn; needs float32 as q"),
        (
            {"v": torch.randn(1, HEADS_KV, 2, DIM).to(E5M2)},
            r"v\.dtype is float8_e5m2; needs float8_e4m3fn as k",
        ),
        ({"k_descale": torch.ones(3)}, r"k_descale is of shape \[3\]; needs float32 \[1\]"),
        (
            {"k_descale": torch.ones(1), "v_descale": torch.ones(2)},
            r"v_descale is of shape \[2\]; needs the shape of k_descale",
        ),
        ({"k_descale": torch.ones(1).double()}, r"k_descale\.dtype is float64; needs float32"),
        (
            {"q": torch.randn(1, HEADS, 2, DIM).bfloat16().requires_grad_()},
            r"training is 1; needs 0: keys and values of another type",
        ),
    ],
)
def test_refusals(changes: dict, text: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=text):
        _attention(**changes)


def test_descale_needs_an_fp8_cache() -> None:
    q, k, v = (torch.randn(1, 2, 3, DIM).bfloat16() for _ in range(3))
    with pytest.raises(RuntimeError, match="k_descale is a tensor; needs None unless k and v"):
        tea.attention(q, k, v, k_descale=torch.ones(1))


def test_append_refuses_other_casts() -> None:
    cache = tea.KVCache(1, 2, 1, 8, page_size=2, dtype=torch.bfloat16)
    new = torch.zeros(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match=r"new_k\.dtype is float32; needs that of k_cache"):
        cache.append(new, new)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    pool = torch.zeros(1, 2, 1, 8, dtype=E4M3)
    with pytest.raises(RuntimeError, match="k_descale is of shape"):
        ops.kv_cache_append(new, new, pool, pool, None, cu, cu, k_descale=torch.ones(2))
