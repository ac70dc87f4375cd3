#!/usr/bin/env python3
"""Compares two builds of the library on a GPU: whether a change of the code changed its speed.

usage: gpu_builds.py --library build/libte_attention.so --other OTHER/libte_attention.so
           [--only REGEX] [--seconds LIMIT] [--output FILE.jsonl]
Both builds are loaded into one process and run on the same tensors. Each round times them in
shuffled order, a burst of launches between two events; a figure is the median over the rounds of
the ratios within a round, other over library, since clocks drift: above 1, --library is faster.
Results that differ by more than 2 % of their norm are reported as a miss. The bars: hopper's
forward pass within 1 % in the geometric mean and 2 % a cell, everything else within 2 %. A line is
printed and written as soon as it is known, the summaries of the groups last.
"""

import argparse
import contextlib
import itertools
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpu_vs_torch import difference, machine
from library import Attention, Library

TOKENS, WIDTH = 16384, 2048  # batch * rows, heads * dim
BURST_MS = 4.0  # of one build in a round
TOLERANCE = 2e-2
MEAN, CELL = 0.01, 0.02  # the bars
Tensors = dict[str, torch.Tensor]


@dataclass
class Cell:
    """One problem, its tensors, and the pass that is timed."""

    group: str
    what: str
    engine: str
    options: str
    tensors: Tensors
    backward: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    def task(self, library: Library) -> Callable[[], None]:
        """The pass by one build; a backward pass follows one of forward."""
        plan = Attention(library, self.options, self.tensors, self.engine, **self.sizes)
        if not self.backward:
            return plan.forward
        plan.forward()
        return plan.backward

    def results(self) -> list[torch.Tensor]:
        """The tensors that the pass writes."""
        names = ("DQ", "DK", "DV") if self.backward else ("O",)
        return [self.tensors[name].float() for name in names]


