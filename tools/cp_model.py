#!/usr/bin/env python3
"""Prints predicted efficiencies of context parallelism: python/te_attention/_cp_cost.py's formula.

tools/cp_model.py                        the table of docs/context-parallel.md
tools/cp_model.py --seqlen 131072 --heads 32 --heads-kv 8 --dim 128 --world 2 4 8 --gbps 50
"""

import argparse
import importlib.util
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "python" / "te_attention" / "_cp_cost.py"
STRATEGIES = ("ring", "all_gather", "a2a", "a2a+ring", "halo")
K = 1024


def model():
    """The module, without its package: that would load the library."""
    spec = importlib.util.spec_from_file_location("cp_cost", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["cp_cost"] = module
    spec.loader.exec_module(module)
    return module


COST = model()


def line(name: str, strategy: str, shape, topology) -> str:
    """A row of the table: efficiency forward and backward, transfer over computation of a step."""
    forward = COST.predict(strategy, shape, topology)
    backward = COST.predict(strategy, shape, topology, backward=True)
    return (
        f"{name:44} {strategy:10} {shape.world:5} {forward.efficiency:8.3f} "
        f"{backward.efficiency:8.3f} {forward.transfer:9.2f} {forward.received / 2**20:10.1f}"
    )


HEADER = f"{'case':44} {'strategy':10} {'ranks':>5} {'forward':>8} {'backward':>8} " + (
    f"{'transfer':>9} {'MiB a rank':>10}"
)


def table() -> list[str]:
    """The cases of the documentation."""
    nvlink, nic = COST.Topology(), COST.Topology(gbps_outer=50.0)

    def shape(world: int, seqlen: int, heads: tuple[int, int], **options: object):
        return COST.Shape(world, seqlen, seqlen, *heads, 128, 128, causal=True, **options)

    mha, gqa = (32, 32), (64, 8)
    rows = [("128 Ki, 32 heads, NVLink", "ring", shape(n, 128 * K, mha)) for n in (2, 4, 8)]
    rows += [
        ("the same, contiguous", "ring", shape(n, 128 * K, mha, zigzag=False)) for n in (2, 4, 8)
    ]
    rows += [("128 Ki, 64/8 heads, NVLink", "ring", shape(8, 128 * K, gqa))]
    rows += [("128 Ki, 64/8 heads, NVLink", "a2a", shape(8, 128 * K, gqa))]
    window = shape(8, 128 * K, mha, window=(1023, None), zigzag=False)
    rows += [("128 Ki, window 1,024, NVLink", s, window) for s in ("halo", "all_gather", "ring")]
    out = [line(name, strategy, s, nvlink) for name, strategy, s in rows]
    long = ((K * K, "1 Mi, 64/8 heads, NIC of 50 GB/s"), (8 * K * K, "8 Mi, the same"))
    for seqlen, name in long:
        for strategy in ("ring", "a2a+ring"):
            for n in (64, 256, 1024):
                out.append(line(name, strategy, shape(n, seqlen, gqa, inner=8), nic))
    return out


def main() -> None:
    """The table, or the case that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--inner", type=int, default=1, help="ranks of a group that shares a node")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--window", type=int, help="columns before the diagonal")
    parser.add_argument("--contiguous", action="store_true")
    parser.add_argument("--gbps", type=float, default=370.0, help="GB/s of a rank and direction")
    parser.add_argument("--gbps-outer", type=float, help="between groups of --inner ranks")
    parser.add_argument("--tflops", type=float, nargs=2, default=[600.0, 500.0])
    a = parser.parse_args()
    print(HEADER)
    if a.seqlen is None:
        print("\n".join(table()))
        return
    topology = COST.Topology(*a.tflops, a.gbps, a.gbps_outer)
    for n in a.world:
        shape = COST.Shape(n, a.seqlen, a.seqlen, a.heads, a.heads_kv or a.heads, a.dim, a.dim,
                           causal=not a.full, window=(a.window, None), zigzag=not a.contiguous,
                           inner=a.inner)  # fmt: skip
        for strategy in STRATEGIES:
            if strategy == "a2a+ring" and (a.inner == 1 or n % a.inner):
                continue
            if strategy == "halo" and a.window is None:
                continue
            print(line(f"{a.seqlen} rows", strategy, shape, topology))


if __name__ == "__main__":
    main()
