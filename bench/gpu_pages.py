#!/usr/bin/env python3
"""Times on the GPU what the form of a KV cache changes: prefill over pages, decoding over FP8.

usage: gpu_pages.py --library build/libte_attention.so [--peers FOLDER] [--output FILE.jsonl]
Prefill: causal, as many queries as keys, bf16. The contenders are `dense` and pages of several
sizes in shuffled order, `portable` over pages, and with --peers FlashAttention-3 over pages, whose
wrapper fa3.py and libfa3.so that folder holds. Decoding: one query row over caches in bf16 and in
E4M3, dense and in pages, which the library reads once per call from memory.

A timing is a CUDA graph of calls between two events; contenders take turns in shuffled order. A
figure is the median of the rounds, a ratio the median of the ratios within a round: how many times
as fast as `dense`, or as bf16, a contender is. A result that is further than 2 % of its norm from
that of the dense cache in bf16 is reported and not timed; FP8 is compared with a dense cache of the
same values.
"""

import argparse
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu_turns import Libraries, Task, command_line, prepare, records_of, take_turns, write_records
from gpu_vs_torch import over
from library import Attention, Library

TOLERANCE = 2e-2
PAGES = (16, 64, 128, 256)
COLD = 256 << 20  # bytes of all copies of a cache that is read from memory
FP8 = torch.float8_e4m3fn
CAUSAL = "causal=1 bottom_right=1"


@dataclass(frozen=True)
class Shape:
    """One cell: prefill where there is more than one query, else decoding."""

    heads: int
    heads_kv: int
    batch: int
    queries: int
    keys: int
    dim: int

    @property
    def is_prefill(self) -> bool:
        """Whether it has many queries."""
        return self.queries > 1

    @property
    def what(self) -> str:
        """Its name."""
        case = "prefill" if self.is_prefill else "fp8-cache"
        return f"{case} {self.heads}/{self.heads_kv} d={self.dim} b={self.batch} kv={self.keys}"

    @property
    def flops(self) -> float:
        """Of a causal prefill."""
        return 2.0 * self.batch * self.heads * self.queries * self.keys * self.dim


def shapes() -> Iterator[Shape]:
    """Every cell."""
    for dim, (heads, heads_kv) in ((128, (32, 8)), (64, (64, 8)), (256, (16, 4))):
        for batch, keys in ((2, 8192), (8, 2048), (1, 32768)):
            yield Shape(heads, heads_kv, batch, keys, keys, dim)
    for heads, heads_kv in ((64, 8), (32, 8), (8, 1)):
        for batch, keys in ((32, 8192), (128, 8192), (8, 32768), (1, 262144)):
            yield Shape(heads, heads_kv, batch, 1, keys, 128)


