"""Parts that are merged with results which are there, and the limit of a kernel's CTAs."""

import json
from pathlib import Path

import pytest
import torch

from te_attention.torch import attention
from te_attention.torch._arguments import Arguments
from te_attention.torch._library import OPS

ROWS, KEYS, FIRST = 600, 500, 192  # keys of the first of two parts
MASKS = ("none", "causal", "window")


def tensors(device: str, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> list:
    """q, k, v and dO, bshd."""
    generator = torch.Generator().manual_seed(5)
    sizes = ((ROWS, heads[0]), (KEYS, heads[1]), (KEYS, heads[1]), (ROWS, heads[0]))
    made = [torch.randn(2, n, h, dim, generator=generator) for n, h in sizes]
    return [t.to(dtype).to(device) for t in made]


def options_of(mask: str) -> dict:
    """Of attention(). The window leaves rows without a key in one of the parts, or in both."""
    return {"window": (40, 7)} if mask == "window" else {"mask": mask}


def part_of(mask: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: slice) -> Arguments:
    """The arguments of a part of the keys."""
    window = {"window_left": 40, "window_right": 7} if mask == "window" else {}
    origin = torch.tensor([0, 0, 0, keys.start], device=q.device)
    name = "none" if mask == "window" else mask
    return Arguments(q, k[:, keys], v[:, keys], "bshd", name, True, origin=origin, **window)


PARTS = (slice(0, FIRST), slice(FIRST, KEYS))


def test_engines_of_the_host_do_not_accumulate() -> None:
    q, k, v, dout = tensors("cpu", (2, 2), 16, torch.bfloat16)
    arguments = part_of("none", q, k, v, PARTS[0])
    o, lse = torch.full((2, ROWS, 2, 16), 7.0), torch.full((2, 2, ROWS), 7.0)
    assert not OPS.part_forward(o, lse, None, True, *arguments)
    gradients = [torch.full(t.shape, 7.0) for t in arguments[:3]]
    incoming = (dout, None, o.bfloat16(), lse, False, False)
    for accumulate in (1, 2, 3):
        assert not OPS.part_backward(*gradients, *incoming, accumulate, *arguments)[2]
    assert all((t == 7).all() for t in (o, lse, *gradients))
    assert OPS.part_forward(o, lse, None, False, *arguments)
    assert OPS.part_backward(*gradients, *incoming, 0, *arguments)[2]
    with pytest.raises(RuntimeError, match="max_ctas is -2; needs 1 to"):
        attention(q, k, v, format="bshd", max_ctas=-2)
    with pytest.raises(TypeError, match="max_ctas is 'few'; needs an integer or None"):
        attention(q, k, v, format="bshd", max_ctas="few")
    plain = attention(q, k, v, format="bshd")
    assert torch.equal(plain, attention(q, k, v, format="bshd", max_ctas=1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])  # dK and dV of one tile, or of several
@pytest.mark.parametrize("mask", MASKS)
def test_hopper_merges_parts(
    mask: str, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    q, k, v, dout = tensors("cuda", heads, dim, dtype)
    exact = [t.cpu().double() for t in (q, k, v)]
    wanted, wanted_lse = attention(*exact, format="bshd", return_lse=True, **options_of(mask))
    o = torch.full((2, ROWS, heads[0], dim), torch.nan, device="cuda")
    lse = torch.full((2, heads[0], ROWS), torch.nan, device="cuda")
    for i, keys in enumerate(PARTS):
        assert OPS.part_forward(o, lse, None, i > 0, *part_of(mask, q, k, v, keys))
    torch.testing.assert_close(o.cpu().double(), wanted, atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, atol=2e-3, rtol=1e-3)
    hidden = wanted_lse == -torch.inf
    assert hidden.any() == (mask == "window")
    assert (o.cpu().transpose(1, 2)[hidden] == 0).all()
    assert (lse.cpu()[hidden] == -torch.inf).all()
    incoming = (dout, None, o.to(dtype), lse, False, False)
    for keys in PARTS:
        arguments = part_of(mask, q, k, v, keys)
        alone = [torch.empty(t.shape, device="cuda") for t in arguments[:3]]
        assert OPS.part_backward(*alone, *incoming, 0, *arguments)[2]
        before = [torch.randn_like(t) for t in alone]
        for bits in (1, 2, 3):
            sums = [t.clone() for t in before]
            assert OPS.part_backward(*sums, *incoming, bits, *arguments)[2]
            for i, (got, part, old) in enumerate(zip(sums, alone, before, strict=True)):
                adds = bits & (1 if i == 0 else 2)
                assert torch.equal(got, part + old if adds else part), (i, bits)


@pytest.mark.gpu
def test_what_hopper_does_not_merge_is_left_alone() -> None:
    q, k, v, dout = tensors("cuda", (4, 4), 64, torch.bfloat16)
    arguments = part_of("none", q, k, v, PARTS[0])
    shape, lse = (2, ROWS, 4, 64), torch.full((2, 4, ROWS), 7.0, device="cuda")
    narrow = torch.full(shape, 7.0, device="cuda", dtype=torch.bfloat16)
    assert not OPS.part_forward(narrow, lse, None, True, *arguments)  # O is not fp32
    o = torch.full(shape, 7.0, device="cuda")
    for other in ({"off_by_one": True}, {"engine": "portable"}):
        assert not OPS.part_forward(o, lse, None, True, *arguments._replace(**other))
    gradients = [torch.full(t.shape, 7.0, device="cuda") for t in arguments[:3]]
    incoming = (dout, None, narrow, lse, False, False)
    for other in ({"softcap": 3.0}, {"engine": "portable"}):  # backward of portable
        assert not OPS.part_backward(*gradients, *incoming, 3, *arguments._replace(**other))[2]
    assert all((t == 7).all() for t in (narrow, o, lse, *gradients))


def grids(call, path: Path) -> list[tuple[str, int]]:
    """The kernels that a call launches and their CTAs."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = [(e["name"], e["args"]["grid"]) for e in events if e.get("cat") == "kernel"]
    return [(name, x * y * z) for name, (x, y, z) in found]


TILES = ("forward_kernel", "backward_kernel", "dq_kernel", "piecewise_kernel", "combine_kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["", "portable"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_max_ctas_limits_kernels_and_changes_no_bits(engine: str, dim: int, tmp_path: Path) -> None:
    q, k, v, dout = tensors("cuda", (8, 2), dim, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options = {"format": "bshd", "mask": "causal", "engine": engine, "deterministic": True}
    results = {}

    def call(limit: int | None) -> None:
        o = attention(*leaves, max_ctas=limit, **options)
        results[limit] = (o, *torch.autograd.grad(o, leaves, dout))

    call(None)
    for limit in (1, 7, 66):
        seen = grids(lambda limit=limit: call(limit), tmp_path / f"{limit}.json")
        tiles = [(name, ctas) for name, ctas in seen if any(t in name for t in TILES)]
        assert len(tiles) >= 2, seen
        assert all(ctas <= limit for _, ctas in tiles), tiles
        assert all(map(torch.equal, results[limit], results[None]))


@pytest.mark.gpu
def test_max_ctas_limits_decoding(tmp_path: Path) -> None:
    q = torch.randn(3, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(3, 2, 3000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wanted, found = attention(q, k, v), []
    seen = grids(lambda: found.append(attention(q, k, v, max_ctas=5)), tmp_path / "trace.json")
    assert seen and all(ctas <= 5 for _, ctas in seen), seen
    torch.testing.assert_close(found[0], wanted, atol=1e-2, rtol=1e-2)
