"""From tensors to a problem: what each refusal names, and how strides become fields."""

import numpy
import pytest
import torch

from te_attention import torch as tea

Q = torch.zeros(2, 4, 6, 16)  # bhsd
EIGHT = torch.zeros(2, 4, 8, 16)
T = torch.zeros(12, 4, 16)  # thd
CU = torch.tensor([0, 6, 12], dtype=torch.int32)
RAGGED = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}

REFUSALS = {
    "format": ((Q, Q, Q), {"format": "hbsd"}, r'format is "hbsd"; needs bhsd, bshd, sbhd or thd'),
    "rank": ((T, Q, Q), {}, r"q is of shape \[12, 4, 16\]; needs 4 dimensions for format bhsd"),
    "mask": ((Q, Q, Q), {"mask": "lower"}, 'mask is "lower"; needs none, causal'),
    "dtype": ((Q, Q.half(), Q), {}, "k.dtype is float16; needs float32 as q"),
    "dtype of v": ((Q, Q, Q.double()), {}, "v.dtype is float64; needs float32 as q"),
    "heads": (
        (Q, Q[:, :3], Q[:, :3]),
        {},
        r"k is of .* with 3 heads; needs a number of heads that",
    ),
    "v": ((Q, Q, Q[:, :2]), {}, r"v is of shape \[2, 2, 6, 16\]; needs the heads and rows of k"),
    "dim": ((Q, Q[..., :8], Q), {}, r"k is of shape .*; needs the head dim of q"),
    "batch": ((Q, Q[:1], Q[:1]), {}, r"k is of shape .*; needs a batch of 2"),
    "last stride": ((EIGHT.mT,) * 3, {}, r"q is a tensor with stride 16 in its last dimension"),
    "expanded": ((Q, Q[:1, :1, :1].expand_as(Q), Q), {}, "k is expanded in every dimension"),
    "no lengths": ((T, T, T), {"format": "thd"}, "cu_seqlens_q is None; needs int32"),
    "lengths": ((T, T, T), {**RAGGED, "cu_seqlens_kv": CU[:2]}, r"cu_seqlens_kv is of shape \[2\]"),
    "int16": (
        (T, T, T),
        {**RAGGED, "cu_seqlens_q": CU.short()},
        "cu_seqlens_q.dtype is int16; needs int32",
    ),
    "max_seqlen": ((Q, Q, Q), {"max_seqlen_q": 4}, "max_seqlen_q is 4; needs format thd"),
    "bias": (
        (Q, Q, Q),
        {"bias": torch.zeros(6, 5)},
        r"bias is .*5\]; needs \[2, 4, 6, 6\], each",
    ),
    "deep bias": ((Q, Q, Q), {"bias": torch.zeros(1, 2, 4, 6, 6)}, r"bias is of shape \[1, 2, 4"),
    "boolean bias": (
        (Q, Q, Q),
        {"bias": torch.ones(6, 6).bool()},
        r"bias.dtype is bool; needs that of q, or float32 \(a boolean mask becomes 0 where",
    ),
    "integers": ((Q.int(),) * 3, {}, "q.dtype is int32; needs float16, bfloat16, float32"),
    "device": ((Q, Q.to("meta"), Q), {}, "k is on meta; needs cpu as q"),
    "negative bound": ((T, T, T), {**RAGGED, "max_seqlen_q": -5}, "max_seqlen_q is -5; needs 0 or"),
    "no batch": ((Q[0], Q[0], Q[0]), {}, r"q is of shape \[4, 6, 16\]; needs 4 dimensions"),
    "bias type": ((Q, Q, Q), {"bias_type": "pre_scale"}, 'bias_type is "pre_scale"; needs a bias'),
    "sink": ((Q, Q, Q), {"sink": torch.zeros(3)}, r"sink is of shape \[3\]; needs float32 \[4\]"),
    "alibi": ((Q, Q, Q), {"alibi": torch.zeros(3)}, r"alibi is of shape \[3\]; needs float32"),
    "alibi of batch 1": ((Q, Q, Q), {"alibi": torch.zeros(1, 4)}, r"alibi is of shape \[1, 4\]"),
    "flat alibi": ((Q, Q, Q), {"alibi": torch.zeros(8)}, r"alibi is of shape \[8\]; needs float32"),
    "turned alibi": ((Q, Q, Q), {"alibi": torch.zeros(4, 2)}, r"alibi is of shape \[4, 2\]"),
    "square sink": ((Q, Q, Q), {"sink": torch.zeros(2, 2)}, r"sink is of shape \[2, 2\]; needs"),
    "no cu_seqlens": (
        (T, T, T),
        {**RAGGED, "cu_seqlens_q": CU[:0]},
        r"cu_seqlens_q is of shape \[0",
    ),
    "dropout": ((Q, Q, Q), {"dropout": 1.0}, "dropout is 1; needs at least 0 and below 1"),
    "softcap": ((Q, Q, Q), {"softcap": -1.0}, "softcap is -1; needs 0 or more"),
    "origin": ((Q, Q, Q), {"origin": torch.zeros(2).long()}, r"origin is of shape \[2\]"),
    "engine": ((Q, Q, Q), {"engine": "fast"}, 'engine is "fast"; needs one of'),
    "gaps": ((Q, Q, Q), {"offsets_q": torch.zeros(3).int()}, "offsets_q is a tensor; needs None"),
    "gaps of q alone": (
        (T, T, T),
        {**RAGGED, "offsets_q": CU},
        "offsets_kv is None; needs a tensor, as offsets_q: with gaps both",
    ),
    "gaps of k alone": ((T, T, T), {**RAGGED, "offsets_kv": CU}, "offsets_q is None; needs"),
    "no head dim of v": ((Q, Q, Q[..., :0]), {}, r"v is of shape .*0\] with head dim 0; needs a"),
    "half bias": (
        (Q, Q, Q),
        {"bias": torch.zeros(6, 6).half()},
        "bias.dtype is float16; needs that of q, or float32",
    ),
    "gaps of k": ((Q, Q, Q), {"offsets_kv": torch.zeros(3).int()}, "offsets_kv is a tensor; needs"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument_what_was_seen_and_what_is_needed(name: str) -> None:
    tensors, options, text = REFUSALS[name]
    with pytest.raises(RuntimeError, match=text):
        tea.attention(*tensors, **options)


TYPES = {
    "mask": (
        torch.ones(6, 6).bool(),
        "mask is a tensor of bool; needs None, .*; give a tensor as",
    ),
    "mask of another type": (True, "mask is True; needs None, 'causal'"),
    "window": (3, r"window is 3; needs \(left, right\), each None or an integer, at least 0"),
    "window of one": ((3,), r"window is \(3,\); needs"),
    "window of fractions": ((3.5, None), r"window is \(3.5, None\); needs"),
    "bias": ([0.0], r"bias is \[0.0\]; needs a tensor or None"),
    "format": (3, "format is 3; needs a name"),
    "softcap": ("5", "softcap is '5'; needs a number"),
    "dropout": ("0.1", "dropout is '0.1'; needs a number"),
    "softcap that is None": (None, "softcap is None; needs a number"),
    "dropout that is None": (None, "dropout is None; needs a number"),
    "dropout that is empty": ("", "dropout is ''; needs a number"),
    "engine that is None": (None, "engine is None; needs a name"),
    "scale": ("auto", "scale is 'auto'; needs a number or None"),
    "cu_seqlens_q": ([0, 6], r"cu_seqlens_q is \[0, 6\]; needs a tensor or None"),
    "max_seqlen_q": (5.5, "max_seqlen_q is 5.5; needs an integer or None"),
    "origin": ((0, 0, 0, 0), r"origin is \(0, 0, 0, 0\); needs a tensor or None"),
    "deterministic": ("yes", "deterministic is 'yes'; needs True, False or None"),
    "engine": (list(range(50)), "engine is of type list; needs a name"),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_wrong_type_is_named(name: str) -> None:
    value, text = TYPES[name]
    with pytest.raises(TypeError, match=text):
        tea.attention(Q, Q, Q, **{name.split()[0]: value})


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match="v is None; needs a tensor"):
        tea.attention(Q, Q, None)
    with pytest.raises(TypeError, match=r"generator is 7; needs a torch\.Generator or None"):
        tea.attention(Q, Q, Q, dropout=0.5, generator=7)


def test_an_error_that_is_of_no_type_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match='engine is "fast"; needs one of'):
        tea.attention(Q, Q, Q, window=numpy.array([1, 1]), engine="fast")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("te_attention.torch.functional.run_minimal", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        tea.attention(Q, Q, Q, deterministic=0)


def test_a_bias_without_its_first_dimensions() -> None:
    q = torch.randn(2, 4, 6, 16)
    for shape in ((4, 6, 6), (4, 1, 6), (6, 6), (6,), ()):
        bias = torch.randn(shape, requires_grad=True)
        (got,) = torch.autograd.grad(tea.attention(q, q, q, bias=bias).square().sum(), bias)
        full = bias.expand(2, 4, 6, 6)
        whole = tea.attention(q, q, q, bias=full.contiguous())
        torch.testing.assert_close(tea.attention(q, q, q, bias=bias), whole)
        (want,) = torch.autograd.grad(whole.square().sum(), bias)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_alibi_for_each_of_the_batch() -> None:
    q, k, v = (torch.randn(2, 4, 6, 16) for _ in range(3))
    slopes = torch.rand(2, 4)
    each = [
        tea.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], alibi=slopes[i]) for i in (0, 1)
    ]
    torch.testing.assert_close(tea.attention(q, k, v, alibi=slopes), torch.cat(each))
    one = tea.attention(q[:1], k[:1], v[:1], alibi=slopes[:1])
    torch.testing.assert_close(one, each[0])


