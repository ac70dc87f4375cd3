#!/usr/bin/env python3
"""Compares the GPU engines with PyTorch's FlashAttention-2 and cuDNN, on the same tensors.

usage: gpu_vs_torch.py --library build/libte_attention.so [--output FILE.jsonl]
Suite mha-16k: batch * rows = 16384, heads * dim = 2048, normal random data in [batch, rows, heads,
dim]. Contenders take turns in blocks of launches, each between events of its own; a burst figure is
the median over blocks of the medians of blocks, a ratio the median over turns of the ratios within
a turn, since clocks drift. A sustained figure launches one contender without a pause for longer
than the clocks take to settle. Outputs are compared with cuDNN's or FlashAttention-2's before
anything is timed.

All passes are those of training: forward writes LSE, ours and the peers'. So PyTorch's forward is
the operator that its function calls where a gradient is wanted; without one cuDNN writes no LSE.
"""

import argparse
import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from facts import commit, numbers
from library import NAMES, Attention, Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, WIDTH = 16384, 2048  # batch * rows, heads * dim
PEERS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OPERATORS = {
    SDPBackend.FLASH_ATTENTION: lambda q, k, v, causal: (
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]
    ),
    SDPBackend.CUDNN_ATTENTION: lambda q, k, v, causal: (
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[0]
    ),
}
LAUNCHES = 8  # of a block
SUSTAINED_SECONDS = 0.3
TOLERANCE = 2e-2  # of the norm of the difference
Task = Callable[[], object]


def label(engine: str) -> str:
    """The name of an engine in records; a peer may have the same name."""
    return f"our-{engine}" if engine in PEERS else engine


def block_ms(task: Task, launches: int = LAUNCHES) -> float:
    """The median milliseconds of a block of launches."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(launches)]
    for start, end in events:
        start.record()
        task()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def burst(tasks: dict[str, Task], blocks: int) -> dict[str, list[float]]:
    """Milliseconds of each block; the tasks take turns, and each block begins with another one."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    order = list(tasks)
    for task in tasks.values():
        block_ms(task, 3)
    for turn in range(blocks):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(block_ms(tasks[name]))
    return times


def over(theirs: list[float], ours: list[float]) -> float:
    """How many times as fast as theirs ours is, by turn."""
    return round(statistics.median(t / o for t, o in zip(theirs, ours, strict=True)), 3)


def sustained(task: Task) -> float:
    """Milliseconds of one launch among many without a pause, once the clocks have settled."""
    one = block_ms(task, 3)
    launches = max(4, int(SUSTAINED_SECONDS * 1e3 / one))
    block_ms(task, launches)
    return block_ms(task, launches)


def host_us(task: Task, launches: int = 200) -> float:
    """Microseconds for which one call keeps the host; few enough calls that no queue fills."""
    task()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        task()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / launches * 1e6


def wall_ms(task: Task) -> float:
    """Milliseconds of one call until its results are there."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    task()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 4)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|."""
    a, b = ours.float(), theirs.float()
    return float((a - b).norm() / b.norm())


class Cell:
    """One shape and mask, its tensors, and everyone who computes it."""

    suite = "mha-16k"

    def __init__(self, dtype: torch.dtype, dim: int, rows: int, causal: bool) -> None:
        """Allocates; nothing is planned yet."""
        self.dim, self.rows, self.causal = dim, rows, causal
        self.batch, self.heads = TOKENS // rows, WIDTH // dim
        shape = (self.batch, rows, self.heads, dim)
        make = lambda: torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2)  # noqa: E731
        self.tensors = {name: make() for name in ("Q", "K", "V", "DOUT")}
        for name in ("O", "DQ", "DK", "DV"):
            self.tensors[name] = torch.full_like(self.tensors["Q"], float("nan"))
        self.tensors["LSE"] = torch.empty(self.batch, self.heads, rows, device="cuda")
        self.what = f"{NAMES[dtype]} d={dim} s={rows} {'causal' if causal else 'full'}"

    def flop(self, part: str) -> float:
        """Operations of a pass: half under a causal mask, as the field counts them."""
        pairs = self.batch * self.heads * self.rows**2 / (2 if self.causal else 1)
        return pairs * self.dim * (4 if part == "forward" else 10)

    def ours(self, library: Library, engine: str) -> dict[str, Task]:
        """Our two passes by an engine's name, or only one where it is not for training."""
        causal = f"causal={int(self.causal)}"
        try:
            plan = Attention(library, f"training=1 {causal}", self.tensors, engine)
        except RuntimeError:
            plan = Attention(library, f"outputs=1 {causal}", self.tensors, engine)
            return {"forward": plan.forward}
        return {"forward": plan.forward, "backward": plan.backward}

    def theirs(self, backend: SDPBackend) -> dict[str, Task]:
        """PyTorch's two passes by a backend; backward on a kept graph."""
        inputs = [self.tensors[n].detach().requires_grad_() for n in ("Q", "K", "V")]

        def forward() -> torch.Tensor:
            return OPERATORS[backend](*(self.tensors[n] for n in ("Q", "K", "V")), self.causal)

        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*inputs, is_causal=self.causal)

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, inputs, self.tensors["DOUT"], retain_graph=True)

        forward(), backward()  # who refuses only here is left out too
        return {"forward": forward, "backward": backward}


