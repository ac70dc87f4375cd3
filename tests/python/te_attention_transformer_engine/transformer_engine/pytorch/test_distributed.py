"""Random states by name, and checkpoints."""

import pytest
import torch

from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HERE = "cuda" if torch.cuda.is_available() else "cpu"  # where a tracker's states are


def test_a_fork_draws_from_its_own_state() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 1 << 20)
    torch.manual_seed(3)
    outside = torch.rand(4, device=HERE)
    torch.manual_seed(3)
    with tracker.fork("a"):
        first = torch.rand(4, device=HERE)
    with tracker.fork("b"):
        other = torch.rand(4, device=HERE)
    assert torch.equal(torch.rand(4, device=HERE), outside)
    with tracker.fork("a"):
        second = torch.rand(4, device=HERE)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]).sort().values.unique(),
                       torch.cat([first, second]).sort().values)  # fmt: skip
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)


def test_states_come_and_go() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    assert set(tracker.get_states()) == {"a"}


def test_names_and_seeds_are_used_once() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    with pytest.raises(RuntimeError, match="seed is 1, which a state has; needs another one"):
        tracker.add("b", 1)
    with pytest.raises(RuntimeError, match="name is 'a', which exists; needs another one"):
        tracker.add("a", 2)
    with pytest.raises(KeyError, match="name is 'c'; needs one of"), tracker.fork("c"):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_finds_the_states_again(reentrant: bool) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    x = torch.ones(64, device=HERE, requires_grad=True)
    calls = []

    def layer(x, factor=1.0):
        with tracker.fork():
            calls.append(torch.rand_like(x))
        return x * calls[-1] * factor

    options = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda: tracker}
    y = checkpoint(layer, x, factor=3.0, **options)
    after = tracker.get_states()["model-parallel-rng"]
    (gradient,) = torch.autograd.grad(y.sum(), x) if not reentrant else (None,)
    if reentrant:
        y.sum().backward()
        gradient = x.grad
    assert len(calls) == 2
    assert torch.equal(calls[0], calls[1])
    assert torch.equal(gradient, 3 * calls[0])
    assert tracker.get_states()["model-parallel-rng"] is after


def test_distributed_activations_are_refused() -> None:
    with pytest.raises(ValueError, match="distribute_saved_activations is True"):
        checkpoint(lambda x: x, torch.ones(1), distribute_saved_activations=True)
