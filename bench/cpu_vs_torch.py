#!/usr/bin/env python3
"""Compares the CPU engine with PyTorch's scaled_dot_product_attention, on the same tensors.

usage: cpu_vs_torch.py --library build/libte_attention.so [--output FILE.jsonl]
Each figure is the median of runs that alternate between the two, after a warm-up; outputs are
compared first. Lines of JSON go to the file, a table to the standard output.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from facts import commit, numbers, processor
from library import NAMES, Attention, Library
from torch.nn.functional import scaled_dot_product_attention

HEADS = {512: 16, 1024: 16, 2048: 8, 4096: 2}  # fewer where rows are long, for time
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # of the norm of the difference
PAUSE = 0.05  # seconds before each run: OpenMP's threads spin for some 10 ms after theirs
# The project's targets, as torch's time over ours: by dtype, pass and causal.
BARS = {
    ("bf16", "forward", False): 2.5,
    ("bf16", "forward", True): 3.0,
    ("fp32", "forward", False): 1.5,
    ("fp32", "forward", True): 2.0,
}
BACKWARD_BAR, DECODE_BAR = 2.0, 0.7
OPTION_BARS = {"bias": 0.7, "alibi": 0.7, "softcap": 0.7, "dropout": 0.4}  # of the plain speed
ENGINES = ("cpu-amx", "cpu-avx512-bf16", "cpu-avx512", "cpu-avx2", "cpu-generic")
Task = Callable[[], object]


def medians(tasks: dict[str, Task], runs: int, clock: str = "wall") -> dict[str, float]:
    """Median milliseconds of tasks that take turns, each right after an untimed run of its own.

    So the threads of both are awake, as they are in a loop: on a virtual machine it may take
    milliseconds to wake one.
    On the processor's clock the least: on a host that is not idle, others only add to it.
    """
    now = time.process_time if clock == "processor" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(runs):
        for name, task in tasks.items():
            time.sleep(PAUSE)
            task()
            start = now()
            task()
            times[name].append((now() - start) * 1e3)
    one = min if clock == "processor" else statistics.median
    return {name: one(values) for name, values in times.items()}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|, in float64."""
    a, b = ours.double(), theirs.double()
    return float((a - b).norm() / b.norm())


def make_tensors(dtype: torch.dtype, heads: int, s: int, d: int) -> dict[str, torch.Tensor]:
    """All tensors of training one batch, [1, heads, s, d], by their names in tea_tensor."""
    torch.manual_seed(heads * s + d)
    shape = (1, heads, s, d)
    tensors = {name: torch.randn(shape).to(dtype) for name in ("Q", "K", "V", "DOUT")}
    tensors |= {name: torch.empty(shape, dtype=dtype) for name in ("O", "DQ", "DK", "DV")}
    return tensors | {"LSE": torch.empty(1, heads, s)}


def flops(heads: int, s: int, d: int, causal: bool) -> dict[str, float]:
    """Operations of each pass; backward recomputes the scores."""
    pairs = heads * (s * (s + 1) / 2 if causal else s * s)
    return {"forward": 4 * pairs * d, "backward": 10 * pairs * d}