def test_paged_refusals() -> None:
    pool = torch.zeros(3, 4, 4, 16)
    table = torch.zeros(2, 2, dtype=torch.int32)
    paged = {**RAGGED, "page_table": table}
    with pytest.raises(RuntimeError, match="max_seqlen_kv is 9; needs at most the 8 slots"):
        tea.attention(T, pool, pool, max_seqlen_kv=9, **paged)
    with pytest.raises(ValueError, match="page_table is given and an input requires a gradient"):
        tea.attention(T.clone().requires_grad_(), pool, pool, **paged)
    with pytest.raises(RuntimeError, match=r"page_table is of shape \[1, 2\]; needs \[2, pages"):
        tea.attention(T, pool, pool, **{**paged, "page_table": table[:1]})


def test_strides_are_what_the_problem_says() -> None:
    line = tea.explain(Q, Q, Q).splitlines()[0].split()
    assert "q=384,16,96" in line  # batch, seq, head
    packed = torch.zeros(2, 6, 12, 16)
    q, k, v = packed.split(4, dim=2)
    assert "k=1152,192,16" in tea.explain(q, k, v, format="bshd").split()


def test_strides_of_dimensions_of_one_make_no_new_problem() -> None:
    one = torch.zeros(8, 4, 6, 16)[::8]  # a batch of one with a large stride
    assert tea.explain(one, one, one) == tea.explain(*(Q[:1],) * 3)


