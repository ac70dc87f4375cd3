"""The module: options kept, dropout only in training, a sink that learns."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed import device_mesh, fsdp

from te_attention import torch as tea


def test_it_is_the_function_with_its_options() -> None:
    q, k, v = (torch.randn(2, 4, 6, 16) for _ in range(3))
    module = tea.Attention(mask="causal", window=(3, None), softcap=5.0)
    want = tea.attention(q, k, v, mask="causal", window=(3, None), softcap=5.0)
    assert torch.equal(module(q, k, v), want)
    assert torch.equal(module(q, k, v, mask=None, window=None, softcap=0.0), tea.attention(q, k, v))
    assert repr(module) == "Attention(mask='causal', window=(3, None), softcap=5.0, format='bhsd')"
    assert "dropout=0.5, sink_heads=4" in repr(tea.Attention(dropout=0.5, sink_heads=4))


def test_dropout_is_for_training_only() -> None:
    q = torch.randn(1, 1, 32, 16)
    module = tea.Attention(dropout=0.5)
    assert not torch.equal(module(q, q, q), module(q, q, q))
    module.eval()
    assert torch.equal(module(q, q, q), tea.attention(q, q, q))


def test_the_sink_is_a_parameter() -> None:
    module = tea.Attention(sink_heads=4)
    assert [name for name, _ in module.named_parameters()] == ["sink"]
    q = torch.randn(1, 4, 5, 16)
    module(q, q, q).sum().backward()
    assert module.sink.grad.abs().max() > 0


class Block(nn.Module):
    """A layer with parameters on both sides of its attention, and one in it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.attention = tea.Attention(mask="causal", sink_heads=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))


def _block_and_batch() -> tuple[Block, torch.Tensor]:
    torch.manual_seed(0)
    return Block(), torch.randn(2, 9, 32)


def _train_a_shard(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model, batch = _block_and_batch()
    mesh = device_mesh.init_device_mesh("cpu", (2,))
    fsdp.fully_shard(model.attention, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    model(batch[rank : rank + 1]).square().mean().backward()
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(whole, Path(folder) / "gradients")
    distributed.barrier()
    distributed.destroy_process_group()
    # A rank aborted in two of five runs of the suites on two cores ("terminate called without an
    # active exception"), never alone. The presumed cause is a thread of the process group that
    # releases tensors while the interpreter is finalised, which this exit skips.
    os._exit(0)


def test_two_processes_of_fsdp_have_the_gradients_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_a_shard, (str(tmp_path),), nprocs=2)
    got = torch.load(tmp_path / "gradients")
    model, batch = _block_and_batch()
    model(batch).square().mean().backward()
    assert got["attention.sink"].abs().max() > 0
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_of_a_module_in_another_type(dtype: torch.dtype) -> None:
    module = tea.Attention(sink_heads=2).to(dtype)
    q = torch.randn(1, 2, 8, 16, dtype=dtype, requires_grad=True)
    o = module(q, q, q)
    o.float().square().sum().backward()
    assert o.dtype == module.sink.grad.dtype == dtype
    assert module.sink.grad.any()


def test_it_takes_every_option_of_the_function() -> None:
    q = torch.randn(1, 4, 6, 16)
    slopes = torch.rand(4)
    options = {"alibi": slopes, "bias_type": "pre_scale", "return_lse": True, "engine": "cpu"}
    bias = torch.randn(6, 6)
    module = tea.Attention(**options, sink="off_by_one", return_max_logit=True)
    assert dict(module.named_buffers())["alibi"].equal(slopes)
    got = module(q, q, q, bias=bias)
    want = tea.attention(q, q, q, **options, sink="off_by_one", return_max_logit=True, bias=bias)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))
    learned = tea.Attention(sink=torch.tensor([0.5, 1.0, 1.5, 2.0]))
    assert learned(q, q, q).equal(tea.attention(q, q, q, sink=learned.sink))
    assert learned.sink.requires_grad


def test_options_are_checked_at_construction() -> None:
    for form in ("bhsd", "bshd", "sbhd", "thd", "thd_bshd"):
        tea.Attention(
            format=form, mask="causal", alibi=True, max_seqlen_q=5 if form == "thd" else None
        )
    with pytest.raises(RuntimeError, match='mask is "lower"; needs none'):
        tea.Attention(mask="lower")
