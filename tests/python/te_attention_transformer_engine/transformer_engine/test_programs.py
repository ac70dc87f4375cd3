"""The ways in which programs use TransformerEngine's attention, each in a few lines."""

from collections import OrderedDict

import pytest
import torch
from packaging.version import Version

import te_attention.torch as tea
import transformer_engine as te
from transformer_engine.pytorch.utils import SplitAlongDim

BF16 = torch.bfloat16


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


class Core(te.pytorch.DotProductAttention):
    """As training frameworks wrap the module: all options by keyword, one dictionary for packs."""

    def __init__(self, heads: int, groups: int, dim: int, **options: object) -> None:
        super().__init__(
            num_attention_heads=heads,
            kv_channels=dim,
            num_gqa_groups=groups,
            **{"attention_dropout": 0.0, "sequence_parallel": False, "tp_size": 1} | options,
            **{"get_rng_state_tracker": None, "tp_group": None, "layer_number": 3},
            **{"cp_group": None, "cp_global_ranks": None, "cp_stream": None},
        )
        self.packs = {"qkv_format": "thd"} if Version(te.__version__) >= Version("1.3") else {}

    def forward(self, q, k, v, mask, mask_type: str, pack: dict | None = None) -> torch.Tensor:
        more = {} if pack is None else self.packs | pack
        return super().forward(q, k, v, mask, attn_mask_type=mask_type, **more)


def test_a_layer_of_grouped_queries_with_one_projection() -> None:
    s, b, groups, dim = 16, 2, 2, 32
    core = Core(8, groups, dim, attn_mask_type="padding,causal", window_size=(5, 0))
    (mixed,) = tensors((s, b, groups, 6 * dim))
    q, k, v = SplitAlongDim.apply(mixed, 3, [4 * dim, dim, dim])
    q = q.reshape(s, b, 8, dim)
    o = core(q, k, v, None, "causal")
    want = tea.attention(q, k, v, format="sbhd", mask="causal", window=(5, 0), scale=dim**-0.5)
    assert torch.equal(o, want.flatten(-2))
    assert torch.autograd.grad(o.float().square().sum(), mixed)[0].abs().max() > 0


def test_packed_sequences_whose_starts_are_given_too() -> None:
    q, k, v = tensors((24, 8, 32), (24, 2, 32), (24, 2, 32))
    cu = torch.tensor([0, 9, 24], dtype=torch.int32)
    pack = {f"cu_seqlens_{side}": cu for side in ("q", "kv", "q_padded", "kv_padded")}
    pack |= {f"max_seqlen_{side}": cu.diff().max() for side in ("q", "kv")}
    o = Core(8, 2, 32)(q, k, v, None, "padding_causal", pack)
    alone = [
        tea.attention(*(t[a:b] for t in (q, k, v)), format="thd", mask="causal", **lengths(b - a))
        for a, b in ((0, 9), (9, 24))
    ]
    torch.testing.assert_close(o, torch.cat(alone).flatten(-2))


def lengths(rows: int) -> dict:
    cu = torch.tensor([0, rows], dtype=torch.int32)
    return {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}


def test_in_place_of_sdpa() -> None:
    q, k, v = tensors(*[(1, 8, 64, 32)] * 3, dtype=torch.float32)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = te.pytorch.DotProductAttention(8, 32)(*(t.permute(2, 0, 1, 3) for t in (q, k, v)))
    torch.testing.assert_close(o.unflatten(-1, (8, 32)).permute(1, 2, 0, 3), want)


def test_a_head_dim_that_is_no_multiple_of_eight() -> None:
    q, k, v = tensors(*[(12, 2, 4, 90)] * 3)
    mask = torch.zeros(2, 1, 1, 12, dtype=torch.bool)
    mask[0, ..., 7:] = True
    o = te.pytorch.DotProductAttention(4, 90, attn_mask_type="padding")(q, k, v, mask)
    assert o[7:, 0].abs().max() == 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.float().sum(), (q, k, v)))


@pytest.mark.parametrize("paged", [False, True])
def test_generation_with_a_cache(paged: bool) -> None:
    options = {"is_paged": paged, "page_size": 16 if paged else None}
    cache = te.pytorch.InferenceParams(2, 64, 2, 32, BF16, **options)
    cache.allocate_memory(1)
    core = te.pytorch.DotProductAttention(
        4, 32, 2, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1
    ).eval()
    q, k, v = (t.detach() for t in tensors((2, 9, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32)))
    rows = []
    for a, b in ((0, 6), (6, 7), (7, 8), (8, 9)):
        cache.pre_step(OrderedDict((name, b - a) for name in range(2)))
        rows.append(core(*(t[:, a:b] for t in (q, k, v)), inference_params=cache))
    want = tea.attention(q, k, v, format="bshd", mask="causal", scale=32**-0.5).flatten(-2)
    torch.testing.assert_close(torch.cat(rows, 1), want, atol=2e-2, rtol=2e-2)


def test_recomputation_with_fp8_off() -> None:
    tracker = te.pytorch.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)
    options = {"attention_dropout": 0.1, "get_rng_state_tracker": lambda: tracker}
    core = te.pytorch.DotProductAttention(4, 32, qkv_format="bshd", **options)
    q, k, v = tensors(*[(2, 8, 4, 32)] * 3)
    with te.pytorch.fp8_autocast(enabled=False):
        o = te.pytorch.checkpoint(
            core, q, k, v, get_rng_state_tracker=lambda: tracker, use_reentrant=False
        )
    assert torch.autograd.grad(o.float().sum(), q)[0].isfinite().all()
