"""CUDA graphs: whether one is being captured, and modules that replay one."""

import pytest
import torch

from te_attention.torch.fp8 import DelayedScaling, Float8CurrentScaling, FP8GlobalStateManager
from transformer_engine.pytorch import DotProductAttention, autocast, make_graphed_callables
from transformer_engine.pytorch.cpp_extensions import fused_attn as module_scales
from transformer_engine.pytorch.graph import is_graph_capturing


def test_not_without_a_graph() -> None:
    assert not is_graph_capturing()


@pytest.mark.gpu
def test_in_a_graph() -> None:
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x * 2
        inside = is_graph_capturing()
    assert inside


SHAPE = (2, 16, 2, 32)
RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(fp8_dpa=True, amax_history_len=4),
    "current": Float8CurrentScaling(fp8_dpa=True),
}


def inputs(device: str, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(SHAPE, generator=generator) for _ in range(3)]
    return [t.to(device, torch.bfloat16).requires_grad_() for t in found]


def steps(module: torch.nn.Module, device: str, recipe: object) -> list:
    """Outputs and gradients of iterations, whose scales change from one to the next."""
    out = []
    for i in range(4):
        q, k, v = inputs(device, i)
        with autocast(enabled=recipe is not None, recipe=recipe):
            o = module(q, k, value_layer=v, attn_mask_type="causal")
        gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
        # Copies: the next replay of a graph writes to the same outputs and gradients.
        out += [t.detach().clone() for t in (o, *gradients)]
    return out


def graphed(device: str, recipe: object) -> DotProductAttention:
    module = DotProductAttention(2, 32, qkv_format="bshd")
    q, k, v = inputs(device)
    kwargs = {"value_layer": v, "attn_mask_type": "causal"}
    options = {"sample_kwargs": kwargs, "enabled": recipe is not None, "recipe": recipe}
    assert make_graphed_callables(module, (q, k), **options) is module
    return module


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_graphed_module_computes_the_same(name: str, device: str) -> None:
    FP8GlobalStateManager.reset()
    recipe = RECIPES[name]
    wanted = steps(DotProductAttention(2, 32, qkv_format="bshd"), device, recipe)
    module = graphed(device, recipe)
    for found, exact in zip(steps(module, device, recipe), wanted, strict=True):
        torch.testing.assert_close(found, exact)
    if name == "delayed":  # the scales follow the amaxes of the replays
        scales = module.fp8_meta["scaling_fwd"].scale, module.fp8_meta["scaling_bwd"].scale
        assert (scales[0][module_scales.META_QKV] != 1) & (scales[1][module_scales.META_DO] != 1)


def test_what_a_graphed_module_takes() -> None:
    module = graphed("cpu", None)
    q, k, v = inputs("cpu")
    with pytest.raises(TypeError, match="value_layer is missing; needs a tensor"):
        module(q, k)
    with pytest.raises(TypeError, match="3 positional arguments are given; needs 2"):
        module(q, k, v, value_layer=v)
    module.eval()  # not what was captured: the module's own forward()
    assert torch.equal(module(q, k, v), DotProductAttention(2, 32, qkv_format="bshd")(q, k, v))
    module.train().reset()
    assert torch.equal(module(q, k, v), DotProductAttention(2, 32, qkv_format="bshd")(q, k, v))


def test_modules_are_informed_of_capture() -> None:
    seen = []

    class Asking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(is_graph_capturing())
            return x

    module = Asking()
    (same,) = make_graphed_callables((module,), ((torch.ones(1),),))
    assert same is module
    module(torch.ones(1))
    assert seen == [False]  # on the host nothing is captured


@pytest.mark.parametrize("option", ["_order", "retain_graph_in_backward", "calibrating"])
def test_what_make_graphed_callables_refuses(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is True; needs its default"):
        make_graphed_callables(DotProductAttention(2, 32), (), **{option: True})
    with pytest.raises(ValueError, match="sample_args and sample_kwargs is of 1 and 2 modules"):
        make_graphed_callables((DotProductAttention(2, 32),) * 2, ((),))
