"""Random cases over devices of the host: context_parallel(), sharded attention(), and one device.

usage: jax_mesh_draws.py COUNT [SEED]

Each case draws sizes, options, how many devices, and who shares what: rows by a strategy and a
layout, or batch and heads by automatic axes. Forward and gradients must be those of one device.
Prints how many failed, how often each way of sharing was drawn, and the seeds; the exit code says
whether any failed.
"""

import collections
import os
import sys

# Most of the time is compilation: LLVM need not optimise programs that run once.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mesh_cases as cases
from te_attention.jax import attention

CLEAR = 50  # cases after which compiled programs are forgotten


def segments_of(rng: np.random.Generator, batch: int, rows: int, rows_kv: int) -> dict:
    """Rows of several sequences, with padding between them; of key sometimes others."""
    most = int(rng.integers(1, 5))

    def ids(rows: int) -> np.ndarray:
        out = np.zeros((batch, rows), np.int32)
        for row in out:
            cuts = np.sort(rng.integers(0, rows + 1, 2 * most))
            for n in range(most):
                row[cuts[2 * n] : cuts[2 * n + 1]] = n + 1
        return out

    out = {"q_segment_ids": ids(rows), "max_segments": most}
    if rows != rows_kv or rng.random() < 0.3:
        out["kv_segment_ids"] = ids(rows_kv)
    return out


def masks_of(rng: np.random.Generator, sizes: dict) -> dict:
    """Masks, and the sequences in the rows."""
    batch, rows, rows_kv = (sizes[n] for n in ("batch", "rows", "rows_kv"))
    out = {"is_causal": bool(rng.integers(2))}
    if rng.random() < 0.4:
        bounds = (int(rng.integers(rows)), int(rng.integers(rows)))
        out["local_window_size"] = tuple(x if rng.random() < 0.7 else None for x in bounds)
    if rng.random() < 0.3:
        out["bottom_right"] = True
    if rng.random() < 0.3:
        out |= segments_of(rng, batch, rows, rows_kv)
    elif rng.random() < 0.3:
        out["query_seq_lengths"] = rng.integers(0, rows + 1, batch).astype(np.int32)
        out["key_value_seq_lengths"] = rng.integers(0, rows_kv + 1, batch).astype(np.int32)
    if rng.random() < 0.15:
        out["origin"] = tuple(int(x) for x in rng.integers(0, rows, 4))
    return out


def options_of(rng: np.random.Generator, sizes: dict) -> tuple[dict, dict]:
    """Options, and the arrays that have a gradient."""
    batch, heads, rows, rows_kv = (sizes[n] for n in ("batch", "heads", "rows", "rows_kv"))
    static, small = masks_of(rng, sizes), {}
    if rng.random() < 0.2:
        static["softcap"] = float(rng.uniform(1, 20))
    if rng.random() < 0.2:
        static["alibi"] = True if rng.random() < 0.5 else rng.random(heads, np.float32)
    if rng.random() < 0.2:
        static |= {"dropout": 0.3, "dropout_key": jax.random.key(int(rng.integers(1 << 30)))}
    sink = rng.integers(4)
    if sink == 0:
        static["sink"] = "off_by_one"
    elif sink == 1:
        small["sink"] = rng.normal(size=heads).astype(np.float32)
    if rng.random() < 0.3 and "q_segment_ids" not in static:
        full = (batch, heads, rows, rows_kv)
        shape = [n if rng.random() < 0.7 else 1 for n in full]
        small["bias"] = rng.normal(size=shape).astype(np.float32)
    return static, small


def automatic(rng: np.random.Generator, static: dict, small: dict, qkv: list) -> str:
    """Batch and heads of query over axes of the mesh."""
    dp, tp = ((2, 4), (4, 2), (8, 1), (1, 8), (2, 2))[rng.integers(5)]
    mesh = jax.make_mesh(
        (dp, tp), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: dp * tp]
    )
    axes = (("dp", dp), (None, 1), ("tp", tp))
    specs = [
        P(*(name if x.shape[i] % n == 0 else None for i, (name, n) in enumerate(axes))) for x in qkv
    ]
    given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(qkv, specs, strict=True)]
    cases.compare(attention, static, small, given, qkv)
    return "batch and heads"


def shared(rng: np.random.Generator, static: dict, small: dict, qkv: list) -> str:
    """Rows over one axis."""
    size = (2, 4, 8)[rng.integers(3)]
    strategy, layout = cases.EVERY[rng.integers(len(cases.EVERY))]
    stripe = 1
    if layout == "striped":
        stripe = (1, 2, 16 // size)[rng.integers(3)]
    attend = cases.shared(size, strategy, layout, small, stripe=stripe)
    cases.compare(attend, static, small, qkv, qkv)
    return f"{strategy}, {layout}" + f" by {stripe}" * (stripe > 1)


def draw(seed: int) -> tuple[str, str]:
    """How a case shares what, and the text of a failure, or nothing."""
    rng = np.random.default_rng(seed)
    heads_kv = (1, 2, 4)[rng.integers(3)]
    heads = heads_kv * (1, 2, 3, 4)[rng.integers(4)]
    sizes = {"batch": (1, 2, 4, 8)[rng.integers(4)], "heads": heads}
    sizes["rows"] = 16 * int(rng.integers(1, 4))
    sizes["rows_kv"] = sizes["rows"] if rng.random() < 0.6 else 16 * int(rng.integers(1, 4))
    dims = [8 * int(rng.integers(1, 4)) for _ in range(2)]
    shapes = (
        (sizes["rows"], heads, dims[0]),
        (sizes["rows_kv"], heads_kv, dims[0]),
        (sizes["rows_kv"], heads_kv, dims[1]),
    )
    qkv = [rng.normal(size=(sizes["batch"], *s)).astype(np.float32) for s in shapes]
    static, small = options_of(rng, sizes)
    words = f"{sizes}, {static.keys()}, {static.get('local_window_size')}, {small.keys()}"
    over = automatic if rng.random() < 0.4 else shared
    try:
        return over(rng, static, small, qkv), ""
    except Exception as error:  # a refusal too: every case is one that works
        return "failed", f"{over.__name__}: {words}\n{error}"


def main() -> None:
    """Runs COUNT cases."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found = collections.Counter()
    for number in range(seed, seed + count):
        how, failure = draw(number)
        found[how] += 1
        if failure:
            print(f"seed {number}: {failure}", flush=True)
        if number % CLEAR == 0:
            jax.clear_caches()
    for how, cases_of in sorted(found.items()):
        print(f"{cases_of:6} {how}")
    print(f"{found['failed']} failed of {count}: seeds {seed} to {seed + count - 1}")
    sys.exit(found["failed"] > 0)


if __name__ == "__main__":
    main()
