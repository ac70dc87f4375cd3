"""TransformerEngine's tests of JAX attention over devices, through transformer_engine.jax.

usage: te_jax_mesh_cases.py DEVICES [--divisor N] [--every N] [--first N]

Self and cross attention over batch and heads, and context parallelism, over every mesh of so many
devices of the host; rows are divided. Values are compared with attention in float32. Prints every
case that differs, how many ran, and why the others did not; the exit code says whether any failed.
"""

import argparse
import collections
import itertools
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

if __name__ == "__main__":
    # Most of the time is compilation: LLVM need not optimise programs that run once.
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={sys.argv[1]} --xla_backend_optimization_level=0"
    )
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import te_jax_cases as cases
import transformer_engine.jax as te
from transformer_engine.jax.attention import (
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    ReorderStrategy,
    inverse_reorder_causal_load_balancing,
    reorder_causal_load_balancing,
)

AXES = ("dp", "cp", "tpsp")
RESOURCE = te.MeshResource(dp_resource="dp", cp_resource="cp", tpsp_resource="tpsp")
VANILLA = AttnSoftmaxType.VANILLA_SOFTMAX
WHOLE = 32  # batch of self and cross attention, of which this is divided by 8


class Shared(NamedTuple):
    """A case over a mesh."""

    case: cases.Grid
    mesh: tuple[int, int, int]
    strategy: CPStrategy = CPStrategy.DEFAULT
    is_balanced: bool = False
    stripe: int | None = None

    def __str__(self) -> str:
        """As a test is named."""
        names = (str(self.mesh), self.strategy.name, f"stripe {self.stripe}" * bool(self.stripe))
        return " ".join((str(self.case), *names, "balanced" * self.is_balanced))


def meshes(devices: int) -> list[tuple[int, int, int]]:
    """Of dp, cp and tp with that product."""
    every = itertools.product((1, 2), (1, 2, 4, 8), (1, 2))
    return [x for x in every if np.prod(x) == devices]


def self_and_cross(devices: int, divisor: int) -> Iterator[Shared]:
    """TestDistributedSelfAttn and TestDistributedCrossAttn."""
    shapes = [(WHOLE, 512, 12, 64, 3), (WHOLE, 1024, 16, 128, 3), (WHOLE, 128, 12, 64, 2)]
    shapes += [(WHOLE, 512, 16, 64, 2)]
    for mesh in meshes(devices):
        if mesh[1] > 1:
            continue
        for (batch, rows, heads, dim, packed), name, softmax, has_bias in itertools.product(
            shapes, ("PADDING_MASK", "CAUSAL_MASK"), AttnSoftmaxType, (False, True)
        ):
            if has_bias and packed == 2:  # cross attention has none
                continue
            sizes = (batch // 8, rows // divisor, rows // divisor, heads, heads, dim, dim)
            shape = (*sizes, jnp.bfloat16, packed)
            mask = AttnMaskType[name]
            case = cases.Grid(mask, softmax, shape, False, 0.0, False, "seqlens", has_bias)
            yield Shared(case, mesh)


def context_parallel(devices: int, divisor: int) -> Iterator[Shared]:
    """TestDistributedContextParallelSelfAttn."""
    gather, ring = CPStrategy.ALL_GATHER, CPStrategy.RING
    for mesh, (batch, rows, heads, dim), kv_groups in itertools.product(
        meshes(devices), ((2, 128, 8, 128), (4, 256, 16, 64)), (1, 8)
    ):
        n = rows * 2 * mesh[1] // divisor
        sizes = (batch, n, n, heads, heads // kv_groups, dim, dim, jnp.bfloat16)
        options = itertools.product(
            (gather, ring), (1, 2), ("CAUSAL_MASK", "NO_MASK"), (False, True)
        )
        for strategy, packed, mask, is_balanced in options:
            rest = (False, 0.0, False, "seqlens", False)
            case = cases.Grid(AttnMaskType[mask], VANILLA, (*sizes, packed), *rest)
            yield Shared(case, mesh, strategy, is_balanced)
        mask = AttnMaskType.PADDING_CAUSAL_MASK
        for left in (None, 5):
            rest = (True, 0.0, left is not None, "segment_ids", False, left, 5)
            for stripe in (64, 128) if rows == 128 else ():  # the first shape
                case = cases.Grid(mask, VANILLA, (*sizes, 1), *rest)
                yield Shared(case, mesh, gather, True, stripe // divisor)
        for left in (None, 20):
            rest = (True, 0.0, left is not None, "segment_ids", False, left, 2)
            yield Shared(cases.Grid(mask, VANILLA, (*sizes, 1), *rest), mesh, ring, True, 1)


def refused(shared: Shared) -> str:
    """Why a case does not run, or nothing."""
    if shared.case.shape[4] % shared.mesh[2]:
        return "heads of key that the devices of heads do not divide: TransformerEngine skips them"
    return cases.refused(shared.case)


def run(shared: Shared) -> str:
    """The error of a case, or an empty text."""
    case, size = shared.case, shared.mesh[1]
    devices = jax.devices()[: np.prod(shared.mesh)]
    mesh = Mesh(np.array(devices).reshape(shared.mesh), AXES)
    kind = (ReorderStrategy.Striped if case.is_thd else ReorderStrategy.DualChunkSwap, size, 1)

    def order(x: jax.Array) -> jax.Array:
        return reorder_causal_load_balancing(x, *kind, shared.stripe)

    def back(x: jax.Array) -> jax.Array:
        return inverse_reorder_causal_load_balancing(x, *kind, shared.stripe)

    def put(x: jax.Array, *axes: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def place(qkv: list, small: list, descriptor: object, seed: object) -> tuple:
        bias, offset = small
        qkv = [put(x, *AXES) for x in qkv]
        bias = None if bias is None else put(bias, None, "tpsp")
        offset = None if offset is None else put(offset, None, "tpsp")
        axes = {1: ("dp",), 2: ("dp", "cp")}
        leaves = [put(x, *axes[x.ndim]) if x.size else x for x in jax.tree.leaves(descriptor)]
        tree = jax.tree.structure(descriptor)
        return qkv, [bias, offset], jax.tree.unflatten(tree, leaves), seed

    moved = (order, back) if shared.is_balanced and size > 1 else (lambda x: x, lambda x: x)
    more = {"context_parallel_strategy": shared.strategy, "stripe_size": shared.stripe}
    more["context_parallel_causal_load_balanced"] = shared.is_balanced
    with mesh, te.autocast(mesh_resource=RESOURCE):
        return cases.run(case, placed=cases.Placed(place, *moved), **more)


def grid(devices: int, divisor: int) -> list[Shared]:
    """All cases."""
    return [*self_and_cross(devices, divisor), *context_parallel(devices, divisor)]


def main() -> None:
    """Runs every --every-th case that runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", type=int)
    parser.add_argument("--divisor", type=int, default=4)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    every = grid(options.devices, options.divisor)
    reasons = [refused(shared) for shared in every]
    running = [x for x, reason in zip(every, reasons, strict=True) if not reason]
    failed = 0
    for i, shared in enumerate(chosen := running[options.first :: options.every]):
        try:
            wrong = run(shared)
        except Exception as error:  # any of them is a finding
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failed += 1
            print(f"{shared}: {wrong}", flush=True)
        if i % 50 == 49:  # compiled programs stay in memory otherwise
            jax.clear_caches()
    print(f"{len(every)} combinations on {options.devices} devices, {len(running)} that run")
    for reason, count in collections.Counter(filter(None, reasons)).most_common():
        print(f"{count:6} {reason}")
    print(f"{failed} of {len(chosen)} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
