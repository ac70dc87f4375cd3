#!/usr/bin/env python3
"""Times multi-head latent attention at decoding: head dimensions 576 and 512, V a part of K.

usage: gpu_mla.py --library build/libte_attention.so [--other NAME=PATH] [--only REGEX]

bf16, 128 query heads on one head of K and V, causal to the bottom right, no LSE; every timing reads
copies of the cache that together exceed the L2 cache. `separate`: V has memory of its own. `share`
is that of the bound: the time of the products at the rate of a large product, or of reading K (and
V) at the rate of a copy, the larger. A result that is further than 2 % of its norm from PyTorch's
in fp32 is reported and not timed; `equal`: both places of V give the same bits.
"""

import argparse
import math
import re
import statistics
from pathlib import Path

import torch
from gpu_turns import Timer
from gpu_vs_torch import ceilings, machine
from library import Attention, Library

HEADS, DIM, DIM_V = 128, 576, 512
CASES = tuple(
    (batch, keys, queries, page)
    for batch, keys in ((64, 4096), (128, 4096), (16, 8192), (1, 4096), (1, 32768), (128, 1024))
    for queries, page in ((1, 0), (1, 64), (1, 16), (1, 1), (2, 0))
)
COLD = 128 << 20
ROUNDS = 5
TOLERANCE = 2e-2


def name_of(batch: int, keys: int, queries: int, page: int) -> str:
    """The name of a case, which --only matches."""
    return f"b={batch} kv={keys} q={queries} {f'page={page}' if page else 'dense'}"


class Cell:
    """One case and its tensors."""

    def __init__(self, batch: int, keys: int, queries: int, page: int) -> None:
        """Allocates."""
        self.batch, self.keys, self.queries, self.page = batch, keys, queries, page
        make = lambda *size: torch.randn(size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.q = make(batch, queries, HEADS, DIM).transpose(1, 2)
        places, slots = (batch * keys // page, page) if page else (batch, keys)
        copies = min(16, max(1, COLD // (batch * keys * DIM * 2)))
        self.k = [make(places, slots, 1, DIM).transpose(1, 2) for _ in range(copies)]
        self.more: dict[str, torch.Tensor] = {}
        if page:
            order = torch.randperm(places, device="cuda", dtype=torch.int32).reshape(batch, -1)
            lengths = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * keys
            self.more = {"TABLE_K": order, "TABLE_V": order, "CU_SEQLENS_KV": lengths}

    def plans(self, library: Library, *, separate: bool, engine: str = "hopper") -> list[Attention]:
        """A plan for each copy of the cache."""
        made = []
        for k in self.k:
            v = k[..., :DIM_V]
            o = torch.full((self.batch, self.queries, HEADS, DIM_V), math.nan, device="cuda")
            tensors = {
                "Q": self.q,
                "K": k,
                "V": v.clone(memory_format=torch.contiguous_format) if separate else v,
                "O": o.bfloat16().transpose(1, 2),
                **self.more,
            }
            options = f"dim_v={DIM_V} causal=1 bottom_right=1"
            made.append(Attention(library, options, tensors, engine, self.keys if self.page else 0))
            made[-1].o = tensors["O"]
        return made

    def reference(self, entry: int) -> torch.Tensor:
        """O of a batch entry with the first copy of the cache, in fp32."""
        k = self.k[0]
        if self.page:
            k = k[self.more["TABLE_K"][entry].long()].transpose(0, 1).reshape(-1, DIM)
        else:
            k = k[entry, 0]
        scores = self.q[entry].float() @ k.float().T / math.sqrt(DIM)
        hidden = torch.ones(self.queries, self.keys, device="cuda", dtype=torch.bool)
        scores.masked_fill_(hidden.triu(self.keys - self.queries + 1), -math.inf)
        return scores.softmax(-1) @ k[:, :DIM_V].float()

    def bound_ms(self, ceiling: dict, *, separate: bool) -> float:
        """The least time."""
        pairs = self.batch * self.keys
        flops = 2 * pairs * self.queries * HEADS * (DIM + DIM_V)
        size = 2 * pairs * (DIM + (DIM_V if separate else 0))
        return max(flops / ceiling["product_tflops"] / 1e9, size / ceiling["copy_gb_per_s"] / 1e6)


def run_cell(cell: Cell, libraries: dict[str, Library], ceiling: dict) -> str:
    """The times of all builds as text."""
    timers, lines = {}, []
    want = torch.stack([cell.reference(i) for i in (0, cell.batch - 1)])
    for name, library in libraries.items():
        outputs = []
        for separate in (False, True):
            what = f"{name}-separate" if separate else name
            try:
                plans = cell.plans(library, separate=separate)
                plans[0].forward()
                torch.cuda.synchronize()
            except RuntimeError as error:
                lines.append(f"{what} refused: {str(error).splitlines()[0]}")
                continue
            got = plans[0].o[[0, cell.batch - 1]].float()
            error = float((got - want).norm() / want.norm())
            if not error <= TOLERANCE:
                lines.append(f"{what} WRONG: {error:.4f}")
                continue
            outputs.append(plans[0].o)
            timers[what] = Timer([plan.forward for plan in plans], 4)
        if len(outputs) > 1:
            lines.append(f"{name} {'equal' if torch.equal(*outputs) else 'DIFFERENT'}")
    times: dict[str, list[float]] = {what: [] for what in timers}
    for _ in range(ROUNDS):
        for what, timer in timers.items():
            start, end = timer.take()
            torch.cuda.synchronize()
            times[what].append(start.elapsed_time(end) / timer.calls)
    for what, x in times.items():
        ms = statistics.median(x)
        share = cell.bound_ms(ceiling, separate=what.endswith("-separate")) / ms
        flops = 2 * cell.batch * cell.keys * cell.queries * HEADS * (DIM + DIM_V)
        lines.append(f"{what} {ms * 1e3:.1f} us {flops / ms / 1e9:.0f} TFLOP/s share {share:.2f}")
    return "; ".join(lines)


def main() -> None:
    """Runs the cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--only", default="", help="a regular expression that names match")
    arguments = parser.parse_args()
    torch.manual_seed(20251125)
    libraries = {"hopper": Library(arguments.library.resolve())}
    for other in arguments.other:
        name, path = other.split("=", 1)
        libraries[name] = Library(Path(path).resolve())
    ceiling = ceilings()
    print({**machine(), **ceiling}, flush=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        for case in CASES:
            if re.search(arguments.only, name_of(*case)):
                print(name_of(*case), run_cell(Cell(*case), libraries, ceiling), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