class Bench:
    """The cases, each a generator of records."""

    def __init__(self, library: Library, arguments: argparse.Namespace) -> None:
        """Keeps what all cases share."""
        self.library, self.runs = library, arguments.runs
        self.clock, self.heads = arguments.clock, arguments.heads
        self.lengths, self.dims, self.keys = arguments.lengths, arguments.dims, arguments.keys

    def against_torch(self) -> Iterator[dict]:
        """Forward and backward over types, lengths, head dimensions, full and causal."""
        for s in self.lengths:
            for dtype in (torch.bfloat16, torch.float32):
                for d in self.dims:
                    for causal in (False, True):
                        yield from self.one(dtype, s, d, causal)

    def one(self, dtype: torch.dtype, s: int, d: int, causal: bool) -> Iterator[dict]:
        """Both passes of one shape."""
        heads = self.heads or HEADS.get(s, 2)
        tensors = make_tensors(dtype, heads, s, d)
        ours = Attention(self.library, f"training=1 causal={int(causal)}", tensors)
        inputs = [tensors[n].detach().requires_grad_() for n in ("Q", "K", "V")]
        out = scaled_dot_product_attention(*inputs, is_causal=causal)
        ours.forward()
        ours.backward()

        def their_backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, inputs, tensors["DOUT"], retain_graph=True)

        def their_forward() -> torch.Tensor:
            with torch.no_grad():
                return scaled_dot_product_attention(*inputs, is_causal=causal)

        grads = zip(("DQ", "DK", "DV"), their_backward(), strict=True)
        errors = {
            "forward": difference(tensors["O"], out.detach()),
            "backward": max(difference(tensors[n], grad) for n, grad in grads),
        }
        work = flops(heads, s, d, causal)
        name = NAMES[dtype]
        for part, mine, theirs in (
            ("forward", ours.forward, their_forward),
            ("backward", ours.backward, their_backward),
        ):
            if not errors[part] <= TOLERANCE[dtype]:
                raise SystemExit(f"{name} s={s} d={d} {part}: outputs differ by {errors[part]:.2e}")
            ms = medians({"ours": mine, "torch": theirs}, self.runs, self.clock)
            yield {
                "case": "torch",
                "what": f"{name} s={s} d={d} h={heads} {'causal' if causal else 'full'} {part}",
                "engine": ours.engine,
                "ms": ms["ours"],
                "torch_ms": ms["torch"],
                "gflops": work[part] / ms["ours"] / 1e6,
                "torch_gflops": work[part] / ms["torch"] / 1e6,
                "difference": errors[part],
                "ratio": ms["torch"] / ms["ours"],
                "bar": BARS[name, part, causal] if part == "forward" else BACKWARD_BAR,
            }

    def options(self) -> Iterator[dict]:
        """The cost of an option: the plain kernel's time over the kernel's with it."""
        heads, s, d = 4, min(2048, self.lengths[-1]), 128
        base = make_tensors(torch.float32, heads, s, d)
        square = {"BIAS": torch.randn(1, heads, s, s)}
        state = {"RNG_STATE": torch.tensor([1, 0], dtype=torch.int64)}
        cases = {
            "plain": ("", {}),
            "bias": ("bias=post_scale", square),
            "alibi": ("alibi=standard", {}),
            "softcap": ("softcap=20", {}),
            "dropout": ("dropout=0.1", state),
        }
        plans = {
            name: Attention(self.library, f"training=1 {text}", base | extra)
            for name, (text, extra) in cases.items()
        }
        for part in ("forward", "backward"):
            ms = medians({name: getattr(plan, part) for name, plan in plans.items()}, self.runs)
            for name, bar in OPTION_BARS.items():
                yield {
                    "case": "option",
                    "what": f"fp32 s={s} d={d} h={heads} full {name} {part}",
                    "engine": plans[name].engine,
                    "ms": ms[name],
                    "plain_ms": ms["plain"],
                    "ratio": ms["plain"] / ms[name],
                    "bar": bar,
                }

    def engines(self) -> Iterator[dict]:
        """Each instruction set by the name of its engine."""
        heads, s, d = 2, min(2048, self.lengths[-1]), 128
        work = flops(heads, s, d, False)
        for dtype in (torch.bfloat16, torch.float32):
            tensors = make_tensors(dtype, heads, s, d)
            for engine in ENGINES:
                record = {"case": "engine", "engine": engine}
                what = f"{NAMES[dtype]} s={s} d={d} h={heads} full"
                try:
                    plan = Attention(self.library, "training=1", tensors, engine)
                except RuntimeError as error:
                    yield record | {"what": what, "refused": str(error)}
                    continue
                for part, run in (("forward", plan.forward), ("backward", plan.backward)):
                    ms = medians({part: run}, self.runs)[part]
                    speed = work[part] / ms / 1e6
                    yield record | {"what": f"{what} {part}", "ms": ms, "gflops": speed}

    def decode(self) -> Iterator[dict]:
        """One query row of 32 heads over a long cache of 8, relative to the memory bandwidth."""
        d, dtype = 128, torch.bfloat16
        torch.manual_seed(self.keys)
        tensors = {"Q": torch.randn(1, 32, 1, d).to(dtype)}
        tensors |= {n: torch.randn(1, 8, self.keys, d).to(dtype) for n in ("K", "V")}
        tensors["O"] = torch.empty_like(tensors["Q"])
        ours = Attention(self.library, "", tensors)

        def theirs() -> torch.Tensor:
            q, k, v = (tensors[n] for n in ("Q", "K", "V"))
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

        ours.forward()
        error = difference(tensors["O"], theirs())
        if not error <= TOLERANCE[dtype]:
            raise SystemExit(f"decode: outputs differ by {error:.2e}")
        ms = medians({"ours": ours.forward, "torch": theirs}, 4 * self.runs)
        size = 2 * tensors["K"].nbytes
        speed, most = size / ms["ours"] / 1e6, read_bandwidth(size, self.runs)
        yield {
            "case": "decode",
            "what": f"bf16 decode b=1 h=32/8 keys={self.keys} d={d}",
            "engine": ours.engine,
            "ms": ms["ours"],
            "torch_ms": ms["torch"],
            "gb_per_s": speed,
            "torch_gb_per_s": size / ms["torch"] / 1e6,
            "read_gb_per_s": most,
            "difference": error,
            "ratio": speed / most,
            "bar": DECODE_BAR,
        }