def random_tensors(shape: tuple[int, ...], shape_kv: tuple[int, ...] = ()) -> Tensors:
    """Q, K, V and O in bf16, [batch, head, row, dim]: the heads of a row are next to each other."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        batch, heads, rows, dim = shape
        memory = torch.randn(batch, rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        return memory.transpose(1, 2)

    q, k, v = make(shape), make(shape_kv or shape), make(shape_kv or shape)
    return {"Q": q, "K": k, "V": v, "O": torch.empty_like(q)}


def with_gradients(tensors: Tensors) -> Tensors:
    """The same for training."""
    q = tensors["Q"]
    lse = torch.empty(q.shape[:3], device="cuda")
    gradients = {f"D{n}": torch.empty_like(tensors[n]) for n in ("Q", "K", "V")}
    return tensors | {"DOUT": torch.randn_like(q), "LSE": lse} | gradients


def dense(dim: int, rows: int) -> Tensors:
    """The shapes of the suite mha-16k."""
    return random_tensors((TOKENS // rows, WIDTH // dim, rows, dim))


def mask(causal: int) -> str:
    """Its name."""
    return "causal" if causal else "full"


def forward_cells() -> Iterator[Cell]:
    """The forward pass of hopper: mha-16k, options, ragged sequences."""
    for dim in (64, 128, 256):
        for rows in (512, 2048, 8192, 16384):
            tensors = dense(dim, rows)
            for causal in (0, 1):
                what = f"d={dim} s={rows} {mask(causal)}"
                yield Cell("forward", what, "hopper", f"causal={causal}", tensors)
    rows = 4096
    for dim in (64, 128, 256):
        tensors = dense(dim, rows)
        heads = WIDTH // dim
        bias = torch.randn(1, heads, rows, rows, device="cuda", dtype=torch.bfloat16)
        rng = torch.tensor([1, 0], device="cuda")
        trains = "training=1 dropout=0.1 causal=1"
        for name, options, more in (
            ("softcap", "softcap=30 causal=1", {}),
            ("alibi", "alibi=standard causal=1", {}),
            ("window", "causal=1 window_left=513", {}),
            ("bias", "bias=post_scale bias_broadcast=batch", {"BIAS": bias}),
            ("dropout", trains, with_gradients(tensors) | {"RNG_STATE": rng}),
        ):
            yield Cell("options", f"d={dim} {name}", "hopper", options, tensors | more)
    for name, lengths in (
        ("equal", [2048] * 8),
        ("mixed", [8192, 4096, 2048, 1024, 512, 256, 192, 64]),
    ):
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32).cuda()
        tensors = random_tensors((1, 16, sum(lengths), 128))
        tensors |= {"CU_SEQLENS_Q": starts, "CU_SEQLENS_KV": starts}
        for causal in (0, 1):
            what, options = f"{name} {mask(causal)}", f"causal={causal}"
            yield Cell("ragged", what, "hopper", options, tensors, sizes={"longest": max(lengths)})


def backward_cells() -> Iterator[Cell]:
    """The backward pass of hopper, and its results in fp32, which parts of a problem have."""
    wide = "training=1 o_dtype=fp32 dout_dtype=bf16 dqkv_dtype=fp32"
    for dim in (64, 128):
        for rows in (2048, 16384):
            tensors = with_gradients(dense(dim, rows))
            in_fp32 = {name: tensors[name].float() for name in ("O", "DQ", "DK", "DV")}
            for causal in (0, 1):
                what = f"d={dim} s={rows} {mask(causal)}"
                options = f"training=1 causal={causal}"
                yield Cell("backward", what, "hopper", options, tensors, backward=True)
                options = f"{wide} causal={causal}"
                yield Cell("forward in fp32", what, "hopper", options, tensors | in_fp32)


def portable_cells() -> Iterator[Cell]:
    """Both passes of the portable engine, and its decoding."""
    for dim in (64, 128):
        for rows in (2048, 8192):
            tensors = with_gradients(dense(dim, rows))
            for causal in (0, 1):
                what, options = f"d={dim} s={rows} {mask(causal)}", f"training=1 causal={causal}"
                yield Cell("portable forward", what, "portable", options, tensors)
                yield Cell("portable backward", what, "portable", options, tensors, backward=True)
    for batch, keys in ((1, 8192), (32, 8192), (128, 1024)):
        tensors = random_tensors((batch, 64, 1, 128), (batch, 8, keys, 128))
        yield Cell("decoding", f"b={batch} kv={keys}", "portable", "", tensors)


def milliseconds(task: Callable[[], None], launches: int) -> float:
    """Of one launch in a burst."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        task()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / launches


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest |ours - theirs| / |theirs|; NaN is infinite."""
    found = [difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    return max(math.inf if math.isnan(x) else x for x in found)


def measure(cell: Cell, builds: dict[str, Library], rounds: int) -> dict:
    """The record of a cell."""
    record = {"case": cell.group, "what": cell.what}
    tasks, results = {}, []
    try:
        for name, library in builds.items():
            tasks[name] = cell.task(library)
            tasks[name]()
            results.append(cell.results())
    except RuntimeError as error:  # what one of the builds does not support
        return record | {"error": str(error)}
    record["difference"] = largest_difference(*results)
    one = max(milliseconds(task, 3) for task in tasks.values())
    launches = max(2, int(BURST_MS / one))
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name in random.sample(list(tasks), len(tasks)):
            times[name].append(milliseconds(tasks[name], launches))
    ours, others = times.values()
    record |= {f"{name}_ms": round(statistics.median(t), 4) for name, t in times.items()}
    ratio = statistics.median(o / t for o, t in zip(others, ours, strict=True))
    return record | {"over_other": round(ratio, 4)}


def summary(records: list[dict]) -> Iterator[dict]:
    """The geometric mean and the extremes of each group, against the bars."""
    for group in dict.fromkeys(r["case"] for r in records):
        mine = [r for r in records if r["case"] == group]
        ratios = [r["over_other"] for r in mine]
        mean = statistics.geometric_mean(ratios)
        met = abs(mean - 1) <= (MEAN if group == "forward" else CELL)
        met &= all(abs(x - 1) <= CELL for x in ratios)
        met &= all(r["difference"] <= TOLERANCE for r in mine)
        figures = {"mean": round(mean, 4), "least": min(ratios), "most": max(ratios)}
        yield {"case": "summary", "what": group, "cells": len(mine), **figures, "met": met}


def all_records(arguments: argparse.Namespace) -> Iterator[dict]:
    """The machine, the cells that --only names, and the groups of those."""
    builds = {name: Library(getattr(arguments, name).resolve()) for name in ("library", "other")}
    begin, measured = time.perf_counter(), []
    yield machine() | {"program": "bench/gpu_builds.py"}
    for cell in itertools.chain(forward_cells(), backward_cells(), portable_cells()):
        if not re.search(arguments.only, f"{cell.group} {cell.what}"):
            continue
        if time.perf_counter() - begin > arguments.seconds:
            yield {"case": "skipped", "what": f"{cell.group} {cell.what}"}
            continue
        record = measure(cell, builds, arguments.rounds)
        if "over_other" in record:
            measured.append(record)
        yield record
    if not measured:
        sys.exit(f"--only {arguments.only!r} names no cell that both builds support")
    yield from summary(measured)


def main() -> None:
    """Measures the cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    parser.add_argument("--other", type=Path, required=True, help="that of the other build")
    parser.add_argument("--output", type=Path, help="where lines of JSON go")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="a regular expression: group, space, cell")
    parser.add_argument("--seconds", type=float, default=300, help="no cell begins later than this")
    arguments = parser.parse_args()
    torch.manual_seed(20240711)
    random.seed(20240711)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(arguments.output.open("w")) if arguments.output else None
        for record in all_records(arguments):
            line = json.dumps(record)
            print(line, flush=True)
            if file:
                print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
