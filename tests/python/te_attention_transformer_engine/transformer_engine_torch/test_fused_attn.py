"""fused_attn_fwd and fused_attn_bwd against the oracle, their auxiliary tensors, their refusals."""

import pytest
import torch

import transformer_engine_torch as tex
from kit import Case
from te_attention import torch as tea
from tex_cases import BIASES, LAYOUTS, MASKS, SOFTMAXES, Call, Choice, drawn, run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DENSE = tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
THD = tex.NVTE_QKV_Layout.NVTE_THD_THD_THD
BLOCKS, SIZE = 12, 25  # random calls: the product


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_each_layout_with_each_mask(layout: tex.NVTE_QKV_Layout, device: str) -> None:
    for mask in MASKS:
        wrong = run(Choice(layout, mask), large=mask % 2 == 0, device=device)
        assert not wrong, wrong


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_calls_agree_with_the_oracle(block: int, device: str) -> None:
    for seed in range(SIZE * block, SIZE * (block + 1)):
        choice = drawn(seed)
        wrong = run(choice, large=seed % 2 == 0, device=device)
        assert not wrong, f"{choice}\n{wrong}"


def forward(choice: Choice, **changes: object) -> list:
    with Case(choice.line()) as case:
        case.fill(False)
        return tex.fused_attn_fwd(*Call(case, choice, "cpu").forward_call()._replace(**changes))


def test_the_published_example() -> None:
    """The page of TransformerEngine's extension unpacks what forward returns into three."""
    q, k, v = (torch.randn(2, 32, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    cu_seqlens = torch.tensor([0, 32, 64], dtype=torch.int32)
    output, softmax_lse, rng_state = tex.fused_attn_fwd(
        *(32, 32, True, 0.125, 0.0, True, DENSE, BIASES[0], MASKS[2], SOFTMAXES[0], (-1, 0), False),
        *(cu_seqlens, cu_seqlens, q, k, v, torch.bfloat16, None, None, None, None),
        *(None, None, None, None, None, 16, False, False),
    )
    want, lse = tea.attention(q, k, v, format="bshd", mask="causal", return_lse=True)
    assert torch.equal(output, want)
    assert torch.equal(softmax_lse, lse.unsqueeze(-1))
    assert rng_state.numel() == 2


def test_auxiliary_tensors_are_in_the_order_of_the_interface() -> None:
    choice = Choice(DENSE, MASKS[2], BIASES[2], SOFTMAXES[2], training=False)
    bias, sink = torch.zeros(3, 4, 19, 24, dtype=torch.bfloat16), torch.zeros(1, 4, 1, 1)
    o, lse, rng_state, *inputs = forward(choice, Bias=bias, SoftmaxOffset=sink)
    assert o.shape == (3, 19, 4, 32)
    assert (lse.shape, lse.dtype) == ((3, 4, 19, 1), torch.float32)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    assert inputs[0] is bias
    assert inputs[1] is sink


def test_statistics_of_ragged_queries_have_no_batch() -> None:
    o, largest, sums, _ = forward(Choice(THD, MASKS[1], max_logit=True))
    _, lse, _ = forward(Choice(THD, MASKS[1]))
    torch.testing.assert_close(largest + sums.log(), lse)
    assert largest.shape == sums.shape == (25, 4, 1)
    assert not o[22:].any()  # rows after the last token are zero
    assert (largest[22:] == -torch.inf).all()
    assert not sums[22:].any()


def test_dropout_follows_the_generator() -> None:
    choice = Choice(DENSE, MASKS[0], dropout=0.5)
    states = [forward(choice, rng_gen=torch.Generator().manual_seed(n))[2] for n in (1, 1, 2)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


REFUSED = [
    ({"s_quantizer": object()}, "s_quantizer is a object; needs None without FP8 tensors"),
    ({"o_quantizer": object()}, "o_quantizer is a object; needs None without FP8 tensors"),
    ({"fake_dtype": torch.float16}, "fake_dtype is torch.float16; needs the dtype of Q"),
    ({"max_seqlen_q": 18}, "max_seqlen_q is 18; needs the 19 rows of Q"),
    ({"max_seqlen_kv": 25}, "max_seqlen_kv is 25; needs the 24 rows of K"),
    ({"Bias": torch.zeros(1)}, "Bias is a tensor; needs None with NVTE_NO_BIAS"),
    ({"bias_type": BIASES[1]}, "Bias is None; needs a tensor with NVTE_PRE_SCALE_BIAS"),
    ({"softmax_type": SOFTMAXES[1]}, "SoftmaxOffset is None; needs a tensor with NVTE_OFF_BY_ONE"),
    ({"SoftmaxOffset": torch.zeros(4)}, "SoftmaxOffset is a tensor; needs None with NVTE_VANILLA"),
    ({"page_table_k": torch.zeros(3, 1)}, "page_table_k or page_table_v is a tensor; needs None"),
    ({"qkv_layout": 25}, "25 is not a valid NVTE_QKV_Layout"),
    ({"attn_mask_type": 6}, "6 is not a valid NVTE_Mask_Type"),
    ({"qkv_layout": LAYOUTS[19], "attn_mask_type": MASKS[1]}, "page_table_k or page_table_v is No"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_forward_refuses(changes: dict, text: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=text):
        forward(Choice(DENSE, MASKS[0]), **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dp_quantizer": object()}, "dp_quantizer is a object; needs None without FP8 tensors"),
        ({"dqkv_type": tex.DType.kFloat16}, "dqkv_type is kFloat16; needs that of Q"),
        ({"Aux_CTX_Tensors": []}, "Aux_CTX_Tensors is 0 tensors; needs stats, rng_state"),
        ({"qkv_layout": LAYOUTS[19], "attn_mask_type": MASKS[1]}, "needs one without pages"),
    ],
)
def test_what_backward_refuses(changes: dict, text: str) -> None:
    choice = Choice(DENSE, MASKS[0])
    with Case(choice.line()) as case:
        case.fill(False)
        call = Call(case, choice, "cpu")
        o, *aux = tex.fused_attn_fwd(*call.forward_call())
        with pytest.raises((ValueError, NotImplementedError), match=text):
            tex.fused_attn_bwd(*call.backward_call(o, aux)._replace(**changes))


def test_too_few_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"missing .* required positional arguments: 'is_training'"):
        tex.fused_attn_fwd(1, 1)
    with pytest.raises(TypeError, match=r"missing .* required positional arguments: 'attn_scale'"):
        tex.fused_attn_bwd(1, 1)