def read_bandwidth(size: int, runs: int) -> float:
    """GB/s at which PyTorch reads a buffer of at least `size` bytes: the best of three ways."""
    buffer = torch.ones(max(size, 2**20) // 4)
    half = buffer.numel() // 2
    ways = {
        "sum": buffer.sum,
        "max": buffer.max,
        "dot": lambda: torch.dot(buffer[:half], buffer[half : 2 * half]),
    }
    return buffer.nbytes / min(medians(ways, 2 * runs).values()) / 1e6


def product_gflops(dtype: torch.dtype, runs: int, n: int = 2048) -> float:
    """Operations per second of PyTorch's matrix product: a ceiling for orientation."""
    a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
    return 2 * n**3 / medians({"mm": lambda: a @ b}, runs)["mm"] / 1e6


def machine(arguments: argparse.Namespace) -> dict:
    """The machine and the method of the measurement; without the paths of that machine."""
    runs = arguments.runs
    return {
        "case": "machine",
        "program": "bench/cpu_vs_torch.py",
        **{
            name: getattr(arguments, name)
            for name in ("runs", "lengths", "dims", "keys", "only", "clock", "heads")
        },
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "torch": torch.__version__,
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "product_gflops_fp32": product_gflops(torch.float32, runs),
        "product_gflops_bf16": product_gflops(torch.bfloat16, runs),
    }


def row(record: dict) -> str:
    """A record as a line of the table."""
    if "refused" in record:
        return f"{record['what']:<44} {record['engine']}: refused: {record['refused']}"
    speed = f"{record['gflops']:8.1f} GFLOP/s" if "gflops" in record else " " * 16
    if "gb_per_s" in record:
        speed = f"{record['gb_per_s']:5.1f} of {record['read_gb_per_s']:5.1f} GB/s"
    line = f"{record['what']:<44} {record['engine']:<12} {record['ms']:9.2f} ms {speed}"
    if "torch_ms" in record:
        line += f"  torch {record['torch_ms']:9.2f} ms"
    if "ratio" in record:
        met = "met" if record["ratio"] >= record["bar"] else "below"
        line += f"  ratio {record['ratio']:5.2f}, bar {record['bar']:.1f} {met}"
    return line


def parse() -> argparse.Namespace:
    """The command line."""
    cases = ("options", "decode", "engines", "against_torch")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    parser.add_argument("--output", type=Path, help="where lines of JSON go")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each figure")
    parser.add_argument(
        "--clock", choices=("wall", "processor"), default="wall", help="of against_torch"
    )
    parser.add_argument("--heads", type=int, default=0, help="of against_torch; 0: by length")
    parser.add_argument("--lengths", type=numbers, default=list(HEADS))
    parser.add_argument("--dims", type=numbers, default=[64, 128])
    parser.add_argument("--keys", type=int, default=32768, help="of the decoding case")
    parser.add_argument("--only", choices=cases, action="append", help="default: every case")
    arguments = parser.parse_args()
    arguments.only = arguments.only or cases
    return arguments


def main() -> None:
    """Runs the cases; every record is written as soon as it is known."""
    arguments = parse()
    os.environ["TE_ATTENTION_THREADS"] = str(arguments.threads)
    torch.set_num_threads(arguments.threads)
    bench = Bench(Library(arguments.library.resolve()), arguments)
    output = arguments.output.open("w") if arguments.output else None

    def note(record: dict, text: str) -> None:
        print(text, flush=True)
        if output:
            output.write(json.dumps(record) + "\n")
            output.flush()

    facts = machine(arguments)
    note(facts, json.dumps(facts))
    for case in arguments.only:
        for record in getattr(bench, case)():
            note(record, row(record))
    if output:
        output.close()


if __name__ == "__main__":
    main()
