"""Megatron-Core's TEDotProductAttention, unmodified, on TE Attention, against float64.

Not part of `make test`: Megatron-Core is no requirement of it. To run it on the CPU,

    pip install --no-deps --target build/megatron megatron-core
    ours=build/release/python
    PYTHONPATH=$ours:$ours/te_attention_transformer_engine:build/megatron \\
        $(tools/python_env) -m pytest tests/megatron
"""

import math

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

HEADS, GROUPS, DIM, ROWS, BATCH = 4, 2, 32, 24, 2


def module(
    mask: AttnMaskType = AttnMaskType.causal, dims: tuple | None = None, **options: object
) -> TEDotProductAttention:
    """The module as Megatron's attention layers make it."""
    assert HAVE_TE
    settings = {
        "num_layers": 1,
        "hidden_size": HEADS * DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS if dims is None else HEADS,
        "attention_dropout": 0.0,
    }
    config = TransformerConfig(**settings, **options)
    channels = {} if dims is None else {"k_channels": dims[0], "v_channels": dims[1]}
    groups = ProcessGroupCollection(tp=None, cp=None, hcp=None)
    return TEDotProductAttention(config, 1, mask, "self", pg_collection=groups, **channels)


def definition(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """O [s, heads * d] and the largest logit of each head, of [s, heads, d] in float64."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    x = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        x = x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), -math.inf)
    lse = x.logsumexp(-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None, None].expand_as(lse))
    o = torch.exp(x - lse) @ v
    return o.transpose(0, 1).flatten(1), x.amax((-2, -1))


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


def check(o: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(o.double(), want, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(o)
    got = torch.autograd.grad(o, inputs, upstream)
    expected = torch.autograd.grad(want, inputs, upstream.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def batched(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """The definition of sbhd tensors."""
    each = [definition(*(t[:, b] for t in (q, k, v)), **options)[0] for b in range(q.shape[1])]
    return torch.stack(each, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_sbhd(causal: bool) -> None:
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    q, k, v = tensors(*[(ROWS, BATCH, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)])
    o = module(mask)(q, k, v, None, mask)
    check(o, batched(q, k, v, causal=causal), [q, k, v])


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_softmax_types(softmax_type: str) -> None:
    layer = module(softmax_type=softmax_type)
    q, k, v = tensors(*[(ROWS, BATCH, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)])
    sink = torch.zeros(HEADS)
    if softmax_type == "learnable":
        with torch.no_grad():
            layer.softmax_offset.copy_(torch.randn(HEADS).view_as(layer.softmax_offset))
        sink = layer.softmax_offset.detach().flatten()
    o = layer(q, k, v, None, AttnMaskType.causal)
    check(o, batched(q, k, v, sink=sink), [q, k, v])


def test_packed_sequences() -> None:
    lengths = (5, 12, 7)
    cu = torch.tensor([0, 5, 17, 24], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    q, k, v = tensors(*[(ROWS, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)])
    o = module()(q, k, v, None, AttnMaskType.padding_causal, packed_seq_params=packed)
    parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    want = torch.cat([definition(*part)[0] for part in parts])
    check(o.reshape_as(want), want, [q, k, v])


def test_mla_head_dims() -> None:
    q, k, v = tensors(*[(ROWS, BATCH, HEADS, dim) for dim in (192, 192, 128)])
    o = module(dims=(192, 128))(q, k, v, None, AttnMaskType.causal)
    check(o, batched(q, k, v), [q, k, v])


def test_the_largest_logits_of_qk_clip() -> None:
    layer = module(qk_clip=True)
    q, k, v = tensors(*[(ROWS, BATCH, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)])
    o = layer(q, k, v, None, AttnMaskType.causal)
    check(o, batched(q, k, v), [q, k, v])
    each = [definition(*(t[:, b] for t in (q, k, v)))[1] for b in range(BATCH)]
    want = torch.stack(each).amax(0)
    torch.testing.assert_close(layer.current_max_attn_logits.double(), want)
