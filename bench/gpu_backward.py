#!/usr/bin/env python3
"""Times the backward pass of the engine hopper next to its peers, and holds it against its bars.

usage: gpu_backward.py --library build/libte_attention.so [--peers FOLDER] [--output FILE.jsonl]
Contenders, in one process and on the same inputs: our engines, other builds of the library (whose
name `unordered` says that dQ is added in no order: its results are not compared), PyTorch's cuDNN
back end, and with --peers FlashAttention-3, whose wrapper fa3.py and libfa3.so that folder holds.
bf16, normal random data in [batch, row, head, dim].

Suites: mha-16k (16384 tokens, width 2048), llama (64 heads on 8, batch 1), groups (shapes of
src/cudnn/faster.h), ragged (sequences of equal lengths against dense ones), window (1024 keys
against all keys, in TFLOP/s). A timing is a CUDA graph of calls between two events, right after as
many untimed ones; contenders take turns in shuffled order, so that the card stays at its power
limit. A figure is the median of the rounds, a ratio the median of the ratios within a round.
Operations are 10 * dim for each pair of row and key. Gradients that are further than 2 % of their
norm from those of both peers are reported and not timed.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from gpu_turns import (
    Libraries,
    Task,
    Timer,
    command_line,
    records_of,
    take_turns,
    write_records,
)
from gpu_vs_torch import difference, over
from library import Attention, Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, WIDTH = 16384, 2048
WINDOW = 1024
PEERS = ("fa3", "torch-cudnn")
GRADIENTS = ("DQ", "DK", "DV")
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Shape:
    """One cell."""

    suite: str
    dim: int
    heads: int
    heads_kv: int
    batch: int
    rows: int
    causal: bool

    @property
    def what(self) -> str:
        """Its name in the record."""
        mask = "causal" if self.causal else "full"
        heads = f"{self.heads}/{self.heads_kv}"
        return f"{self.suite} d={self.dim} {mask} s={self.rows} b={self.batch} {heads}"

    def bar(self) -> float:
        """The least ratio over the faster peer."""
        if self.causal and self.rows <= 1024:
            return 1.2
        return 0.98 if self.dim == 128 and self.rows >= 8192 else 1.0

    def flop(self, window: int = 0) -> float:
        """Operations of the backward pass."""
        rows = self.rows
        pairs = rows**2 / (2 if self.causal else 1)
        if window:
            pairs = rows * window - window**2 / 2
        return 10 * self.batch * self.heads * pairs * self.dim


def shapes() -> Iterator[Shape]:
    """Every cell."""
    masks = (False, True)
    for dim, causal, rows in itertools.product(
        (128, 64), masks, (512, 2048, 4096, 16384, 1024, 8192)
    ):
        heads = WIDTH // dim
        yield Shape("mha-16k", dim, heads, heads, TOKENS // rows, rows, causal)
    for rows in (2048, 4096, 8192, 16384):
        yield Shape("llama", 128, 64, 8, 1, rows, causal=True)
    for rows in (512, 2048, 8192):
        yield Shape("ragged", 128, 16, 16, TOKENS // rows, rows, causal=True)
    yield Shape("window", 128, 16, 16, 1, 16384, causal=False)
    for rows, causal in itertools.product((512, 4096), masks):
        yield Shape("mha-16k", 96, 21, 21, TOKENS // rows, rows, causal)
    for (heads, kv, batch, rows), causal in itertools.product(
        ((16, 2, 16, 256), (32, 8, 4, 2048), (16, 1, 8, 1024)), masks
    ):
        yield Shape("groups", 128, heads, kv, batch, rows, causal)


def flat(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """In the order of memory, which is the same for dense and ragged tensors."""
    return tuple(x.transpose(1, 2).reshape(-1) for x in tensors)


@dataclass
class Contender:
    """A backward pass, its results and operations, and its bytes of workspace if it is ours."""

    task: Task
    results: Callable[[], tuple[torch.Tensor, ...]]
    flop: float
    workspace: int = 0
    engine: str = ""


class Cell:
    """The inputs of a shape, and the contenders."""

    def __init__(self, shape: Shape) -> None:
        """Draws them."""
        self.shape = shape
        of_q, of_kv = (shape.heads, shape.dim), (shape.heads_kv, shape.dim)
        self.memory = {
            name: torch.randn(shape.batch, shape.rows, *of, device="cuda", dtype=torch.bfloat16)
            for name, of in (("Q", of_q), ("K", of_kv), ("V", of_kv), ("DOUT", of_q))
        }

    def tensors(self, ragged: bool = False) -> dict[str, torch.Tensor]:
        """The inputs as [batch, head, row, dim], or one row of sequences, with new outputs."""
        found = {}
        for name, memory in self.memory.items():
            x = memory.flatten(0, 1)[None] if ragged else memory
            found[name] = x.transpose(1, 2)
        found["O"] = torch.empty_like(found["Q"])
        found |= {f"D{name}": torch.empty_like(found[name]) for name in "QKV"}
        s = self.shape
        size = (s.batch * s.rows, s.heads) if ragged else (s.batch, s.heads, s.rows)
        found["LSE"] = torch.empty(size, device="cuda")
        if ragged:
            starts = torch.arange(s.batch + 1, device="cuda", dtype=torch.int32) * s.rows
            found |= {"CU_SEQLENS_Q": starts, "CU_SEQLENS_KV": starts}
        return found

    def ours(
        self, library: Library, engine: str, window: int = 0, *, ragged: bool = False
    ) -> Contender:
        """An engine of a build of the library."""
        s, tensors = self.shape, self.tensors(ragged)
        options = f"training=1 causal={int(s.causal or window > 0)}"
        if window:
            options += f" window_left={window}"
        plan = Attention(library, options, tensors, engine, longest=s.rows if ragged else 0)
        plan.forward()
        return Contender(
            plan.backward,
            lambda: flat(tensors[name] for name in GRADIENTS),
            s.flop(window),
            plan.workspace_bytes[1],
            plan.engine,
        )

    def fa3(self, module: object, library: object, window: int = 0) -> Contender:
        """FlashAttention-3."""
        s, tensors = self.shape, self.tensors()
        masks = {"causal": int(s.causal)}
        if window:
            masks = {"causal": 0, "window_left": window - 1, "window_right": 0}
        plan = module.Attention(library, tensors, **masks)
        if not plan.trains:
            raise RuntimeError("fa3: no backward pass of this shape")
        plan.forward()
        results = lambda: flat(tensors[name] for name in GRADIENTS)  # noqa: E731
        return Contender(plan.backward, results, s.flop(window))

    def torch_cudnn(self) -> Contender:
        """PyTorch's cuDNN back end."""
        s, tensors, kept = self.shape, self.tensors(), {}
        inputs = [tensors[n].detach().requires_grad_() for n in "QKV"]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(
                *inputs, is_causal=s.causal, enable_gqa=s.heads != s.heads_kv
            )

        def backward() -> None:
            kept["D"] = None  # frees the last call's, so that no call allocates anew
            kept["D"] = torch.autograd.grad(out, inputs, tensors["DOUT"], retain_graph=True)

        return Contender(backward, lambda: flat(kept["D"]), s.flop())