class Bench:
    """The suite over its cells."""

    tolerance = TOLERANCE

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Keeps what all cells share."""
        self.library = Library(arguments.library.resolve())
        self.arguments = arguments

    def contenders(self, cell: Cell) -> dict[str, dict[str, Task]]:
        """By name their passes; those who refuse the cell are reported and left out."""
        found = {}
        makers = {
            label(engine): partial(cell.ours, self.library, engine)
            for engine in self.arguments.engines
        }
        makers |= {peer: partial(cell.theirs, PEERS[peer]) for peer in self.arguments.peers}
        for name, make in makers.items():
            try:
                found[name] = make()
            except RuntimeError as error:
                print(f"{cell.what:<28} {name}: {error}", flush=True)
        return found

    def compare(
        self, cell: Cell, found: dict[str, dict[str, Task]]
    ) -> dict[tuple[str, str], float]:
        """How far our results are from a peer's, by (name, pass)."""
        ours = {name: passes for name, passes in found.items() if name not in PEERS}
        peer = next((found[name] for name in PEERS if name in found), None)
        if peer is None:  # without a peer the results cannot be checked
            return {(name, part): math.inf for name, passes in ours.items() for part in passes}
        out, grads = peer["forward"](), peer["backward"]()
        differs = {}
        for name, passes in ours.items():
            for part, task in passes.items():
                task()
                mine = ("O",) if part == "forward" else ("DQ", "DK", "DV")
                want = (out,) if part == "forward" else grads
                apart = [difference(cell.tensors[n], w) for n, w in zip(mine, want, strict=True)]
                # A NaN is as far away as anything can be.
                differs[name, part] = max(math.inf if math.isnan(x) else x for x in apart)
        return differs

    def cell(self, cell: Cell) -> Iterator[dict]:
        """The figures of one cell."""
        found = self.contenders(cell)
        differs = self.compare(cell, found)
        for part in ("forward", "backward"):
            tasks = {
                name: passes[part]
                for name, passes in found.items()
                if part in passes and (name in PEERS or differs[name, part] <= self.tolerance)
            }
            times = burst(tasks, self.arguments.blocks) if tasks else {}
            for name in found:
                record = {"case": cell.suite, "what": f"{cell.what} {part}", "contender": name}
                if (name, part) in differs:
                    record["difference"] = differs[name, part]
                if name in times:
                    record |= self.figures(cell, part, tasks[name], times[name])
                    for peer in set(times) & set(PEERS) - {name}:
                        record[f"over_{peer}"] = over(times[peer], times[name])
                yield record

    def figures(self, cell: Cell, part: str, task: Task, blocks: list[float]) -> dict:
        """The record of one contender."""
        ms = statistics.median(blocks)
        figures = {
            "ms": round(ms, 4),
            "blocks_ms": [round(x, 4) for x in blocks],
            "tflops": round(cell.flop(part) / ms / 1e9, 1),
        }
        if self.arguments.sustained:
            ms = sustained(task)
            figures["sustained_tflops"] = round(cell.flop(part) / ms / 1e9, 1)
        return figures

    def mha_16k(self) -> Iterator[dict]:
        """Every cell of the suite."""
        for dtype in (torch.bfloat16, torch.float16)[: 1 + self.arguments.fp16]:
            for dim in self.arguments.dims:
                for rows in self.arguments.lengths:
                    for causal in (False, True):
                        yield from self.cell(Cell(dtype, dim, rows, causal))

    def first_calls(self) -> Iterator[dict]:
        """The first call of a shape after another one loaded the kernels, and later calls."""
        for name in self.arguments.engines:
            for dim in self.arguments.dims:
                loads, new = (
                    Cell(torch.bfloat16, dim, rows, True).ours(self.library, name)
                    for rows in (1024, 1536)
                )
                for part, task in new.items():
                    loads[part]()
                    first, *later = (wall_ms(task) for _ in range(11))
                    record = {"case": "first", "what": f"first {part} d={dim}"}
                    record["contender"] = label(name)
                    yield record | {"first_ms": first, "later_ms": statistics.median(later)}

    def host(self) -> Iterator[dict]:
        """Host time of one call, on a problem so small that the device keeps up."""
        cell = Cell(torch.bfloat16, 64, 512, True)
        for name in ("Q", "K", "V", "DOUT", "O", "DQ", "DK", "DV", "LSE"):
            cell.tensors[name] = cell.tensors[name][:1, :2]
        for name, passes in self.contenders(cell).items():
            for part, task in passes.items():
                us = round(host_us(task), 2)
                yield {"case": "host", "what": f"host {part}", "contender": name, "host_us": us}


