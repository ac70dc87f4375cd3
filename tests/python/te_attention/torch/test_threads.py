"""Threads of the CPU engines: as many as PyTorch may use; and forked processes."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, torch
from te_attention.torch import attention

{before}
q = torch.randn(2, 8, 512, 64, requires_grad=True)
count = lambda: len(os.listdir("/proc/self/task"))
started = count()
attention(q, q, q, mask="causal").backward(torch.ones(2, 8, 512, 64))
print(count() - started)
"""


def threads(before: str = "", **environment: str) -> int:
    """How many threads attention() started; PyTorch's own backward starts none on the CPU."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS",)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_one_thread_where_pytorch_has_one() -> None:
    assert threads(OMP_NUM_THREADS="1") == 0  # as torchrun sets it
    assert threads("torch.set_num_threads(1)") == 0


def test_our_own_variable_overrides_it() -> None:
    assert threads(OMP_NUM_THREADS="1", TE_ATTENTION_THREADS="3") == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_more_threads_where_pytorch_has_more() -> None:
    assert threads("torch.set_num_threads(2)") >= 1


FORK = """
import os, signal, torch
from te_attention.torch import attention

torch.set_num_threads(1)
q = torch.randn(1, 4, 512, 64, requires_grad=True)
def train():
    attention(q, q, q, mask="causal").sum().backward()
train()
child = os.fork()
if child == 0:
    signal.alarm(60)
    train()
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_trains_after_its_parent() -> None:
    """With two threads of ours, which a child does not inherit, and none of OpenMP.

    libgomp, PyTorch's pool, does not survive a fork: after a parallel region in the parent, a
    child's next one hangs, in any function.
    """
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env=os.environ | {"TE_ATTENTION_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "0\n"