class Cell:
    """A shape on its tensors, [batch, head, row, dim], and every contender."""

    def __init__(self, shape: Shape) -> None:
        """Allocates."""
        self.shape = shape
        self.engine: dict[str, str] = {}
        make = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q = make(shape.batch, shape.queries, shape.heads, shape.dim).transpose(1, 2)
        size = (shape.batch * shape.keys, shape.heads_kv, shape.dim)
        row_bytes = shape.heads_kv * shape.dim * 4
        copies = 1 if shape.is_prefill else max(1, COLD // (size[0] * row_bytes))
        # Values that E4M3 has exactly, so that all caches hold the same.
        self.kv = [{n: make(*size).to(FP8).to(torch.bfloat16) for n in "KV"} for _ in range(copies)]

    def caches(self, page: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
        """The copies of the cache, in a type; with pages their tables and lengths, too."""
        shape = self.shape
        if not page:
            view = (shape.batch, shape.keys, shape.heads_kv, shape.dim)
            return [
                {n: x.to(dtype).view(view).transpose(1, 2) for n, x in copy.items()}
                for copy in self.kv
            ]
        places = shape.batch * shape.keys // page
        order = torch.randperm(places, device="cuda")
        more = {
            "TABLE_K": order.to(torch.int32).reshape(shape.batch, -1),
            "CU_SEQLENS_KV": torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32)
            * shape.keys,
        }
        found = []
        for copy in self.kv:
            pool = {n: torch.empty_like(x, dtype=dtype) for n, x in copy.items()}
            for name, x in copy.items():
                pages = pool[name].view(places, page, shape.heads_kv, shape.dim)
                pages.view(torch.uint8)[order] = x.to(dtype).view(pages.shape).view(torch.uint8)
                pool[name] = pages.transpose(1, 2)
            found.append(pool | more)
        return found

    def ours(
        self, library: Library, engine: str, page: int, dtype: torch.dtype
    ) -> tuple[list[Task], torch.Tensor, str]:
        """A task for each copy, the output of the first, and the engine's name."""
        options = CAUSAL if self.shape.is_prefill else ""
        if dtype == FP8:
            options += " kv_dtype=e4m3"
        plans, outputs = [], []
        for cache in self.caches(page, dtype):
            outputs.append(torch.full_like(self.q, math.nan))
            tensors = {"Q": self.q, **cache, "O": outputs[-1]}
            if dtype == FP8:
                tensors |= {f"{n}_SCALE_INV": torch.ones(1, device="cuda") for n in "KV"}
            max_kv = self.shape.keys if page else 0
            plans.append(Attention(library, options, tensors, engine, max_kv))
        return [plan.forward for plan in plans], outputs[0], plans[0].engine

    def fa3(
        self, module: object, library: object, page: int
    ) -> tuple[list[Task], torch.Tensor, str]:
        """FlashAttention-3 over pages."""
        shape, (cache,) = self.shape, self.caches(page, torch.bfloat16)
        output = torch.full_like(self.q, math.nan)
        lengths = torch.full((shape.batch,), shape.keys, device="cuda", dtype=torch.int32)
        statistics_of_rows = torch.empty(self.q.shape[:3], device="cuda")
        tensors = {"Q": self.q, "K": cache["K"], "V": cache["V"], "O": output}
        tensors |= {"LSE": statistics_of_rows, "TABLE": cache["TABLE_K"], "LENGTHS_KV": lengths}
        return [module.Attention(library, tensors, causal=True).forward], output, "fa3"


class Bench:
    """All cells."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Loads the libraries."""
        self.arguments, self.libraries = arguments, Libraries(arguments)

    def makers(self, cell: Cell) -> dict:
        """By name of a contender, the function that prepares it; the first one is the base."""
        own, bf16 = self.libraries.own, torch.bfloat16
        found = {}
        if not cell.shape.is_prefill:
            for dtype, page in itertools.product((bf16, FP8), (0, 64)):
                name = f"{'e4m3' if dtype == FP8 else 'bf16'} {f'page={page}' if page else 'dense'}"
                found[name] = lambda d=dtype, p=page: cell.ours(own, "hopper", p, d)
            return found
        found["dense"] = lambda: cell.ours(own, "hopper", 0, bf16)
        for page in PAGES:
            found[f"page={page}"] = lambda p=page: cell.ours(own, "hopper", p, bf16)
            for name, library in self.libraries.others.items():
                found[f"{name} page={page}"] = lambda p=page, lib=library: cell.ours(
                    lib, "hopper", p, bf16
                )
        found["portable page=16"] = lambda: cell.ours(own, "portable", 16, bf16)
        if self.libraries.fa3:
            for page in PAGES[:2]:
                found[f"fa3 page={page}"] = lambda p=page: cell.fa3(*self.libraries.fa3, p)
        return found

    def record_of(self, shape: Shape) -> dict:
        """The record of a cell."""
        cell, first = Cell(shape), []

        def error_of(output: torch.Tensor) -> float:
            if not first:
                first.append(output.float())
            return float((output.float() - first[0]).norm() / first[0].norm())

        timers, bad, _ = prepare(self.makers(cell), error_of, TOLERANCE, self.arguments.window_ms)
        times = take_turns(timers, self.arguments.rounds)
        ms = {name: statistics.median(x) for name, x in times.items()}

        def base(name: str) -> str:
            return "dense" if shape.is_prefill else re.sub("e4m3", "bf16", name)

        record = {
            "case": "prefill" if shape.is_prefill else "fp8-cache",
            "what": shape.what,
            "ms": {name: round(x, 5) for name, x in ms.items()},
            "ratio": {n: over(times[base(n)], times[n]) for n in ms if base(n) in ms},
        }
        if shape.is_prefill:
            record["tflops"] = {name: round(shape.flops / x / 1e9) for name, x in ms.items()}
        del cell
        torch.cuda.empty_cache()
        return record | bad

    def cells(self) -> Iterator[dict]:
        """Every cell whose name matches, until the time is over."""
        yield from records_of(shapes(), self.record_of, self.arguments)


def row(record: dict) -> str:
    """A record as a line of the table: microseconds of each contender, and its ratio."""
    if "ms" not in record:
        return json.dumps(record)
    line = f"{record['what']:<34}"
    for name, ms in record["ms"].items():
        line += f"  {name} {ms * 1e3:.1f} us {record['ratio'].get(name, 0):.3f}x"
    for key in ("wrong", "refused"):
        if key in record:
            line += f"  {key}: {record[key]}"
    return line


def main() -> None:
    """Times all cells."""
    arguments = command_line(__doc__, [], window_ms=12)
    torch.manual_seed(20251126)
    write_records("bench/gpu_pages.py", Bench(arguments).cells(), row, arguments.output)


if __name__ == "__main__":
    main()
