#!/usr/bin/env python3
"""What the PyTorch front end adds on the CPU: to a tiny problem, and beside the C API at length.

usage: PYTHONPATH=build/release/python torch_front_end.py --library build/release/libte_attention.so
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from library import Attention, Library
from torch.nn.functional import scaled_dot_product_attention

from te_attention.torch import attention
from te_attention.torch._library import OPS

ROUNDS = 7


def seconds(call, count: int) -> float:
    """The least time of a call over the rounds."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def report(**figures: object) -> None:
    """One line of JSON."""
    print(json.dumps(figures), flush=True)


def tiny() -> None:
    """Microseconds of one call on a problem of one row."""
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    grads = [t.clone().requires_grad_() for t in (q, k, v)]
    dout = torch.randn(1, 1, 1, 8)

    def both(function) -> None:
        torch.autograd.grad(function(*grads), grads, dout)

    calls = {
        "forward.default": lambda: OPS.forward.default(q, k, v),
        "attention": lambda: attention(q, k, v),
        "attention, grad": lambda: attention(*grads),
        "attention, both": lambda: both(attention),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
        "sdpa, grad": lambda: scaled_dot_product_attention(*grads),
        "sdpa, both": lambda: both(scaled_dot_product_attention),
    }
    for name, call in calls.items():
        report(tiny=name, microseconds=round(seconds(call, 2000) * 1e6, 2))


def beside_the_c_api(library: Library, s: int) -> None:
    """The time of the C API over that through PyTorch, forward: the two take turns."""
    q, k, v = (torch.randn(1, 4, s, 64) for _ in range(3))
    o, lse = torch.empty(1, s, 4, 64).transpose(1, 2), torch.empty(1, 4, s)
    plan = Attention(library, "causal=1 outputs=lse", {"Q": q, "K": k, "V": v, "O": o, "LSE": lse})
    ratios = []
    for _ in range(ROUNDS):
        pair = [plan.forward, lambda: OPS.forward.default(q, k, v, "bhsd", "causal")]
        times = []
        for call in pair:
            start = time.perf_counter()
            for _ in range(20):
                call()
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    report(seqlen=s, c_api_over_torch=round(statistics.median(ratios), 4))


def main() -> None:
    """Runs both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    options = parser.parse_args()
    tiny()
    for s in (512, 1024, 2048):
        beside_the_c_api(Library(options.library), s)


if __name__ == "__main__":
    main()