def test_unaligned_memory_is_reported_to_the_engine() -> None:
    memory = torch.randn(1 + 2 * 4 * 6 * 16)
    q = memory[1:].view(2, 4, 6, 16)
    torch.testing.assert_close(tea.attention(q, q, q), tea.attention(*(q.clone(),) * 3))


def test_explain_says_how_memory_is_aligned_and_how_o_lies() -> None:
    q = torch.zeros(1 + Q.numel())[1:].view_as(Q)
    line = tea.explain(q, q, q).splitlines()[0].split()
    assert "alignment=4" in line
    assert "o=384,64,16" in line  # the heads of a token side by side
    assert "alignment=4" not in tea.explain(Q, Q, Q)


def test_explain_refuses_an_engine_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match='engine is "fast"; needs one of'):
        tea.explain(Q, Q, Q, engine="fast")
    assert "reference: " in tea.explain(Q, Q, Q, engine="reference")


SHAPES = (
    *("rank", "dtype", "dtype of v", "heads", "v", "dim", "batch", "integers"),
    "no batch",
)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_refused_without_memory_too(name: str) -> None:
    tensors, options, text = REFUSALS[name]
    with pytest.raises(RuntimeError, match=text):
        tea.attention(*(t.to("meta") for t in tensors), **options)


def test_shapes_are_refused_when_compiled() -> None:
    compiled = torch.compile(tea.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"dimensions for format bhsd"):
        compiled(Q[0], Q[0], Q[0])
    with pytest.raises(Exception, match="window is 3; needs"):
        compiled(Q, Q, Q, window=3)


def test_explain_names_a_device_without_engines() -> None:
    with pytest.raises(RuntimeError, match="q is on meta; needs the CPU or a CUDA device"):
        tea.explain(*(Q.to("meta"),) * 3)


F8 = Q.to(torch.float8_e4m3fn)
FP8 = {
    "a number as a scale": (F8, tea.Fp8(0.5), r"fp8\.q_scale_inv is 0.5; needs a tensor or None"),
    "a number": (F8, 0.5, "fp8 is 0.5; needs an Fp8, 'current' or None"),
    "a name as a type": (F8, tea.Fp8(o_dtype="bf16"), r"fp8\.o_dtype is 'bf16'; needs a torch\.dt"),
    "no FP8": (Q, tea.Fp8(), "q.dtype is float32; needs float8_e4m3fn or float8_e5m2 with fp8"),
}


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_refused_by_name(name: str) -> None:
    q, fp8, text = FP8[name]
    with pytest.raises((TypeError, ValueError), match=text):
        tea.attention(q, q, q, fp8=fp8)


def test_numbers_too_large_for_the_operators() -> None:
    for window in ((2**63, None), (None, 2**62 + 1)):
        with pytest.raises(ValueError, match=r"window is .*; needs .* and at most 2\*\*62"):
            tea.attention(Q, Q, Q, window=window)
    with pytest.raises(ValueError, match="max_seqlen_q is 9223372036854775808; needs an integer"):
        tea.attention(T, T, T, **RAGGED, max_seqlen_q=2**63)
    with pytest.raises(RuntimeError, match=r"window is 9223372036854775807; needs from 0 to 2\^62"):
        torch.ops.te_attention.forward(Q, Q, Q, window_left=2**63 - 1)


def test_no_alibi_may_be_none() -> None:
    assert torch.equal(tea.attention(Q, Q, Q, alibi=None), tea.attention(Q, Q, Q))
