"""Time of attention() in JAX: of the host on the CPU, against jax.nn and the C API on a GPU.

usage: jax_front_end.py [--repeat N] [--limit SECONDS] [--te-attn PROGRAM]

On the CPU: a jitted call of a tiny problem; `empty` is a jitted custom call that computes nothing
(the dropout pattern of an empty shape). On a GPU: forward, and forward and backward, of a tiny and
of a large causal problem against jax.nn.dot_product_attention(implementation="cudnn"), alone and 16
in a row in one program; then the time of one call in a row against `te-attn time` on the same
problem and engine. Prints one line of JSON for each figure with its bar, the least of its blocks,
which alternate between the two sides; the exit code says whether a bar is missed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from te_attention import jax as tea

BLOCKS = 100
SHAPES = {"tiny": (1, 128, 2, 64), "large": (4, 2048, 16, 128)}  # batch, rows, heads, dim
IN_A_ROW = 16
PROGRAM = Path(__file__).parents[1] / "build/release/te-attn"


def block(function, arrays: tuple, repeat: int) -> float:
    """Seconds of one call, of several that are queued."""
    start = time.perf_counter()
    for _ in range(repeat):
        out = function(*arrays)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeat


def seconds(calls: dict, repeat: int, limit: float) -> dict[str, float]:
    """Of each call the least of its blocks, in turns: others may use the machine, too."""
    for function, arrays in calls.values():  # compiles, then captures in command buffers
        for _ in range(3):
            jax.block_until_ready(function(*arrays))
    least = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + limit
    for i in range(BLOCKS):
        for name, (function, arrays) in calls.items():
            least[name] = min(least[name], block(function, arrays, repeat))
        if time.perf_counter() > end and i:
            break
    return least


def report(name: str, figures: dict, ratio: float | None = None, bar: float | None = None) -> bool:
    """Prints a figure; whether its bar is met."""
    fact = {"call": name, **figures}
    is_met = bar is None or ratio <= bar
    if bar is not None:
        fact |= {"figure": round(ratio, 3), "bar": bar, "met": is_met}
    device = jax.devices()[0].device_kind
    print(json.dumps(fact | {"jax": jax.__version__, "device": device}), flush=True)
    return is_met


def microseconds(least: dict) -> dict:
    """As they are printed."""
    return {f"{name} us": round(value * 1e6, 2) for name, value in least.items()}


def host(repeat: int, limit: float) -> list[bool]:
    """The host's time on the CPU: at most 6 us more than an empty call."""
    x = jnp.ones((1, 1, 1, 8))  # one product, so that the host's time is all
    key = jnp.zeros(4, jnp.uint32)
    both = jax.grad(lambda *x: tea.attention(*x).sum(), (0, 1, 2))
    calls = {
        "jit": (jax.jit(lambda x: x + 1), (x,)),
        "empty": (jax.jit(lambda key: tea.dropout_mask(key, 0.0, (0, 0, 0, 0))), (key,)),
        "forward": (jax.jit(tea.attention), (x, x, x)),
        "forward and backward": (jax.jit(both), (x, x, x)),
        "jax.nn": (jax.jit(jax.nn.dot_product_attention), (x, x, x)),
    }
    least = seconds(calls, repeat, limit)
    more = (least["forward"] - least["empty"]) * 1e6
    return [report("forward - empty, us", microseconds(least), more, 6.0)]


def arrays_of(shape: tuple) -> list[jax.Array]:
    """Q, K, V and the gradient of O."""
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(KEY, 4)]


def in_a_row(f, count: int):
    """`count` calls, each with the result of the one before as Q."""

    def run(q, k, v):
        for _ in range(count):
            q = f(q, k, v)
        return q

    return jax.jit(run)


def backward_in_a_row(f, count: int):
    """One forward call and `count` backward calls, each with the dQ of the one before as dO."""

    def run(q, k, v, dout):
        _, pull = jax.vjp(f, q, k, v)
        for _ in range(count):
            dout, dk, dv = pull(dout)
        return dout, dk, dv

    return jax.jit(run)


def with_backward(f):
    """Forward and backward, with the gradient of O."""

    def run(q, k, v, dout):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(dout)

    return jax.jit(run)


def ours(q, k, v):
    """Causal attention of this library."""
    return tea.attention(q, k, v, is_causal=True)


def theirs(q, k, v):
    """Causal attention of cuDNN."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def against_cudnn(repeat: int, limit: float) -> list[bool]:
    """At most the time of jax.nn with cuDNN."""
    met = []
    for size, shape in SHAPES.items():
        *qkv, dout = arrays_of(shape)
        pairs = {
            "forward": (jax.jit, qkv),
            "forward and backward": (with_backward, (*qkv, dout)),
            f"{IN_A_ROW} forward in a row": (lambda f: in_a_row(f, IN_A_ROW), qkv),
        }
        for name, (make, arrays) in pairs.items():
            calls = {side.__name__: (make(side), tuple(arrays)) for side in (ours, theirs)}
            least = seconds(calls, repeat, limit)
            ratio = least["ours"] / least["theirs"]
            bar = None if "row" in name else 1.0
            met.append(report(f"{size} {name}", microseconds(least), ratio, bar))
    return met


def against_c_api(program: Path, repeat: int, limit: float) -> list[bool]:
    """Within 2 % of the C API on the same problem; kernels fill the time of the large one."""
    if not program.exists():
        sys.exit(f"--te-attn is {program}; needs the program of a build")
    q, k, v, dout = arrays_of(SHAPES["large"])
    calls = {}
    for count in (IN_A_ROW, 2 * IN_A_ROW):
        calls[f"forward {count}"] = (in_a_row(ours, count), (q, k, v))
        calls[f"backward {count}"] = (backward_in_a_row(ours, count), (q, k, v, dout))
    line = tea.explain(q, k, v, is_causal=True).splitlines()[0]
    command = [program, "time", line, "--device", "0", "--json"]

    def direct() -> dict:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return json.loads(done.stdout)

    first = direct()
    least = seconds(calls, max(repeat // 10, 1), limit)
    again, met = direct(), []
    for verb in ("forward", "backward"):
        jax_time = least[f"{verb} {2 * IN_A_ROW}"] - least[f"{verb} {IN_A_ROW}"]
        c_time = min(x[verb]["milliseconds"] for x in (first, again)) / 1e3
        figures = microseconds({"jax": jax_time / IN_A_ROW, "C API": c_time})
        figures["engine"] = first["engine"]
        met.append(report(f"large {verb} kernels", figures, jax_time / IN_A_ROW / c_time, 1.02))
    return met


KEY = jax.random.PRNGKey(0)


def main() -> None:
    """Prints every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--limit", type=float, default=10, help="seconds of one figure")
    parser.add_argument("--te-attn", type=Path, default=PROGRAM)
    options = parser.parse_args()
    if jax.default_backend() == "cpu":
        met = host(options.repeat, options.limit)
    else:
        met = against_cudnn(options.repeat, options.limit)
        met += against_c_api(options.te_attn, options.repeat, options.limit)
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
