"""Host time of attention() in JAX: a jitted call of a tiny problem, in microseconds.

usage: jax_front_end.py [--repeat N]

`empty` is a jitted custom call that computes nothing (the dropout pattern of an empty shape); the
bar for `forward - empty` on the CPU is 6 us. Prints one line of JSON for each figure, the least of
a hundred blocks. On a GPU the calls of a block are queued and only the last one is waited for.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp

from te_attention import jax as tea

BLOCKS = 100


def seconds(function, arrays: tuple, repeat: int) -> float:
    """Of one call, the least of the blocks: others may use the host, too."""
    jax.block_until_ready(function(*arrays))
    blocks = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(repeat):
            out = function(*arrays)
        jax.block_until_ready(out)
        blocks.append((time.perf_counter() - start) / repeat)
    return min(blocks)


def main() -> None:
    """Prints every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=100)
    options = parser.parse_args()
    x = jnp.ones((1, 1, 1, 8))  # one product, so that the host's time is all
    key = jnp.zeros(4, jnp.uint32)
    calls = {
        "jit": (jax.jit(lambda x: x + 1), (x,)),
        "empty": (jax.jit(lambda key: tea.dropout_mask(key, 0.0, (0, 0, 0, 0))), (key,)),
        "forward": (jax.jit(tea.attention), (x, x, x)),
        "forward and backward": (
            jax.jit(jax.grad(lambda *x: tea.attention(*x).sum(), (0, 1, 2))),
            (x, x, x),
        ),
        "jax.nn": (jax.jit(jax.nn.dot_product_attention), (x, x, x)),
    }
    for name, (function, arrays) in calls.items():
        us = round(seconds(function, arrays, options.repeat) * 1e6, 2)
        device = jax.devices()[0].device_kind
        print(json.dumps({"call": name, "us": us, "jax": jax.__version__, "device": device}))


if __name__ == "__main__":
    main()
