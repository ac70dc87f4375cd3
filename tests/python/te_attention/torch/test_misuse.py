"""Misuses of attention() and Attention, each with its whole error text, which misuses.txt lists."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.attention.bias
from torch import Tensor

from te_attention import torch as tea

Q, K2 = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
T, CU = torch.zeros(12, 4, 16), torch.tensor([0, 6, 12], dtype=torch.int32)
POOL, TABLE = torch.zeros(3, 4, 4, 16), torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
WIDE, TURNED = torch.zeros(1, 1, 8, 1032), torch.zeros(2, 4, 16, 8).mT
F8, LEARNED = Q.to(torch.float8_e4m3fn), Q.clone().requires_grad_()
NUMBER = torch.ones((), requires_grad=True)
THD = {"format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU}
JAGGED = torch.nested.nested_tensor([torch.zeros(n, 4, 16) for n in (3, 5)], layout=torch.jagged)
HEADS_FIRST = JAGGED.transpose(1, 2)
RANDOM = {"dropout": 0.5, "rng_state": torch.tensor([1, 2])}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(*tensors: object, **options: object) -> Callable:
    return partial(tea.attention, *(tensors or (Q, Q, Q)), **options)


def alike(tensor: Tensor, **options: object) -> Callable:
    return call(tensor, tensor, tensor, **options)


def ragged(**options: object) -> Callable:
    return alike(T, **(THD | options))


def paged(**options: object) -> Callable:
    return call(T, POOL, POOL, **(THD | {"page_table": TABLE} | options))


# Keyword arguments of SDPA, flash-attn, xformers, FlashInfer, TransformerEngine and misspelt ones.
KEYWORDS = (
    *("is_causal", "causal", "attn_mask", "attention_mask", "attn_bias", "key_padding_mask"),
    *("dropout_p", "p", "softmax_scale", "sm_scale", "scaling", "window_size", "sliding_window"),
    *("logits_soft_cap", "alibi_slopes", "sinks", "s_aux", "enable_gqa", "training"),
    *("block_table", "cu_seqlens", "cu_seqlens_k", "max_seqlen", "max_seqlen_k", "seqlens_k"),
    *("return_attn_probs", "return_softmax_lse", "qkv_format", "tensor_layout", "backend"),
    *("maks", "sofcap", "foo"),
)
SHAPES = {
    "q of no dimensions": call(Q[0, 0, 0, 0], Q, Q),
    "q of 3 dimensions": alike(Q[0]),
    "q of 5 dimensions": alike(Q[None]),
    "k of 3 dimensions": call(Q, Q[0], Q),
    "v of 3 dimensions": call(Q, Q, Q[0]),
    "heads that do not divide": call(Q, Q[:, :3], Q[:, :3]),
    "more heads in k": call(K2, Q, Q),
    "no heads in k": call(Q, Q[:, :0], Q[:, :0]),
    "v with other heads": call(Q, Q, K2),
    "v with other rows": call(Q, Q, Q[:, :, :4]),
    "k with another head dim": call(Q, Q[..., :8], Q),
    "another batch in k": call(Q, Q[:1], Q[:1]),
    "head dim 1032": alike(WIDE),
    "head dim 520 with gradients": alike(torch.zeros(1, 1, 8, 520, requires_grad=True)),
    "head dim 0": alike(Q[..., :0]),
    "head dim of v 1032": call(Q[:1, :1], Q[:1, :1], WIDE),
    "head dim of v 0": call(Q, Q, Q[..., :0]),
    "stride in the last dimension": alike(TURNED),
    "expanded": call(Q, Q[:1, :1, :1].expand_as(Q), Q),
}
DTYPES = {
    "integers": alike(Q.int()),
    "booleans": alike(Q.bool()),
    "complex": alike(Q.to(torch.complex64)),
    "k of another dtype": call(Q, Q.half(), Q),
    "v of another dtype": call(Q, Q, Q.double()),
    "k on another device": call(Q, Q.to("meta"), Q),
    "sparse": alike(Q.to_sparse()),
    "nested k with a dense q": call(Q, HEADS_FIRST, HEADS_FIRST),
    "jagged q alone": call(HEADS_FIRST, Q, Q),
    "jagged in the wrong format": alike(JAGGED),
    "jagged with lengths": alike(HEADS_FIRST, cu_seqlens_q=CU),
    "jagged thd": alike(JAGGED, format="thd"),
    "jagged with lse": alike(HEADS_FIRST, return_lse=True),
    "q is a list": call([1.0], Q, Q),
    "k is None": call(Q, None, Q),
    "v is an array": call(Q, Q, Q.numpy()),
}
NAMES = {
    "mask lower": call(mask="lower"),
    "mask True": call(mask=True),
    "boolean mask": call(mask=torch.ones(8, 8).bool()),
    "mask padding_causal": call(mask="padding_causal"),
    "format BHSD": call(format="BHSD"),
    "format 3": call(format=3),
    "format of three": call(format="bhsd_bhsd_bhsd"),
    "engine None": call(engine=None),
    "bias_type": call(bias=Q[:1, :1, :, :8], bias_type="add"),
    "alibi text": call(alibi="yes"),
    "sink text": call(sink="learnable"),
    "deterministic text": call(deterministic="yes"),
    "batch_invariant text": call(batch_invariant="yes"),
}
NUMBERS = {
    "dropout 1": call(dropout=1.0),
    "dropout -0.1": call(dropout=-0.1),
    "dropout 10": call(dropout=10),
    "dropout nan": call(dropout=float("nan")),
    "dropout text": call(dropout="0.1"),
    "dropout None": call(dropout=None),
    "softcap negative": call(softcap=-1.0),
    "softcap inf": call(softcap=float("inf")),
    "softcap None": call(softcap=None),
    "scale text": call(scale="auto"),
    "scale inf": call(scale=float("inf")),
    "scale too large": call(scale=1e39),
    "scale with gradient": call(scale=NUMBER),
    "scale of two numbers": call(scale=torch.ones(2)),
    "scale of two numbers and a window": call(scale=torch.ones(2), window=(1, 1)),
    "dropout of two numbers": call(dropout=torch.ones(2)),
    "softcap with gradient": call(softcap=NUMBER),
    "window 3": call(window=3),
    "window of one": call(window=(3,)),
    "window of fractions": call(window=(3.5, None)),
    "window -2": call(window=(-2, 0)),
    "window text": call(window="causal"),
}
TENSORS = {
    "boolean bias": call(bias=torch.ones(8, 8).bool()),
    "bias of another dtype": call(bias=torch.zeros(8, 8).half()),
    "bias of a wrong shape": call(bias=torch.zeros(8, 7)),
    "bias of five dimensions": call(bias=torch.zeros(1, 2, 4, 8, 8)),
    "bias as a list": call(bias=[0.0]),
    "bias_type without bias": call(bias_type="pre_scale"),
    "causal bias": call(bias=torch.nn.attention.bias.causal_lower_right(8, 8)),
    "sink of a wrong shape": call(sink=torch.zeros(3)),
    "sink of integers": call(sink=torch.zeros(4).int()),
    "square sink": call(sink=torch.zeros(2, 2)),
    "sink as a number": call(sink=1.0),
    "bias on another device": call(bias=torch.zeros(8, 8, device="meta")),
    "sink on another device": call(sink=torch.zeros(4, device="meta")),
    "slopes on another device": call(alibi=torch.zeros(4, device="meta")),
    "rng_state on another device": call(**(RANDOM | {"rng_state": RANDOM["rng_state"].to("meta")})),
    "alibi of a wrong shape": call(alibi=torch.zeros(3)),
    "alibi with gradient": call(alibi=torch.zeros(4, requires_grad=True)),
    "alibi of integers": call(alibi=torch.zeros(4).int()),
    "two sources": call(**RANDOM, generator=torch.Generator()),
    "rng_state of int32": call(dropout=0.5, rng_state=ints(1, 2)),
    "rng_state of three": call(dropout=0.5, rng_state=torch.tensor([1, 2, 3])),
    "generator 7": call(dropout=0.5, generator=7),
    "origin of two": call(origin=torch.tensor([0, 0])),
    "origin of int32": call(origin=ints(0, 0, 0, 0)),
    "origin below zero": call(origin=torch.tensor([0, 0, -1, 0])),
    "origin as a tuple": call(origin=(0, 0, 0, 0)),
}
LENGTHS = {
    "thd without lengths": alike(T, format="thd"),
    "thd without lengths of k": alike(T, format="thd", cu_seqlens_q=CU),
    "lengths as a list": ragged(cu_seqlens_q=[0, 6, 12]),
    "lengths of int16": ragged(cu_seqlens_q=CU.short()),
    "lengths on another device": ragged(cu_seqlens_kv=CU.to("meta")),
    "lengths of floats": ragged(cu_seqlens_q=CU.float()),
    "other batch in k": ragged(cu_seqlens_kv=CU[:2]),
    "empty lengths": ragged(cu_seqlens_q=CU[:0]),
    "lengths instead of sums": ragged(cu_seqlens_q=ints(6, 6)),
    "lengths beyond 2^32": ragged(cu_seqlens_q=CU.long() + torch.tensor([0, 2**32, 2**32])),
    "decreasing": ragged(cu_seqlens_q=ints(0, 8, 4)),
    "beyond the tokens": ragged(cu_seqlens_q=ints(0, 6, 13)),
    "negative start": ragged(cu_seqlens_q=ints(-3, 6, 12)),
    "decreasing keys": ragged(cu_seqlens_kv=ints(0, 8, 4)),
    "keys beyond": ragged(cu_seqlens_kv=ints(0, 6, 13)),
    "max_seqlen_q too small": ragged(max_seqlen_q=4),
    "max_seqlen_kv too small": ragged(max_seqlen_kv=5),
    "max_seqlen_q -5": ragged(max_seqlen_q=-5),
    "max_seqlen_q 5.5": ragged(max_seqlen_q=5.5),
    "max_seqlen_q with bhsd": call(max_seqlen_q=4),
    "padded lengths too long": call(cu_seqlens_q=ints(0, 8, 17), cu_seqlens_kv=ints(0, 8, 16)),
    "one offset": ragged(offsets_q=CU),
    "offsets with bhsd": call(offsets_q=ints(0, 0, 0)),
    "offsets beyond": ragged(offsets_q=ints(0, 9, 12), offsets_kv=CU),
    "page beyond the pool": paged(page_table=ints(0, 1, 2, 3).view(2, 2)),
    "pages of int16": paged(page_table=TABLE.short()),
    "pages of v alone": ragged(page_table_v=TABLE),
    "pages of another batch": paged(page_table=TABLE[:1]),
    "flat pages": paged(page_table=TABLE.flatten()),
    "pages without lengths": paged(cu_seqlens_kv=None),
    "pages with a gradient": call(T.clone().requires_grad_(), POOL, POOL, **THD, page_table=TABLE),
    "pages with dropout": paged(dropout=0.1),
    "max_seqlen_kv beyond the pages": paged(max_seqlen_kv=9),
    "lengths beyond the pages": paged(cu_seqlens_kv=ints(0, 6, 20)),
}
FP8 = {
    "fp8 on float32": call(fp8=tea.Fp8()),
    "fp8 True": alike(F8, fp8=True),
    "fp8 scales of a learnable tensor": alike(F8.clone().requires_grad_(), fp8=tea.Fp8()),
    "fp8 current of float64": alike(Q.double(), fp8="current"),
    "fp8 of another name": call(fp8="delayed"),
    "return_amax without fp8": call(return_amax=True),
    "fp8 scale as a number": alike(F8, fp8=tea.Fp8(1.0)),
    "fp8 o_dtype as text": alike(F8, fp8=tea.Fp8(o_dtype="bfloat16")),
}
MODULES = {
    f"Attention({', '.join(f'{n}={v!r}' for n, v in options.items())})": partial(
        tea.Attention, **options
    )
    for options in (
        *({"is_causal": True}, {"mask": "lower"}, {"dropout": 1.5}, {"window": 3}),
        *({"softcap": -1.0}, {"scale": "auto"}, {"format": "bdsh"}, {"deterministic": "yes"}),
        *({"sink_heads": -1}, {"sink_heads": 2, "sink": "off_by_one"}, {"alibi": "yes"}),
        *({"sink": "learnable"}, {"bias_type": "add"}, {"page_table": 1}, {"bias": 1}),
        *({"sink": torch.ones(0)}, {"k_descale": 1}),
    )
}
MISUSES = {
    **{f"{name}=": call(**{name: 1}) for name in KEYWORDS},
    **(SHAPES | DTYPES | NAMES | NUMBERS | TENSORS | LENGTHS | FP8 | MODULES),
}
TABLE_OF_TEXTS = Path(__file__).with_name("misuses.txt")


def observed(name: str) -> str:
    """One line of misuses.txt."""
    try:
        MISUSES[name]()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{name} | {type(error).__name__} | {error}"
    return f"{name} | accepted"


def texts() -> dict[str, str]:
    lines = TABLE_OF_TEXTS.read_text().splitlines()
    return {line.split(" | ")[0]: line for line in lines}


@pytest.mark.parametrize("name", MISUSES)
def test_the_error_says_what_is_wrong_in_the_callers_terms(name: str) -> None:
    assert observed(name) == texts()[name]


def test_the_table_has_at_least_120_misuses_and_no_stale_rows() -> None:
    assert set(texts()) == set(MISUSES)
    assert len(MISUSES) >= 120
