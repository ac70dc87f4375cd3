"""The shorter way into FP8: the same bits as by FusedAttnFunc, and which calls take it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from te_attention.torch.fp8 import DelayedScaling, Float8CurrentScaling, FP8GlobalStateManager
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import (
    _fp8_direct,
    dot_product_attention,
)
from transformer_engine.pytorch.cpp_extensions.fused_attn import META_DO, META_DP, META_QKV, META_S
from transformer_engine.pytorch.distributed import checkpoint

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_FUSED_ATTN_BACKEND")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """The direct calls of a test, which begins without cached choices."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    FP8GlobalStateManager.reset()
    monkeypatch.setattr(dot_product_attention, "_dispatches", {})
    monkeypatch.setattr(dot_product_attention, "_latest", ((), None))
    found: list = []
    original = _fp8_direct._attend

    def counted(*arguments: object) -> tuple:
        found.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(_fp8_direct, "_attend", counted)
    return found


def drawn(seed: int, groups: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    shapes = [(2, 48, n, 32) for n in (2, groups, groups)]
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def inputs_of(module: DotProductAttention, side: str) -> list:
    """The quantizers of q, k, v and S, or of dO and dP: those of 16-bit results cast nothing."""
    places = {"scaling_fwd": (META_QKV, META_S), "scaling_bwd": (META_DO, META_DP)}[side]
    return [module.quantizers[side][place] for place in places]


def steps(kind: str, module: DotProductAttention, training: bool = True, **options: object) -> list:
    """O, gradients and the scales of four iterations."""
    recipe = RECIPES[kind](fp8_dpa=True)
    out = []
    for i in range(4):
        qkv = drawn(i, module.num_gqa_groups, options.pop("dtype", torch.bfloat16))
        with te.autocast(recipe=recipe), torch.set_grad_enabled(training):
            o = module(*qkv, **options)
        out.append(o.detach())
        if training:
            out += torch.autograd.grad(o.float().square().sum(), qkv)
        for side in ("scaling_fwd", "scaling_bwd"):
            state = module.fp8_meta[side]
            out += [state.scale.clone(), state.amax_history.clone()]
            out += [t.clone() for q in inputs_of(module, side) for t in (q.scale, q.amax)]
    return out


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("module", "call"),
    [
        ({}, {}),
        ({"num_gqa_groups": 1, "attn_mask_type": "no_mask"}, {}),
        ({"window_size": (9, 0)}, {"dtype": torch.float16}),
        ({"softmax_scale": 0.3}, {"core_attention_bias_type": "alibi"}),
    ],
    ids=["plain", "grouped", "window", "alibi"],
)
def test_it_computes_the_same_bits(
    module: dict, call: dict, training: bool, kind: str, calls: list, monkeypatch
) -> None:
    found = steps(kind, DotProductAttention(2, 32, qkv_format="bshd", **module), training, **call)
    assert len(calls) == 4
    FP8GlobalStateManager.reset()
    monkeypatch.setattr(_fp8_direct.DirectFp8, "serves", staticmethod(lambda *_: False))
    dot_product_attention._dispatches.clear()
    monkeypatch.setattr(dot_product_attention, "_latest", ((), None))
    wanted = steps(kind, DotProductAttention(2, 32, qkv_format="bshd", **module), training, **call)
    assert len(calls) == 4
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_backward_uses_the_scales_of_its_forward(calls: list) -> None:
    """An autocast() that ends in between updates the state, and not what was saved."""
    module = DotProductAttention(2, 32, qkv_format="bshd")
    recipe = DelayedScaling(fp8_dpa=True, amax_history_len=1, amax_compute_algo="most_recent")
    q, k, v = drawn(0)
    with te.autocast(recipe=recipe):
        o = module(q, k, v)
    wanted = torch.autograd.grad(o.float().square().sum(), (q, k, v), retain_graph=True)
    for state in (module.fp8_meta["scaling_fwd"],):
        state.scale.mul_(2)
    found = torch.autograd.grad(o.float().square().sum(), (q, k, v))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", RECIPES)
def test_backward_has_the_recipe_of_its_forward(kind: str, calls: list) -> None:
    """A forward pass under another recipe in between makes other quantizers and states."""
    (other,) = (name for name in RECIPES if name != kind)
    module, qkv = DotProductAttention(2, 32, qkv_format="bshd"), drawn(0)
    with te.autocast(recipe=RECIPES[kind](fp8_dpa=True)):
        o = module(*qkv)
    wanted = torch.autograd.grad(o, qkv, torch.ones_like(o), retain_graph=True)
    state = module.fp8_meta["scaling_bwd"]
    scale = state.scale.clone()
    context = te.autocast(recipe=RECIPES[other](fp8_dpa=True))
    with context, pytest.warns(UserWarning, match="the recipe changes"):
        module(*qkv)
    state.scale.copy_(scale)  # which the end of autocast() has updated
    found = torch.autograd.grad(o, qkv, torch.ones_like(o))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    assert len(calls) == 2