class Bench:
    """All cells."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Loads the libraries."""
        self.arguments, self.libraries = arguments, Libraries(arguments)

    def makers(self, cell: Cell) -> dict[str, Callable[[], Contender]]:
        """By name of a contender, the function that prepares it."""
        suite, library, fa3 = cell.shape.suite, self.libraries.own, self.libraries.fa3
        if suite == "ragged":
            return {
                "hopper": lambda: cell.ours(library, "hopper", ragged=True),
                "dense": lambda: cell.ours(library, "hopper"),
            }
        if suite == "window":
            found = {
                "hopper": lambda: cell.ours(library, "hopper", WINDOW),
                "all keys": lambda: cell.ours(library, "hopper"),
            }
            return found | ({"fa3": lambda: cell.fa3(*fa3, WINDOW)} if fa3 else {})
        found = {e: lambda e=e: cell.ours(library, e) for e in self.arguments.engines}
        for name, other in self.libraries.others.items():
            found[name] = lambda other=other: cell.ours(other, "hopper")
        found["torch-cudnn"] = cell.torch_cudnn
        return found | ({"fa3": lambda: cell.fa3(*fa3)} if fa3 else {})

    def contenders(self, cell: Cell) -> tuple[dict[str, Contender], dict[str, str]]:
        """By name; and why the others are left out."""
        found, refused = {}, {}
        for name, make in self.makers(cell).items():
            try:
                found[name] = make()
                found[name].task()
                torch.cuda.synchronize()
            except RuntimeError as error:
                found.pop(name, None)
                refused[name] = str(error).splitlines()[0]
        names = [n for n in found if n not in ("unordered", "all keys")]
        wants = {n: found[n].results() for n in names if n in PEERS or n == "dense"}
        for name in names:
            errors = [
                max(map(difference, found[name].results(), want))
                for other, want in wants.items()
                if other != name
            ]
            if errors and not min(errors) <= TOLERANCE:
                refused[name] = f"the gradients differ: {min(errors):.3f}"
        return {n: c for n, c in found.items() if n not in refused}, refused

    def cell(self, shape: Shape) -> dict:
        """The record of one cell."""
        found, refused = self.contenders(Cell(shape))
        timers = {n: Timer([c.task], self.arguments.window_ms) for n, c in found.items()}
        times = take_turns(timers, self.arguments.rounds)
        ms = {name: statistics.median(x) for name, x in times.items()}
        record = {
            "case": "backward",
            "what": shape.what,
            "ms": {name: round(x, 5) for name, x in ms.items()},
            "tflops": {name: round(found[name].flop / x / 1e9, 1) for name, x in ms.items()},
            "workspace_mb": {
                name: round(c.workspace / 1e6, 1) for name, c in found.items() if c.workspace
            },
            "engine": {name: c.engine for name, c in found.items() if c.engine},
            "bars": self.bars(shape, found, times),
        }
        no_graph = [name for name, timer in timers.items() if not timer.graph]
        more = {"refused": refused, "no_graph": no_graph}
        return record | {key: value for key, value in more.items() if value}

    @staticmethod
    def bars(shape: Shape, found: dict[str, Contender], times: dict[str, list[float]]) -> dict:
        """Of each comparison of hopper: the ratio of TFLOP/s, its bar, and whether it is met."""
        against = {"unordered": 0.95, "dense": 0.95, "all keys": 0.7}
        peers = [n for n in PEERS if n in times]
        if peers and shape.suite in ("mha-16k", "llama"):
            best = min(peers, key=lambda n: statistics.median(times[n]))
            against[best] = shape.bar()
        ratios = {}
        for name, bar in against.items():
            if name in times and "hopper" in times:
                work = found["hopper"].flop / found[name].flop
                ratio = round(over(times[name], times["hopper"]) * work, 3)
                ratios[name] = {"ratio": ratio, "bar": bar, "met": ratio >= bar}
        if shape.suite == "mha-16k" and "hopper" in found:
            mb = round(found["hopper"].workspace / 1e6, 1)
            ratios["workspace"] = {"mb": mb, "bar": 140, "met": mb <= 140}
        return ratios

    def cells(self) -> Iterator[dict]:
        """Every cell whose name matches, until the time is over."""
        for record in records_of(shapes(), self.cell, self.arguments):
            yield record
            torch.cuda.empty_cache()


def row(record: dict) -> str:
    """A record as a line of the table: TFLOP/s of each contender, and the bars."""
    if "ms" not in record:
        return json.dumps(record)
    line = f"{record['what']:<42}"
    line += "".join(f"  {name} {x}" for name, x in record["tflops"].items())
    for name, bar in record["bars"].items():
        figure = bar.get("ratio", bar.get("mb"))
        line += f"  | {name} {figure} ({bar['bar']}{'' if bar['met'] else ', MISSED'})"
    for key in ("refused", "no_graph"):
        if key in record:
            line += f"  {key}: {record[key]}"
    return line


def main() -> None:
    """Times all cells."""
    arguments = command_line(__doc__, ["hopper"], window_ms=100)
    torch.manual_seed(20261126)
    write_records("bench/gpu_backward.py", Bench(arguments).cells(), row, arguments.output)


if __name__ == "__main__":
    main()
