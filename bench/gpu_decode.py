#!/usr/bin/env python3
"""Times decoding on the GPU: one query row over caches of keys and values, dense and in pages.

usage: gpu_decode.py --library build/libte_attention.so [--peers FOLDER] [--output FILE.jsonl]
Contenders, in one process and on the same tensors: our engines (`default` is the one that the
library selects), PyTorch's cuDNN back end (dense only), and with --peers FlashAttention-3, whose
wrapper fa3.py and libfa3.so that folder holds. bf16, head dimension 128, no mask, no LSE.

A timing is a CUDA graph of calls between two events; contenders take turns in shuffled order. A
figure is the median of the rounds, a ratio the median of the ratios within a round. `cold`: calls
go round copies of the cache that together exceed the L2 cache, as the layers of a model do; `warm`:
all calls read one cache that fits it. GB/s counts the bytes of K and V. A result that is further
than 2 % of its norm from PyTorch's in fp32 is reported and not timed.
"""

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_turns import (
    Libraries,
    Task,
    command_line,
    prepare,
    records_of,
    take_turns,
    write_records,
)
from gpu_vs_torch import over
from library import Attention, Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DIM = 128
LENGTHS = (8192, 1024, 32768, 262144)
HEADS = ((64, 8), (32, 8), (8, 1))
BATCHES = (32, 1, 8, 128)
PAGES = (0, 16, 64, 1)  # slots of a page; 0: dense
PEERS = ("torch-cudnn", "fa3")
LARGEST = 24 << 30  # bytes of K and V of a cell
COLD = 256 << 20  # bytes of all copies of a cold cache, many times the L2 cache
WARM = 24 << 20  # bytes of a cache that stays in the L2 cache
COPIES = 256
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Shape:
    """One cell."""

    heads: int
    heads_kv: int
    batch: int
    keys: int
    page: int
    cold: bool

    @property
    def bytes(self) -> int:
        """Of K and V."""
        return self.batch * self.keys * self.heads_kv * DIM * 2 * 2

    @property
    def what(self) -> str:
        """Its name."""
        form = f"page={self.page}" if self.page else "dense"
        cache = "cold" if self.cold else "warm"
        return f"{self.heads}/{self.heads_kv} b={self.batch} kv={self.keys} {form} {cache}"


def shapes() -> Iterator[Shape]:
    """Every cell that fits the memory; those that share tensors follow each other."""
    for heads, keys, batch in itertools.product(HEADS, LENGTHS, BATCHES):
        for page, cold in itertools.product(PAGES, (True, False)):
            shape = Shape(*heads, batch, keys, page, cold)
            if shape.bytes <= (LARGEST if cold else WARM):
                yield shape


