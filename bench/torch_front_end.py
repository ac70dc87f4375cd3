#!/usr/bin/env python3
"""The overhead of the PyTorch front end: on a tiny problem, and relative to the C API.

usage: PYTHONPATH=build/release/python torch_front_end.py
       (--library build/release/libte_attention.so [--device cuda] | --instructions)

--instructions counts those of the tiny calls on the CPU, the same however busy the host is.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from instructions import run_counted
from library import Attention, Library
from torch.nn.functional import scaled_dot_product_attention

from te_attention.torch import attention
from te_attention.torch.operators import ops

ROUNDS = 9
WARMUP, LONG_ROUNDS = 5, 101
TINY = {"cpu": ((1, 1, 1, 8), torch.float32), "cuda": ((1, 1, 16, 64), torch.bfloat16)}


def settle(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call, count: int, device: str) -> float:
    """The least time of a call over the rounds, as the host sees it."""
    for _ in range(100):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        settle(device)
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    settle(device)
    return best


def report(**figures: object) -> None:
    """One line of JSON."""
    print(json.dumps(figures), flush=True)


def microseconds(call: Callable, device: str) -> float:
    """Of the host for one call."""
    return round(seconds(call, 500, device) * 1e6, 2)


def tiny(device: str, unit: str, measure: Callable[[Callable], float]) -> None:
    """The host time of one call on a problem of one tile."""
    shape, dtype = TINY[device]
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
    grads = [t.clone().requires_grad_() for t in (q, k, v)]

    def both(function) -> None:
        torch.autograd.grad(function(*grads), grads, dout)

    calls = {
        "empty_like": lambda: torch.empty_like(q),
        "fill.default": lambda: ops.fill.default(q, 1.0),
        "inference.default": lambda: ops.inference.default(q, k, v),
        "forward_minimal.default": lambda: ops.forward_minimal.default(q, k, v),
        "forward.default": lambda: ops.forward.default(q, k, v),
        "attention": lambda: attention(q, k, v),
        "attention, grad": lambda: attention(*grads),
        "attention, window, grad": lambda: attention(*grads, mask="causal", window=(3, None)),
        "attention, both": lambda: both(attention),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
        "sdpa, grad": lambda: scaled_dot_product_attention(*grads),
        "sdpa, both": lambda: both(scaled_dot_product_attention),
    }
    for name, call in calls.items():
        report(tiny=name, **{unit: measure(call)})


def count_instructions() -> int:
    """Counts instructions of tiny calls on the CPU in the calling thread; returns the exit code."""
    os.environ["TE_ATTENTION_THREADS"] = "1"

    def program(count: Callable[[Callable], int]) -> None:
        torch.set_num_threads(1)
        gc.disable()
        tiny("cpu", "instructions", count)

    return run_counted(program)


def compare_with_c_api(library: Library, s: int, device: str) -> None:
    """The time of the C API over that of attention(), both for O alone on the same threads.

    The three take turns, one call each, and the median of the rounds' ratios counts. attention()
    returns a new O; the C API writes into one that is kept, and, as a caller does that needs O for
    itself, into a new one of the same allocator.
    """
    heads, dim = (4, 64) if device == "cpu" else (16, 128)
    dtype = TINY[device][1]
    q, k, v = (torch.randn(1, heads, s, dim, dtype=dtype, device=device) for _ in range(3))

    def new_o() -> torch.Tensor:
        return torch.empty(1, s, heads, dim, dtype=dtype, device=device).transpose(1, 2)

    kept = new_o()
    plan = Attention(library, "causal=1", {"Q": q, "K": k, "V": v, "O": kept})

    def c_api(o: torch.Tensor) -> torch.Tensor:
        plan.set_o(o)
        plan.forward()
        return o

    calls = {
        "torch": lambda: attention(q, k, v, mask="causal"),
        "c_api": lambda: c_api(kept),
        "c_api_new_o": lambda: c_api(new_o()),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(WARMUP + LONG_ROUNDS):
        for name, call in calls.items():
            settle(device)
            start = time.perf_counter()
            call()
            settle(device)
            if i >= WARMUP:
                times[name].append(time.perf_counter() - start)
    own = times.pop("torch")
    ratios = {
        f"{name}_over_torch": round(
            statistics.median(a / b for a, b in zip(t, own, strict=True)), 4
        )
        for name, t in times.items()
    }
    report(seqlen=s, microseconds=round(statistics.median(own) * 1e6, 1), **ratios)


def main() -> int:
    """Runs both, or counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--library", type=Path, help="libte_attention.so")
    way.add_argument("--instructions", action="store_true")
    parser.add_argument("--device", choices=list(TINY), default="cpu")
    options = parser.parse_args()
    if options.instructions:
        return count_instructions()
    tiny(options.device, "microseconds", lambda call: microseconds(call, options.device))
    for s in (512, 1024, 2048, *(() if options.device == "cpu" else (8192,))):
        compare_with_c_api(Library(options.library), s, options.device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
