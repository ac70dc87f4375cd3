"""KVCache: prompts, parts of prompts and single tokens are the attention of all tokens so far."""

import pytest
import torch
from torch import Tensor

from te_attention import torch as tea

BATCH, HEADS, HEADS_KV, DIM = 3, 4, 2, 16


def tokens(count: int) -> list[Tensor]:
    return [torch.randn(BATCH, count, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]


def whole(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Causal attention of one sequence [s, heads, d]."""
    options = {"mask": "causal_bottom_right"} | options
    return tea.attention(q[None], k[None], v[None], format="bshd", **options)[0]


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("options", [{}, {"window": (3, None)}, {"softcap": 5.0, "alibi": True}])
def test_prefill_then_decode(page_size: int, options: dict) -> None:
    torch.manual_seed(0)
    cache = tea.KVCache(BATCH, 20, HEADS_KV, DIM, page_size=page_size)
    steps = [tokens(n) for n in (7, 5, 1, 1, 1)]
    keys, values = (torch.cat([step[i] for step in steps], 1) for i in (1, 2))
    done = 0
    for q, k, v in steps:
        call = cache.decode if q.shape[1] == 1 else cache.prefill
        o = call(q, k, v, **options)
        done += q.shape[1]
        for b in range(BATCH):
            want = whole(q[b], keys[b, :done], values[b, :done], **options)
            torch.testing.assert_close(o[b], want)
    assert cache.lengths.tolist() == [done] * BATCH


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("call", ["prefill", "decode"])
def test_a_gradient_through_the_cache_is_refused_before_it_changes(name: str, call: str) -> None:
    cache = tea.KVCache(BATCH, 20, HEADS_KV, DIM)
    inputs = dict(zip("qkv", tokens(1), strict=True))
    inputs[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires a gradient; needs torch.no_grad"):
        getattr(cache, call)(**inputs)
    assert cache.lengths.tolist() == [0] * BATCH
    with torch.no_grad():
        assert not getattr(cache, call)(**inputs).requires_grad
    assert cache.lengths.tolist() == [1] * BATCH


def test_prompts_of_different_lengths() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 0, 7], dtype=torch.int32)
    ragged = [torch.randn(12, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    cache = tea.KVCache(BATCH, 8, HEADS_KV, DIM, page_size=2)
    o = cache.prefill(*ragged, lengths)
    padded = tea.KVCache(BATCH, 8, HEADS_KV, DIM)
    dense = [torch.zeros(BATCH, 7, *t.shape[1:]) for t in ragged]
    parts = [t.split(lengths.tolist()) for t in ragged]
    for b, n in enumerate(lengths.tolist()):
        for whole_batch, part in zip(dense, parts, strict=True):
            whole_batch[b, :n] = part[b]
    other = padded.prefill(*dense, lengths)
    for b, n in enumerate(lengths.tolist()):
        want = whole(*(part[b] for part in parts))
        torch.testing.assert_close(o.split(lengths.tolist())[b], want)
        torch.testing.assert_close(other[b, :n], want)
    q, k, v = tokens(1)
    torch.testing.assert_close(cache.decode(q, k, v), padded.decode(q, k, v))


def test_shared_and_reset_pages() -> None:
    torch.manual_seed(0)
    table = torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32)  # a prompt in common
    cache = tea.KVCache(BATCH, 8, HEADS_KV, DIM, page_size=4, page_table=table, pages=4)
    q, k, v = (t[:1].expand(BATCH, -1, -1, -1).contiguous() for t in tokens(4))
    cache.prefill(q, k, v)
    step = tokens(1)
    o = cache.decode(*step)
    for b in range(BATCH):
        keys, values = (torch.cat([p[b], s[b]]) for p, s in ((k, step[1]), (v, step[2])))
        torch.testing.assert_close(o[b], whole(step[0][b], keys, values))
    cache.reset(torch.tensor([1]))
    assert cache.lengths.tolist() == [5, 0, 5]
    cache.reset()
    assert not cache.lengths.any()


def test_more_tokens_than_fit_are_refused() -> None:
    cache = tea.KVCache(BATCH, 4, HEADS_KV, DIM, page_size=4)
    cache.append(*tokens(3)[1:])
    with pytest.raises(RuntimeError, match=r"lengths\[0\] would be 5; needs at most 4"):
        cache.append(*tokens(2)[1:])


@pytest.mark.parametrize("wrong", ["too many", "heads", "dtype", "lengths"])
def test_a_refused_append_leaves_the_cache_as_it_was(wrong: str) -> None:
    cache = tea.KVCache(BATCH, 4, HEADS_KV, DIM, page_size=4)
    cache.append(*tokens(3)[1:])
    k, v = tokens(2 if wrong == "too many" else 1)[1:]
    if wrong == "heads":
        k, v = k[:, :, :1], v[:, :, :1]
    if wrong == "dtype":
        k, v = k.double(), v.double()
    lengths = torch.full((BATCH,), 2, dtype=torch.int32) if wrong == "lengths" else None
    with pytest.raises(RuntimeError):
        cache.append(k, v, lengths)
    assert cache.lengths.tolist() == [3] * BATCH
    q, k, v = tokens(1)
    assert cache.decode(q, k, v).isfinite().all()
    assert cache.lengths.tolist() == [4] * BATCH


def test_arguments_are_checked() -> None:
    cache = tea.KVCache(BATCH, 4, HEADS_KV, DIM)
    q, k, v = tokens(2)
    for call, text in (
        (lambda: tea.KVCache(0, 4, 2, 16), "batch is 0; needs 1 or more"),
        (lambda: tea.KVCache(1, 4, 2, 16, dim_v=0), "dim_v is 0; needs 1 or more"),
        (lambda: tea.KVCache(1, 4, 2, 16, pages=0), "pages is 0; needs 1 or more"),
        (lambda: tea.KVCache(1, 4, 2, 20), "dim is 20 .*; needs multiples of 8"),
        (lambda: tea.KVCache(1, 4, 2, 16, dtype=torch.int32), "dtype is torch.int32; needs a fl"),
        (lambda: tea.KVCache(1, 4, 2, 16, dtype="float32"), "dtype is 'float32'; needs a floating"),
        (lambda: cache.decode(q, k, v), r"q is of shape .*; needs \[3, 1, heads, dim\]"),
        (lambda: cache.append(k[0], v[0]), r"k is of shape .*; needs \[3, s"),
        (lambda: cache.append(k[:2], v[:2]), r"k is of shape .*; needs \[3, s"),
        (lambda: cache.attend(q[0]), r"lengths is None; needs int32 \[batch\]"),
        (
            lambda: tea.KVCache(1, 4, 2, 16, page_table=torch.zeros(1, 2)),
            r"page_table is torch.float32 \[1, 2\]; needs int32 \[1, 1\]",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.gpu
def test_one_graph_decodes_every_length() -> None:
    torch.manual_seed(0)
    cache = tea.KVCache(BATCH, 64, HEADS_KV, DIM, dtype=torch.bfloat16, device="cuda")
    static = [t.cuda().bfloat16() for t in tokens(1)]
    cache.decode(*static)
    cache.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cache.decode(*static)
    cache.reset()
    seen = []
    for _ in range(5):
        step = [t.cuda().bfloat16() for t in tokens(1)]
        for to, given in zip(static, step, strict=True):
            to.copy_(given)
        graph.replay()
        seen.append(step)
        keys, values = (torch.cat([s[i] for s in seen], 1) for i in (1, 2))
        want = tea.attention(step[0], keys, values, format="bshd", mask="causal_bottom_right")
        torch.testing.assert_close(o, want, atol=2e-2, rtol=2e-2)
    assert cache.lengths.tolist() == [5] * BATCH


@pytest.mark.parametrize("sequences", [torch.tensor([True, False]), [1], torch.tensor([1.0])])
def test_reset_names_what_it_needs(sequences: object) -> None:
    cache = tea.KVCache(2, 4, HEADS_KV, DIM)
    cache.lengths.fill_(3)
    with pytest.raises(TypeError, match=r"sequences is .*; needs an int64 tensor of their numbers"):
        cache.reset(sequences)
    assert cache.lengths.tolist() == [3, 3]
    cache.reset(torch.tensor([1]))
    assert cache.lengths.tolist() == [3, 0]
