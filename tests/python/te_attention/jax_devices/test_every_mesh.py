"""Every mesh with every number of key heads and every option: bits where no sum is split.

TE_ATTENTION_JAX_GRID=1 runs all of them (`make test-jax`), else every eleventh.
"""

import functools
import itertools
import os
from collections.abc import Callable

import jax
import pytest

from jax_sharding_cases import MESHES, OPTIONS, check, mesh_of, placed, program, qkv_of

HEADS_KV = (8, 4, 2, 1)
# The default engine splits work for its threads by the numbers of sequences and heads, of which a
# device has fewer: batch_invariant fixes the bits of O and LSE. "reference" adds up in one order.
ENGINES = {"default": {"batch_invariant": True}, "reference": {"engine": "reference"}}
EVERY = list(itertools.product(ENGINES, OPTIONS, HEADS_KV, MESHES))
SOME = EVERY if os.environ.get("TE_ATTENTION_JAX_GRID") else EVERY[::11]


@functools.lru_cache(maxsize=1)
def one_device(engine: str, option: str, heads_kv: int) -> tuple[Callable, list, tuple]:
    """A program, its arrays and its results."""
    static, small = OPTIONS[option]
    f, qkv = jax.jit(program(static | ENGINES[engine])), qkv_of(heads_kv)
    return f, qkv, f(qkv, small)


def exact(engine: str, option: str, heads_kv: int, mesh: str) -> tuple[str, ...]:
    """The results of which no sum is split."""
    names = ["o", "lse"]
    if engine == "default":
        return tuple(names)
    names.append("dq")
    dp, tp = (MESHES[mesh].get(axis, 1) for axis in ("dp", "tp"))
    if heads_kv % tp == 0:
        names += ["dk", "dv"]
    if dp == 1:
        names.append("sink")
    bias = OPTIONS[option][1].get("bias")
    if bias is not None and bias.ndim == 4:  # batch, heads, rows, columns
        is_split = (dp > 1 and bias.shape[0] == 1) or (tp > 1 and bias.shape[1] == 1)
        names += ["bias"] * (not is_split)
    return tuple(names)


@pytest.mark.parametrize(("engine", "option", "heads_kv", "mesh"), SOME)
def test_mesh_heads_and_option(engine: str, option: str, heads_kv: int, mesh: str) -> None:
    f, qkv, expected = one_device(engine, option, heads_kv)
    given = placed(mesh_of(MESHES[mesh]), qkv)
    out = f(given, OPTIONS[option][1])
    check(out, expected, exact(engine, option, heads_kv, mesh))
    if option != "segments":  # whose tokens are whole on each device
        assert out[0][1][0].sharding.is_equivalent_to(given[0].sharding, 4)