class Operators(TorchDispatchMode):
    """The names of what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", RECIPES)
def test_a_direction_is_one_operator(kind: str) -> None:
    module = DotProductAttention(2, 32, qkv_format="bshd")
    steps(kind, module)  # the first scale of dP is found by other operators
    qkv = drawn(0)
    dout = torch.ones(2, 48, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=RECIPES[kind](fp8_dpa=True)), Operators() as called:
        o = module(*qkv)
        torch.autograd.grad(o, qkv, dout)
    found = [n for n in called.names if n != "aten::detach"]  # of saved and returned tensors
    wanted = ["te_attention::fp8_attention_forward_minimal"]
    assert found == [*wanted, "te_attention::fp8_attention_backward_minimal"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [128, 1024])
@pytest.mark.parametrize("kind", RECIPES)
def test_fp8_launches_at_most_two_more_kernels_for_each_direction(kind: str, rows: int) -> None:
    """Two casts with delayed scaling; the largest magnitude and a cast with current scaling, by one
    kernel for small tensors.
    """
    q, k, v = (torch.randn(1, rows, 1, 128, device="cuda").bfloat16() for _ in range(3))
    qkv = [t.requires_grad_() for t in (q, k, v)]
    dout = torch.ones(1, rows, 128, dtype=torch.bfloat16, device="cuda")

    def casts(recipe: object) -> list[str]:
        module = DotProductAttention(1, 128, qkv_format="bshd")
        for _ in range(2):
            with te.autocast(recipe=recipe):
                torch.autograd.grad(module(*qkv), qkv, dout)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with te.autocast(recipe=recipe), torch.profiler.profile(activities=activities) as profile:
            torch.autograd.grad(module(*qkv), qkv, dout)
            torch.cuda.synchronize()
        names = [e.name for e in profile.events() if "Memcpy" not in e.name]
        assert not [n for n in names if "elementwise" in n], names
        of_casts = ("quantize<", "quantize_small<", "find_maxima<")
        return [n for n in names for cast in of_casts if cast in n]

    found = casts(RECIPES[kind](fp8_dpa=True))
    assert len(found) == (2 if kind == "current" and rows == 128 else 4), found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RECIPES)
def test_nothing_waits_for_the_device(kind: str) -> None:
    module, recipe = DotProductAttention(2, 32, qkv_format="bshd"), RECIPES[kind](fp8_dpa=True)
    qkv = [t.detach().cuda().requires_grad_() for t in drawn(0)]
    dout = torch.ones(2, 48, 64, dtype=torch.bfloat16, device="cuda")
    for step in range(4):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            with te.autocast(recipe=recipe):
                torch.autograd.grad(module(*qkv), qkv, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["reduced", "existing"])
def test_a_quantizer_with_an_amax_of_its_own_takes_the_other_way(name: str, calls: list) -> None:
    module = DotProductAttention(2, 32, qkv_format="bshd")
    qkv = drawn(0)
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        module(*qkv)
        quantizer = module.quantizers["scaling_fwd"][META_QKV]
        if name == "existing":
            quantizer.use_existing_amax = True
        else:  # without a group of processes this call would fail
            quantizer.with_amax_reduction = True
            with pytest.raises(ValueError, match="process group"):
                module(*qkv)
            quantizer.with_amax_reduction = False
        module(*qkv)
    assert len(calls) == (1 if name == "existing" else 2)


@pytest.mark.parametrize("name", ["strided", "output", "padding", "float32", "checkpoint", "bwd"])
def test_other_calls_take_the_other_way(name: str, calls: list, monkeypatch) -> None:
    module = DotProductAttention(2, 32, qkv_format="bshd")
    qkv, words = drawn(0), {}
    if name == "strided":
        qkv = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in qkv]
    if name == "output":
        words["fp8_output"] = True
    if name == "padding":
        lengths = torch.tensor([0, 40, 70], dtype=torch.int32)
        words = {"attn_mask_type": "padding", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    if name == "float32":
        qkv = [t.detach().float() for t in qkv]
    if name == "bwd":
        monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        if name == "checkpoint":
            checkpoint(module, *qkv, use_reentrant=False)
        else:
            module(*qkv, **words)
    assert not calls


def test_a_change_of_the_recipe_in_place_is_noticed(calls: list) -> None:
    module = DotProductAttention(2, 32, qkv_format="bshd")
    recipe = DelayedScaling(fp8_dpa=True)
    for length in (1024, 4):
        recipe.amax_history_len = length
        with te.autocast(recipe=recipe):
            module(*drawn(0))
        assert len(module.fp8_meta["scaling_fwd"].amax_history) == length
    recipe.fp8_dpa = False
    with te.autocast(recipe=recipe):
        module(*drawn(0))
    assert len(calls) == 2