class Caches:
    """The queries, and the copies of K and V that cells of one size share."""

    def __init__(self, shape: Shape) -> None:
        """Allocates."""
        self.shape = shape
        count = min(COPIES, max(1, COLD // shape.bytes))
        rows = shape.batch * shape.keys
        make = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q = make(shape.batch, 1, shape.heads, DIM).transpose(1, 2)
        self.kv = [{n: make(rows, shape.heads_kv, DIM) for n in "KV"} for _ in range(count)]

    def serves(self, shape: Shape) -> bool:
        """Whether a cell has these tensors."""
        sizes = lambda s: (s.heads, s.heads_kv, s.batch, s.keys)  # noqa: E731
        return sizes(shape) == sizes(self.shape)


class Cell:
    """A shape on its tensors, and every contender."""

    def __init__(self, shape: Shape, caches: Caches) -> None:
        """Views the caches as the shape needs them."""
        self.shape, self.q = shape, caches.q
        places, slots = (
            (shape.batch * shape.keys // shape.page, shape.page)
            if shape.page
            else (shape.batch, shape.keys)
        )
        self.kv = [
            {n: x.view(places, slots, shape.heads_kv, DIM).transpose(1, 2) for n, x in copy.items()}
            for copy in (caches.kv if shape.cold else caches.kv[:1])
        ]
        self.table = None
        if shape.page:
            order = torch.randperm(places, device="cuda", dtype=torch.int32)
            self.table = order.reshape(shape.batch, -1)

    def tensors(self, copy: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs with an output of the contender's own, NaN so far."""
        return {"Q": self.q, **copy, "O": torch.full_like(self.q, math.nan)}

    def reference(self, entry: int) -> torch.Tensor:
        """O of one batch entry of the first copy, in fp32."""
        shape, group = self.shape, self.shape.heads // self.shape.heads_kv
        kv = []
        for name in "KV":
            x = self.kv[0][name]
            if self.table is None:
                kv.append(x[entry].float())
            else:
                pages = x[self.table[entry].long()].transpose(0, 1)
                kv.append(pages.reshape(shape.heads_kv, -1, DIM).float())
        q = self.q[entry].float().view(shape.heads_kv, group, DIM)
        p = (q @ kv[0].transpose(1, 2) / math.sqrt(DIM)).softmax(-1)
        return (p @ kv[1]).view(shape.heads, 1, DIM)

    def ours(self, library: Library, engine: str) -> tuple[list[Task], torch.Tensor, str]:
        """A task for each copy, the output of the first, and the engine's name."""
        shape, plans = self.shape, []
        more: dict[str, torch.Tensor] = {}
        if self.table is not None:
            lengths = torch.arange(shape.batch + 1, device="cuda", dtype=torch.int32) * shape.keys
            more = {"TABLE_K": self.table, "CU_SEQLENS_KV": lengths}
        for copy in self.kv:
            tensors = self.tensors(copy) | more
            plans.append(Attention(library, "", tensors, engine, shape.keys if shape.page else 0))
            if len(plans) == 1:
                output = tensors["O"]
        return [plan.forward for plan in plans], output, plans[0].engine

    def fa3(self, module: object, library: object) -> tuple[list[Task], torch.Tensor, str]:
        """FlashAttention-3's, with the number of splits that it chooses."""
        shape, plans = self.shape, []
        for copy in self.kv:
            tensors = self.tensors(copy)
            tensors["LSE"] = torch.empty(shape.batch, shape.heads, 1, device="cuda")
            if self.table is not None:
                tensors["TABLE"] = self.table
                tensors["LENGTHS_KV"] = torch.full(
                    (shape.batch,), shape.keys, device="cuda", dtype=torch.int32
                )
            plans.append(module.Attention(library, tensors, num_splits=0))
            if len(plans) == 1:
                output = tensors["O"]
        return [plan.forward for plan in plans], output, "fa3"

    def torch_cudnn(self) -> tuple[list[Task], torch.Tensor, str]:
        """PyTorch's cuDNN back end; its tasks leave their result in `kept`."""
        if self.table is not None:
            raise RuntimeError("PyTorch has no pages")
        gqa = self.shape.heads != self.shape.heads_kv
        output = torch.empty_like(self.q)

        def run(copy: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(self.q, copy["K"], copy["V"], enable_gqa=gqa)

        output.copy_(run(self.kv[0]))
        return [lambda copy=copy: run(copy) for copy in self.kv], output, "torch-cudnn"


class Bench:
    """All cells."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Loads the libraries."""
        self.arguments, self.libraries = arguments, Libraries(arguments)
        self.caches: Caches | None = None

    def makers(self, cell: Cell) -> dict[str, Callable[[], tuple]]:
        """By name of a contender, the function that prepares it."""
        found: dict[str, Callable[[], tuple]] = {}
        for engine in self.arguments.engines:
            asked = "" if engine == "default" else engine
            found[engine] = lambda asked=asked: cell.ours(self.libraries.own, asked)
        for name, library in self.libraries.others.items():
            found[name] = lambda library=library: cell.ours(library, "hopper")
        found["torch-cudnn"] = cell.torch_cudnn
        if self.libraries.fa3:
            found["fa3"] = lambda: cell.fa3(*self.libraries.fa3)
        return found

    def cell(self, cell: Cell) -> dict:
        """The record of one cell."""
        record: dict = {"case": "decode", "what": cell.shape.what, "bytes": cell.shape.bytes}
        entries = sorted({0, cell.shape.batch - 1})
        want = torch.stack([cell.reference(i) for i in entries])
        error_of = lambda x: float((x[entries].float() - want).norm() / want.norm())  # noqa: E731
        timers, bad, engines = prepare(
            self.makers(cell), error_of, TOLERANCE, self.arguments.window_ms
        )
        times = take_turns(timers, self.arguments.rounds)
        ms = {name: statistics.median(x) for name, x in times.items()}
        peers = [name for name in PEERS if name in ms]
        best = min(peers, key=ms.get, default=None)
        record |= {
            "ms": {name: round(x, 5) for name, x in ms.items()},
            "gb_per_s": {name: round(cell.shape.bytes / x / 1e6) for name, x in ms.items()},
            "best_peer": best,
            "over_best_peer": {
                name: over(times[best], times[name]) for name in ms if best and name not in PEERS
            },
            "engine": engines,
            "calls": {name: timer.calls for name, timer in timers.items()},
        }
        no_graph = [name for name, timer in timers.items() if not timer.graph]
        return record | bad | ({"no_graph": no_graph} if no_graph else {})

    def cells(self) -> Iterator[dict]:
        """Every cell whose name matches, until the time is over."""
        yield from records_of(shapes(), self.record_of, self.arguments)

    def record_of(self, shape: Shape) -> dict:
        """The record of a shape, with the caches of the shape before where they serve it."""
        try:
            if self.caches is None or not self.caches.serves(shape):
                self.caches = None
                torch.cuda.empty_cache()
                self.caches = Caches(shape)
            return self.cell(Cell(shape, self.caches))
        except torch.cuda.OutOfMemoryError:
            self.caches = None
            return {"case": "skipped", "what": shape.what, "why": "out of memory"}


def row(record: dict) -> str:
    """A record as a line of the table: microseconds and GB/s of each contender."""
    if "ms" not in record:
        return json.dumps(record)
    line = f"{record['what']:<36}"
    for name, ms in record["ms"].items():
        line += f"  {name} {ms * 1e3:.1f} us {record['gb_per_s'][name]}"
        if name in record["over_best_peer"]:
            line += f" {record['over_best_peer'][name]:.2f}x"
    line += f"  ({record['engine'].get('default', '')})"
    for key in ("wrong", "refused", "no_graph"):
        if key in record:
            line += f"  {key}: {record[key]}"
    return line


def main() -> None:
    """Times all cells."""
    arguments = command_line(__doc__, ["default", "portable", "cudnn"], window_ms=4)
    torch.manual_seed(20251125)
    write_records("bench/gpu_decode.py", Bench(arguments).cells(), row, arguments.output)


if __name__ == "__main__":
    main()