def ceilings() -> dict:
    """The peak speed of the machine: a matrix product and a copy, both on random data."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median(block_ms(lambda: a @ b) for _ in range(3))
    x = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    copy = statistics.median(block_ms(lambda: y.copy_(x)) for _ in range(3))
    return {
        "product_tflops": round(2 * n**3 / product / 1e9, 1),
        "copy_gb_per_s": round(2 * x.nbytes / copy / 1e6, 1),
    }


def machine() -> dict:
    """The machine of the measurement."""
    return {
        "case": "machine",
        "program": "bench/gpu_vs_torch.py",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
    }


def row(record: dict) -> str:
    """A record as a line of the table."""
    if "tflops" not in record:
        return json.dumps(record)
    line = f"{record['what']:<34} {record['contender']:<9} {record['ms']:8.3f} ms"
    line += f" {record['tflops']:6.1f} TFLOP/s"
    if "sustained_tflops" in record:
        line += f" (sustained {record['sustained_tflops']:6.1f})"
    for peer in PEERS:
        if f"over_{peer}" in record:
            line += f"  {record[f'over_{peer}']:.2f}x {peer}"
    return line


def command_line(doc: str, engines: list[str], peers: list[str]) -> argparse.ArgumentParser:
    """The common arguments of the suites: the library, the contenders, and where the records go."""
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    parser.add_argument("--output", type=Path, help="where lines of JSON go")
    parser.add_argument("--engines", type=words, default=engines, help="ours, by name")
    parser.add_argument("--peers", type=words, default=peers, help="PyTorch's")
    parser.add_argument("--blocks", type=int, default=3, help="turns of each contender")
    return parser


def write(output: Path | None, machine: dict, records: Iterable[dict]) -> None:
    """Prints and writes each record as soon as it is known, between two looks at the ceilings."""

    def suite() -> Iterator[dict]:
        yield machine
        yield {"case": "ceiling", "when": "before", **ceilings()}
        yield from records
        yield {"case": "ceiling", "when": "after", **ceilings()}

    with output.open("w") if output else contextlib.nullcontext() as file:
        for record in suite():
            print(row(record), flush=True)
            if file:
                file.write(json.dumps(record) + "\n")
                file.flush()


def main() -> None:
    """Runs the suite."""
    parser = command_line(__doc__, ["portable"], list(PEERS))
    parser.add_argument("--lengths", type=numbers, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--fp16", action="store_true", help="fp16 too")
    parser.add_argument("--sustained", action="store_true", help="sustained figures too")
    arguments = parser.parse_args()
    torch.manual_seed(20240711)
    bench = Bench(arguments)
    suites = itertools.chain(bench.first_calls(), bench.host(), bench.mha_16k())
    write(arguments.output, machine(), suites)


if __name__ == "__main__":
    main()
