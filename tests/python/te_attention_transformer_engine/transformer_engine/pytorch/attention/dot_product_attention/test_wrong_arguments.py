"""Wrong arguments of DotProductAttention are refused with their names, values and needs."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from transformer_engine.pytorch import DotProductAttention

HEADS, DIM = 4, 16
Q, T = torch.zeros(2, 6, HEADS, DIM), torch.zeros(8, HEADS, DIM)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


def module(**options: object) -> DotProductAttention:
    return DotProductAttention(
        **{"num_attention_heads": HEADS, "kv_channels": DIM, "qkv_format": "bshd"} | options
    )


def call(q: object = Q, k: object = Q, v: object = Q, **options: object) -> Callable:
    return lambda: module()(q, k, v, **options)


def ragged(**options: object) -> Callable:
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_kv": CU} | options
    return call(T, T, T, qkv_format="thd", attn_mask_type="padding", **lengths)


PAIR = "(left, right), two integers"
DIMS = "an integer above 0, or a pair of them"
REFUSED = {
    "query_layer is None; needs a tensor": call(None),
    "key_layer is of type ndarray; needs a tensor": call(k=Q.numpy()),
    "value_layer is of type list; needs a tensor": call(v=[1.0]),
    "attention_mask is of type list; needs a tensor or None": call(
        attention_mask=[True], attn_mask_type="padding"
    ),
    "cu_seqlens_q is of type list; needs a tensor or None": call(
        cu_seqlens_q=[0, 3], cu_seqlens_kv=[0, 3], attn_mask_type="padding"
    ),
    "core_attention_bias is of type float; needs a tensor or None": call(
        core_attention_bias=1.0, core_attention_bias_type="post_scale_bias"
    ),
    "alibi_slopes is of type list; needs a tensor or None": call(
        alibi_slopes=[0.5], core_attention_bias_type="alibi"
    ),
    "cu_seqlens_q and attention_mask is None; needs one of them for padding": call(
        cu_seqlens_kv=CU, attn_mask_type="padding"
    ),
    "cu_seqlens_kv and attention_mask is None; needs one of them for padding": call(
        cu_seqlens_q=CU, attn_mask_type="padding"
    ),
    f"window_size is 3; needs {PAIR}": call(window_size=3),
    f"window_size is 'ab'; needs {PAIR}": call(window_size="ab"),
    f"window_size is (2.5, 0); needs {PAIR}": call(window_size=(2.5, 0)),
    f"window_size is (3, 0, 1); needs {PAIR}": partial(module, window_size=(3, 0, 1)),
    f"window_size is (1.5, 0); needs {PAIR}": partial(module, window_size=(1.5, 0)),
    "max_seqlen_q is 2.5; needs an integer or None": ragged(max_seqlen_q=2.5),
    "max_seqlen_kv is '8'; needs an integer or None": ragged(max_seqlen_kv="8"),
    "max_seqlen_kv is -1; needs 0 or more": ragged(max_seqlen_q=8, max_seqlen_kv=-1),
    "num_gqa_groups is 0; needs a divisor of the 4 heads": partial(module, num_gqa_groups=0),
    "num_gqa_groups is -2; needs a divisor of the 4 heads": partial(module, num_gqa_groups=-2),
    **{
        f"attention_dropout is {p!r}; needs a number from 0 to below 1": partial(
            module, attention_dropout=p
        )
        for p in (-0.1, 1.0, 1.5, float("nan"), "a", None)
    },
    f"kv_channels is 0; needs {DIMS}": partial(module, kv_channels=0),
    f"kv_channels is [16, 16]; needs {DIMS}": partial(module, kv_channels=[16, 16]),
    f"kv_channels is (16, 16, 16); needs {DIMS}": partial(module, kv_channels=(16, 16, 16)),
    f"kv_channels is 16.5; needs {DIMS}": partial(module, kv_channels=16.5),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_argument_is_named(text: str) -> None:
    with pytest.raises((ValueError, AssertionError), match=f"^{re.escape(text)}$") as caught:
        REFUSED[text]()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AssertionError)


def test_a_window_of_a_list_is_a_window() -> None:
    q = torch.randn(2, 6, HEADS, DIM)
    assert torch.equal(module()(q, q, q, window_size=[2, 0]), module(window_size=(2, 0))(q, q, q))
