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
DIMS = ((64, 64, 32, 32), (128, 128, 16, 16), (192, 128, 16, 16), (256, 256, 8, 8))
DENSE, PADDED, RAGGED = range(3)
NAMES = ("dim", "dim_v", "consumers", "cols", "q_stages", "turns", "rescale_early", "skips")


class Strided(ctypes.Structure):
    """Mirrors tea::hopper::Strided."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("batch", "head", "row")),
    ]


class Sequences(ctypes.Structure):
    """Mirrors tea::hopper::Sequences."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("form", "rows", "tokens")),
        *((n, ctypes.c_void_p) for n in ("cu_seqlens", "offsets")),
    ]


class Mask(ctypes.Structure):
    """Mirrors tea::MaskRule."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("causal", "bottom_right")),
        *((n, ctypes.c_int64) for n in ("window_left", "window_right")),
    ]


class General(ctypes.Structure):
    """Mirrors tea::hopper::General."""

    _fields_ = [
        ("bias", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("bias_batch", "bias_head", "bias_row", "bias_col")),
        *((n, ctypes.c_bool) for n in ("bias_is_fp32", "bias_before_scale", "alibi")),
        ("slopes", ctypes.c_void_p),
        ("slopes_batch", ctypes.c_int64),
        *((n, ctypes.c_float) for n in ("softcap", "dropout")),
        ("rng_state", ctypes.c_void_p),
    ]


class Forward(ctypes.Structure):
    """Mirrors tea::hopper::Forward."""

    _fields_ = [
        *((n, Strided) for n in ("q", "k", "v", "o", "lse", "max", "sum_exp")),
        *((n, Sequences) for n in ("queries", "keys")),
        ("mask", Mask),
        ("origin", ctypes.c_int64 * 4),
        ("origin_device", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("sink", ctypes.c_int32),
        ("sinks", ctypes.c_void_p),
        ("counter", ctypes.c_void_p),
        ("is_fp16", ctypes.c_bool),
        *((n, ctypes.c_int32) for n in ("batch", "heads", "heads_kv", "dim", "dim_v")),
        ("scale", ctypes.c_float),
        ("general", General),
    ]


def strided(x: torch.Tensor) -> Strided:
    """Of a tensor [batch, rows, heads, dim]."""
    return Strided(x.data_ptr(), x.stride(0), x.stride(2), x.stride(1))


class Cell:
    """One shape and mask, with its tensors."""

    def __init__(self, dims: tuple, rows: int, causal: bool, batch: int = 0, window: int = 0):
        self.dim, self.dim_v, self.heads, self.heads_kv = dims
        self.rows, self.causal, self.window = rows, causal, window
        self.batch = batch or 16384 // rows

        def make(heads: int, dim: int) -> torch.Tensor:
            shape = (self.batch, rows, heads, dim)
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        self.q, self.k = make(self.heads, self.dim), make(self.heads_kv, self.dim)
        self.v, self.o = make(self.heads_kv, self.dim_v), make(self.heads, self.dim_v)
        self.lse = torch.empty(self.batch, self.heads, rows, device="cuda")
        self.counter = torch.empty(16, dtype=torch.uint8, device="cuda")
        pairs = rows * rows / (2 if causal else 1)
        if window:
            pairs = rows * (window + 1) - window * (window + 1) / 2
        self.flop = 2.0 * (self.dim + self.dim_v) * pairs * self.batch * self.heads

    def name(self) -> str:
        head = f"d{self.dim}" + (f"/{self.dim_v}" if self.dim != self.dim_v else "")
        mask = "causal" if self.causal else "full"
        mask += f" window {self.window}" if self.window else ""
        heads = str(self.heads) + f"/{self.heads_kv}" * (self.heads != self.heads_kv)
        return f"{head} {self.batch} x {self.rows} x {heads} {mask}"

    def arguments(self) -> Forward:
        lse = Strided(self.lse.data_ptr(), self.heads * self.rows, self.rows, 1)
        side = Sequences(DENSE, self.rows)
        f = Forward(
            *(strided(x) for x in (self.q, self.k, self.v, self.o)), lse, queries=side, keys=side
        )
        f.mask.causal = self.causal
        f.mask.window_left = self.window + 1 if self.window else 0
        f.counter = self.counter.data_ptr()
        f.batch, f.heads, f.heads_kv = self.batch, self.heads, self.heads_kv
        f.dim, f.dim_v, f.scale = self.dim, self.dim_v, self.dim**-0.5
        return f

    def ragged(self) -> Forward:
        """The same work as sequences of equal lengths, which the kernel does not know to be."""
        f = self.arguments()
        tokens = self.batch * self.rows
        starts = range(0, tokens + 1, self.rows)
        self.cu_seqlens = torch.tensor(starts, dtype=torch.int32, device="cuda")
        side = Sequences(RAGGED, self.rows, tokens, self.cu_seqlens.data_ptr())
        f.queries = f.keys = side
        f.lse = Strided(self.lse.data_ptr(), 0, 1, self.heads)
        return f

    def cudnn(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.heads_kv
            )


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
    dense, ragged = cell.arguments(), cell.ragged()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def ours(row: int, arguments=dense):
        def launch() -> None:
            code = library.hopper_forward(row, ctypes.byref(arguments), stream)
            if code:
                raise RuntimeError(f"CUDA error {code}")

        return launch

    rows = {"table": -1, **candidates(library, cell)}
    found = {name: ours(row) for name, row in rows.items()}
    found["table, ragged"] = ours(-1, ragged)
    if cell.window:  # torch's cuDNN has no window
        return found
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


def cells() -> list[tuple]:
    """The arguments of each cell: 16384 tokens, the shapes of two models, and windows."""
    found = [(d, n, causal) for d in DIMS for n in LENGTHS for causal in (False, True)]
    found += [((192, 128, 128, 128), n, True, 1) for n in (2048, 4096, 8192)]
    found += [((128, 128, 64, 8), n, True, 1) for n in (2048, 4096, 16384)]
    found += [(d, 16384, True, 1, 1024) for d in DIMS[:2]]
    return found


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    torch.manual_seed(20240711)
    if len(sys.argv) == 5:
        dim, rows, mask = sys.argv[2:]
        launch_one(library, int(dim), int(rows), mask == "causal")
        return
    print(json.dumps({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}))
    matrix_product("before")
    for cell in cells():
        try:
            measure(library, Cell(*cell))
        except RuntimeError as e:
            report(f"broken: {cell}", error=str(e))
    matrix_product("after")


if __name__ == "__main__":
    main()
