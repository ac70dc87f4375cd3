#!/usr/bin/env python3
"""Context parallelism of JAX over the GPUs of one process: results, messages and times.

usage: PYTHONPATH=BUILD/python:BUILD/python/te_attention_transformer_engine:tests/python
       python3 bench/jax_context_parallel.py [--devices 2] [--parts NAME,...] [--rows 32768]
       [--heads 32] [--output FILE] [--device cuda]

Each part runs in a process of its own, for at most its limit, and prints figures with their bars,
one line of JSON each. Exit code 0 only if every part ends in time and meets its bars. --device cpu
tests the program with small sizes on devices of the host.

    results   each strategy, layout and option against one device, forward and gradients
    bits      dropout draws the bits of one device
    messages  collectives of the compiled programs
    grid      a part of TransformerEngine's cases (tests/python/te_jax_mesh_cases.py)
    speed     causal attention over the N-th part of the time of one device
    overlap   speed, with XLA's latency-hiding scheduler
"""

import argparse
import collections
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from facts import commit
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mesh_cases as cases
from te_attention.jax import attention, context_parallel

GRID = Path(__file__).resolve().parents[1] / "tests/python/te_jax_mesh_cases.py"
DIM = 128
TIMED = (("ring", "zigzag"), ("ring", "striped"), ("all_gather", "zigzag"))
CAUSAL = {"is_causal": True}
# The results of one device, those of several, and the parts of these are each rounded to bf16.
LIMIT = 4 * 2.0**-8
MESSAGE = re.compile(
    r"= .*? (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


class Program:
    """The figures of one part."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Nothing is missed yet."""
        self.options, self.missed = options, False
        self.is_small = options.device == "cpu"

    def figure(self, what: str, value: object, bar: object = None, *, ok: bool = True) -> None:
        """Prints a figure and its bar."""
        self.missed |= not ok
        line = {"part": self.options.part, "what": what, "value": value, "bar": bar, "ok": ok}
        print(json.dumps(line), flush=True)

    def results(self) -> None:
        """Each strategy, layout and option."""
        rows, n = 128 if self.is_small else 2048, self.options.devices
        ways = [(*way, 1) for way in cases.EVERY] + [("ring", "striped", rows // (4 * n))]
        qkv = qkv_of(2, rows, 8, 2)
        for name, (static, small) in options_of(rows).items():
            expected = program(attention, static)(qkv, small)
            for strategy, layout, stripe in ways:
                attend = cases.shared(n, strategy, layout, small, stripe=stripe)
                worst = distance(program(attend, static)(qkv, small), expected)
                how = f"{name}: {strategy}, {layout} by {stripe}"
                self.figure(how, round(worst, 5), LIMIT, ok=worst <= LIMIT)

    def bits(self) -> None:
        """Scores of 0 and a value of one for each column show which probabilities are dropped."""
        zero = jnp.zeros((1, DIM, 2, DIM), jnp.bfloat16)
        eye = jnp.broadcast_to(jnp.eye(DIM, dtype=jnp.bfloat16)[None, :, None], zero.shape)

        def pattern(attend: Callable) -> np.ndarray:
            f = jax.jit(lambda: attend(zero, zero, eye, **dropping(), return_residual=True)[0] > 0)
            return np.asarray(f())

        one = pattern(attention)
        share = float(one.mean())
        self.figure("share of kept probabilities", share, "0.4 to 0.6", ok=abs(share - 0.5) < 0.1)
        for strategy, layout in cases.EVERY:
            ours = pattern(cases.shared(self.options.devices, strategy, layout, {}))
            count = int((ours != one).sum())
            self.figure(f"bits that differ: {strategy}, {layout}", count, 0, ok=count == 0)

    def messages(self) -> None:
        """One of all K and V, or N - 1 from device to device; none where heads are split."""
        n = self.options.devices
        wanted = {"all_gather": {"all-gather": 1}, "ring": {"collective-permute": n - 1}}
        for strategy, messages in wanted.items():
            f, arrays = over_devices(n, strategy, "zigzag", qkv_of(1, 1024, 8, 2))
            self.count(strategy, f.lower(*arrays), messages)
        place = NamedSharding(cases.mesh_of(n), P(None, None, "cp"))
        q, k, v = (jax.device_put(x, place) for x in qkv_of(1, 1024, 8, 8))
        self.count("heads, both directions", jax.jit(pulled(causal)).lower(q, k, v, q), {})

    def count(self, what: str, lowered: jax.stages.Lowered, wanted: dict) -> None:
        """A figure: the messages of a program."""
        found = dict(collections.Counter(MESSAGE.findall(lowered.compile().as_text())))
        self.figure(f"messages: {what}", found, wanted, ok=found == wanted)

    def grid(self) -> None:
        """Every 8th case of TransformerEngine's, with rows divided by 4."""
        small = ("--divisor", "8", "--every", "40") if self.is_small else ("--every", "8")
        command = [sys.executable, str(GRID), str(self.options.devices), *small]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, flush=True)
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
        self.figure("cases of TransformerEngine", last, "0 failed", ok=not done.returncode)

    def speed(self) -> None:
        """Forward, and both directions."""
        n, rows, heads = self.options.devices, self.options.rows, self.options.heads
        if self.is_small:
            rows, heads = 256, 2
        qkv = qkv_of(1, rows, heads, heads)
        for what in ("forward", "forward and backward"):
            given, both = (qkv, False) if what == "forward" else ([*qkv, qkv[0]], True)
            one = milliseconds(jax.jit(pulled(causal) if both else causal), given)
            self.figure(f"{what}: one device, ms", round(one, 3))
            for strategy, layout in TIMED:
                took = milliseconds(*over_devices(n, strategy, layout, given))
                self.figure(f"{what}: {strategy}, {layout}, ms", round(took, 3))
                ratio = round(took * n / one, 3)
                self.figure(f"{what}: {strategy}, {layout}, over 1/{n} of one device", ratio)

    overlap = speed


# The part, and how long it may take on a GPU, where most of the time is compilation.
PARTS = {
    **{"bits": (Program.bits, 120), "messages": (Program.messages, 120)},
    **{"speed": (Program.speed, 200), "overlap": (Program.overlap, 200)},
    **{"results": (Program.results, 500), "grid": (Program.grid, 500)},
}


def dropping() -> dict:
    """The options of dropout."""
    return {"dropout": 0.5, "dropout_key": jax.random.key(3)}


def options_of(rows: int) -> dict[str, tuple[dict, dict]]:
    """Options, and the arrays with a gradient."""
    lengths = np.array([rows - 10, rows // 3], np.int32)
    both = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    ids = np.repeat(np.array([[1, 1, 2, 0], [1, 2, 2, 3]], np.int32), rows // 4, axis=1)
    return {
        "full": ({}, {}),
        "causal": (CAUSAL, {}),
        "window": (CAUSAL | {"local_window_size": (rows // 8, 0)}, {}),
        "lengths, sink": (both | CAUSAL, {"sink": jax.random.normal(jax.random.key(5), (8,))}),
        "segments": (CAUSAL | {"q_segment_ids": ids, "max_segments": 3}, {}),
        "dropout, alibi": (CAUSAL | dropping() | {"alibi": True}, {}),
        "bias": ({}, {"bias": normal(7, 1, 8, rows, rows)}),
    }


def normal(seed: int, *shape: int) -> jax.Array:
    """A bf16 array of the first device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def qkv_of(batch: int, rows: int, heads: int, heads_kv: int) -> list[jax.Array]:
    """Q, K and V."""
    return [normal(i, batch, rows, h, DIM) for i, h in enumerate((heads, heads_kv, heads_kv))]


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one device."""
    return attention(q, k, v, **CAUSAL)


def pulled(attend: Callable) -> Callable:
    """O, and the gradients of Q, K and V from that of O, the last argument."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple:
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(dout)

    return run


def program(attend: Callable, static: dict) -> Callable:
    """O, LSE, and the gradients of all arrays."""

    def run(qkv: list, small: dict) -> tuple:
        def forward(qkv: list, small: dict) -> tuple:
            return attend(*qkv, **small, **static, return_residual=True)

        (o, lse), pull = jax.vjp(forward, qkv, small)
        dout = jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype)
        return o, lse, pull((dout, jnp.zeros_like(lse)))

    return jax.jit(run)


def over_devices(size: int, strategy: str, layout: str, given: list) -> tuple[Callable, list]:
    """A function of arrays whose rows so many devices share, and the arrays: Q, K, V and dO."""
    mesh, spec = cases.mesh_of(size), P(None, "cp")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        how = {"axis_name": "cp", "strategy": strategy, "layout": layout}
        return context_parallel(q, k, v, **how, **CAUSAL)

    local = attend if len(given) == len("qkv") else pulled(attend)
    split = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(split), [jax.device_put(x, NamedSharding(mesh, spec)) for x in given]


def distance(ours: tuple, theirs: tuple) -> float:
    """The largest difference over the largest number, of the worst array."""
    worst = 0.0
    for pair in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        x, y = (np.nan_to_num(np.asarray(a, np.float32), neginf=0, nan=np.inf) for a in pair)
        worst = max(worst, float(np.abs(x - y).max() / np.abs(y).max()))
    return worst


def milliseconds(f: Callable, arrays: list, calls: int = 3) -> float:
    """The median time of a call, of several in a row."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(calls):
            out = f(*arrays)
        jax.block_until_ready(out)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return statistics.median(times[2:])


def environment(part: str, options: argparse.Namespace) -> dict[str, str]:
    """The variables of the process of a part, which XLA reads when it starts."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    if options.device == "cpu":
        flags += [f"--xla_force_host_platform_device_count={options.devices}"]
    elif part == "overlap":
        flags += ["--xla_gpu_enable_latency_hiding_scheduler=true"]
    return os.environ | {
        "XLA_FLAGS": " ".join(flags).strip(),
        "JAX_PLATFORMS": options.device,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def in_process(part: str, options: argparse.Namespace) -> tuple[int, str]:
    """The exit code and the output of a part; an end by its limit is a failure."""
    limit = PARTS[part][1]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--part", part],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=limit,
            env=environment(part, options),
        )
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode()
        return 1, text + json.dumps({"part": part, "what": "limit, s", "value": limit, "ok": False})
    return done.returncode, done.stdout


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # the process of a part
    options = parser.parse_args()
    if options.part:
        if len(jax.devices()) < options.devices:
            parser.error(f"--devices {options.devices}: there are {len(jax.devices())}")
        of_part = Program(options)
        PARTS[options.part][0](of_part)
        sys.exit(of_part.missed)
    failed = []
    for part in options.parts.split(","):
        code, text = in_process(part, options)
        print(text, flush=True)
        failed += [part] if code else []
        if options.output:
            facts = {"commit": commit(), "jax": jax.__version__, "devices": options.devices}
            lines = [json.dumps(json.loads(x) | facts) for x in text.splitlines() if x[:1] == "{"]
            with options.output.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
    print(f"missed or failed: {', '.join(failed) if failed else 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
