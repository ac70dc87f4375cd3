#!/usr/bin/env python3
"""Times the backward passes of two GPU engines by shape: the data of src/cudnn/faster.h.

usage: backward_table.py --library LIBRARY.so [--output FILE.jsonl]
Dense self-attention, causal and full: 16384 tokens over a width of 2048, then little work, groups
and odd rows. The engines take turns in blocks of launches; a figure is the median over blocks of
the medians of blocks. `times` says how often the second engine's pass fits into the first one's.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_vs_torch import block_ms, difference, machine
from library import NAMES, Attention, Library

TOKENS, WIDTH = 16384, 2048
BLOCKS, LAUNCHES = 3, 7
GRADIENTS = ("DQ", "DK", "DV")


@dataclass(frozen=True)
class Shape:
    """One problem."""

    dim: int
    dim_v: int
    heads: int
    heads_kv: int
    batch: int
    rows: int
    dtype: torch.dtype = torch.bfloat16

    def text(self, causal: bool) -> str:
        """As the records name it."""
        return (
            f"{NAMES[self.dtype]} d={self.dim}/{self.dim_v} heads={self.heads}/{self.heads_kv} "
            f"b={self.batch} s={self.rows} {'causal' if causal else 'full'}"
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The bytes that an engine reads and writes."""

        def make(heads: int, dim: int) -> torch.Tensor:
            shape = (self.batch, self.rows, heads, dim)
            return torch.randn(shape, device="cuda", dtype=self.dtype).transpose(1, 2)

        q, k, v = (
            make(self.heads, self.dim),
            make(self.heads_kv, self.dim),
            make(self.heads_kv, self.dim_v),
        )
        found = {"Q": q, "K": k, "V": v, "DOUT": make(self.heads, self.dim_v)}
        found |= {"O": torch.empty_like(found["DOUT"])}
        found |= {f"D{name}": torch.empty_like(found[name]) for name in ("Q", "K", "V")}
        return found | {"LSE": torch.empty(self.batch, self.heads, self.rows, device="cuda")}


def full(dim: int, dim_v: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """A shape that fills the GPU."""
    heads = max(WIDTH // dim, 8)
    return Shape(dim, dim_v, heads, heads, TOKENS // rows, rows, dtype)


def shapes() -> Iterator[Shape]:
    """The list."""
    for dim, rows in itertools.product((64, 128, 256), (64, 128, 256, 512, 1024, 2048)):
        yield full(dim, dim, rows)
    for (dim, dim_v), rows in itertools.product(
        ((192, 128), (96, 96), (80, 80), (32, 32)), (128, 512, 2048)
    ):
        yield full(dim, dim_v, rows)
    small = ((1, 2, 64), (1, 2, 128), (1, 2, 512), (1, 8, 512), (1, 8, 1024), (1, 4, 4096))
    for dim, (batch, heads, rows) in itertools.product((64, 128, 256), small):
        yield Shape(dim, dim, heads, heads, batch, rows)
    groups = ((16, 2, 16, 256), (32, 8, 4, 2048), (16, 1, 8, 1024), (8, 4, 2, 500))
    for dim, (heads, heads_kv, batch, rows) in itertools.product((64, 128, 256), groups):
        yield Shape(dim, dim, heads, heads_kv, batch, rows)
    for dim, rows in ((64, 512), (128, 2048), (256, 512)):
        yield full(dim, dim, rows, torch.float16)
    for dim, rows in ((64, 257), (128, 1000), (128, 4100), (256, 300)):
        yield full(dim, dim, rows)


def record(library: Library, engines: list[str], shape: Shape, causal: bool) -> dict:
    """The times of one shape, or why there are none."""
    fact = {"what": shape.text(causal)}
    tensors = shape.tensors()
    options = f"training=1 causal={int(causal)} dim_v={shape.dim_v}"
    try:
        plans = {name: Attention(library, options, tensors, name) for name in engines}
    except RuntimeError as error:
        return fact | {"refused": str(error)}
    plans[engines[0]].forward()
    found = {}
    for name, plan in plans.items():
        plan.backward()
        found[name] = [tensors[t].clone() for t in GRADIENTS]
    apart = map(difference, found[engines[1]], found[engines[0]])
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(BLOCKS):
        for name in engines if turn % 2 else engines[::-1]:
            times[name].append(block_ms(plans[name].backward, LAUNCHES))
    ms = {name: statistics.median(blocks) for name, blocks in times.items()}
    fact |= {f"{name}_ms": round(figure, 5) for name, figure in ms.items()}
    fact["times"] = round(ms[engines[0]] / ms[engines[1]], 3)
    return fact | {"difference": round(max(apart), 5)}


def main() -> None:
    """Runs the list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    parser.add_argument("--output", type=Path, help="where lines of JSON go")
    parser.add_argument("--engines", default="portable,cudnn", help="two of ours")
    arguments = parser.parse_args()
    library = Library(arguments.library.resolve())
    lines = [machine() | {"program": "bench/backward_table.py"}]
    for shape, causal in itertools.product(shapes(), (False, True)):
        lines.append(record(library, arguments.engines.split(","), shape, causal))
        print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
