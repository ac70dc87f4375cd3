#!/usr/bin/env python3
"""Times the forward pass beside cuDNN's through PyTorch, on the same tensors, in one process.

usage: forward_peers.py LIBRARY [DIM ROWS full|causal]    prints JSON lines

LIBRARY is built from forward_library.cu. With a cell it launches that one three times, for a
profiler. Else every cell is measured:

b * s = 16384 and h * d = 2048, bf16, normal random data. Contenders take turns in rounds of ten
launches, each between events of its own; a figure is the median over rounds of medians of rounds.
"""

import ctypes
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_facts import clocks, report

ROUNDS, LAUNCHES = 5, 10
LENGTHS = (512, 2048, 4096, 16384)
DIMS = ((64, 64, 32), (128, 128, 16), (192, 128, 16), (256, 256, 8))
UNBOUNDED = 1 << 60
NAMES = ("dim", "dim_v", "consumers", "cols", "q_stages", "turns", "rescale_early", "skips")


class Strided(ctypes.Structure):
    """Mirrors tea::hopper::Strided."""

    _fields_ = [("data", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "head", "row")]


class Forward(ctypes.Structure):
    """Mirrors tea::hopper::Forward."""

    _fields_ = [
        *((n, Strided) for n in ("q", "k", "v", "o", "lse")),
        *((n, ctypes.c_int64) for n in ("lo", "hi")),
        ("counter", ctypes.c_void_p),
        *((n, ctypes.c_int32) for n in ("type", "batch", "heads", "heads_kv")),
        *((n, ctypes.c_int32) for n in ("rows_q", "rows_kv", "dim", "dim_v")),
        ("scale", ctypes.c_float),
    ]


def strided(x: torch.Tensor) -> Strided:
    """Of a tensor [batch, rows, heads, dim]."""
    return Strided(x.data_ptr(), x.stride(0), x.stride(2), x.stride(1))


class Cell:
    """One shape and mask, with its tensors."""

    def __init__(self, dims: tuple, rows: int, causal: bool) -> None:
        self.dim, self.dim_v, self.heads = dims
        self.rows, self.causal, self.batch = rows, causal, 16384 // rows
        shape = (self.batch, rows, self.heads)
        make = lambda d: torch.randn(*shape, d, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = make(self.dim), make(self.dim), make(self.dim_v)
        self.o = torch.empty_like(self.v)
        self.lse = torch.empty(self.batch, self.heads, rows, device="cuda")
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        per_head = 2.0 * (self.dim + self.dim_v) * rows * rows
        self.flop = per_head * self.batch * self.heads / (2 if causal else 1)

    def name(self) -> str:
        head = f"d{self.dim}" + (f"/{self.dim_v}" if self.dim != self.dim_v else "")
        mask = "causal" if self.causal else "full"
        return f"{head} {self.batch} x {self.rows} x {self.heads} {mask}"

    def arguments(self) -> Forward:
        lse = Strided(self.lse.data_ptr(), self.heads * self.rows, self.rows, 1)
        return Forward(
            *(strided(x) for x in (self.q, self.k, self.v, self.o)),
            lse,
            -UNBOUNDED,
            0 if self.causal else UNBOUNDED,
            self.counter.data_ptr(),
            0,  # Type::kBf16
            self.batch,
            self.heads,
            self.heads,
            self.rows,
            self.rows,
            self.dim,
            self.dim_v,
            self.dim**-0.5,
        )

    def cudnn(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


def round_ms(work) -> float:
    """The median of a round of launches."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(LAUNCHES)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def matrix_product(when: str) -> None:
    """The ceiling: bf16 8192^3 on random data."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    round_ms(lambda: a @ b)
    tflops = 2 * n**3 / statistics.median(round_ms(lambda: a @ b) for _ in range(3)) / 1e9
    report(f"bf16 matrix product, {when}", tflops=tflops, after=clocks())


def candidates(library, cell: Cell) -> dict:
    """Name -> number, of the candidates for these dims."""
    found, number, fields = {}, 0, (ctypes.c_int * len(NAMES))()
    while library.hopper_candidate(number, fields):
        row = dict(zip(NAMES, fields, strict=True))
        if (row["dim"], row["dim_v"]) == (cell.dim, cell.dim_v):
            found[" ".join(f"{n}={row[n]}" for n in NAMES[2:])] = number
        number += 1
    return found


def contenders(library, cell: Cell) -> dict:
    """Name -> a launch: the table's choice, the candidates, and cuDNN where it takes the cell."""
    arguments = cell.arguments()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def ours(row: int):
        def launch() -> None:
            code = library.hopper_forward(row, ctypes.byref(arguments), stream)
            if code:
                raise RuntimeError(f"CUDA error {code}")

        return launch

    rows = {"table": -1, **candidates(library, cell)}
    found = {name: ours(row) for name, row in rows.items()}
    try:
        cell.cudnn()
        found["cudnn"] = cell.cudnn
    except RuntimeError as e:
        print(json.dumps({"not measured": f"cudnn {cell.name()}", "why": str(e)}), flush=True)
    return found


def differences(cell: Cell, works: dict) -> dict:
    """Name -> the largest difference from cuDNN; warms everything up."""
    want = cell.cudnn().transpose(1, 2).float() if "cudnn" in works else None
    found = {}
    for name, work in works.items():
        cell.o.fill_(float("nan"))
        for _ in range(3):
            work()
        if want is not None and name != "cudnn":
            found[name] = (cell.o.float() - want).abs().max().item()
    return found


def measure(library, cell: Cell) -> None:
    works = contenders(library, cell)
    differs = differences(cell, works)
    times: dict[str, list] = {name: [] for name in works}
    order = list(works)
    for turn in range(ROUNDS):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(round_ms(works[name]))
    for name, rounds in times.items():
        ms = statistics.median(rounds)
        figures = {"ms": round(ms, 4), "rounds_ms": [round(x, 4) for x in rounds]}
        if name in differs:
            figures["differs_from_cudnn_by"] = differs[name]
        report(f"{cell.name()}: {name}", tflops=round(cell.flop / ms / 1e9, 1), **figures)


def launch_one(library, dim: int, rows: int, causal: bool) -> None:
    cell = Cell(next(d for d in DIMS if d[0] == dim), rows, causal)
    arguments = cell.arguments()
    for _ in range(3):
        if library.hopper_forward(-1, ctypes.byref(arguments), None):
            raise SystemExit("the launch failed")
    torch.cuda.synchronize()


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    torch.manual_seed(20240711)
    if len(sys.argv) == 5:
        dim, rows, mask = sys.argv[2:]
        launch_one(library, int(dim), int(rows), mask == "causal")
        return
    print(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}))
    matrix_product("before")
    for dims in DIMS:
        for rows in LENGTHS:
            for causal in (False, True):
                try:
                    measure(library, Cell(dims, rows, causal))
                except RuntimeError as e:
                    report(f"broken: {dims} {rows} {causal}", error=str(e))
    matrix_product("after")


if __name__ == "__main__":
    main()
