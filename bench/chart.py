#!/usr/bin/env python3
"""Draws the records of gpu_vs_torch.py, gpu_backward.py or gpu_models.py as a chart.

usage: chart.py RECORDS.jsonl CHART.png      needs matplotlib
Of the suite mha-16k one panel for each head dimension, mask and pass: TFLOP/s over rows, a line for
each contender. Of other suites one panel for each pass: a group of bars for each problem.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

WHAT = re.compile(r"(\w+) d=(\d+) s=(\d+) (full|causal) (forward|backward)")
BACKWARD = re.compile(r"mha-16k d=(\d+) (full|causal) s=(\d+) .*")
COLORS = {
    "hopper": "#1b6ca8",
    "hopper-cudnn": "#12456d",
    "portable": "#2a9d5c",
    "our-cudnn": "#7d5ba6",
    "fa2": "#c9822b",
    "fa3": "#c9822b",
    "cudnn": "#8a8a8a",
    "torch-cudnn": "#8a8a8a",
}


def panels(records: list[dict]) -> dict[tuple, dict[str, list]]:
    """(pass, mask, dim) -> contender -> [(rows, TFLOP/s)]."""
    found: dict[tuple, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        match = WHAT.fullmatch(record.get("what", ""))
        if match and match[1] == "bf16" and "tflops" in record:
            key = (match[5], match[4], int(match[2]))
            found[key][record["contender"]].append((int(match[3]), record["tflops"]))
        match = BACKWARD.fullmatch(record.get("what", ""))
        if match:
            for name, tflops in record["tflops"].items():
                key = ("backward", match[2], int(match[1]))
                found[key][name].append((int(match[3]), tflops))
    return found


def bars(records: list[dict]) -> plt.Figure:
    """A group of bars for each problem, a panel for each pass."""
    timed = [r for r in records if "tflops" in r]
    if not timed:
        raise SystemExit("no record has tflops: there is nothing to draw")
    names = list(dict.fromkeys(r["contender"] for r in timed))
    parts = [p for p in ("forward", "backward") if any(r["what"].endswith(p) for r in timed)]
    figure, grid = plt.subplots(1, len(parts), figsize=(6.5 * len(parts), 4.5), squeeze=False)
    for panel, part in zip(grid[0], parts, strict=True):
        of_part = [r for r in timed if r["what"].endswith(part)]
        problems = list(dict.fromkeys(r["what"] for r in of_part))[::-1]
        thick = 0.8 / len(names)
        for i, name in enumerate(names):
            mine = [r for r in of_part if r["contender"] == name]
            places = [problems.index(r["what"]) + 0.4 - (i + 0.5) * thick for r in mine]
            widths = [r["tflops"] for r in mine]
            panel.barh(places, widths, thick, label=name, color=COLORS.get(name))
        texts = [what.removesuffix(f" {part}") for what in problems]
        panel.set_yticks(range(len(problems)), texts, fontsize=7)
        panel.set_title(f"{part}, TFLOP/s", fontsize=9)
        panel.grid(alpha=0.3, axis="x")
        panel.tick_params(axis="x", labelsize=7)
    grid[0][0].legend(fontsize=7)
    figure.suptitle(machine(records)["gpu"], fontsize=10)
    return figure


def machine(records: list[dict]) -> dict:
    """The record that says where the others were taken."""
    return next(r for r in records if r.get("case") == "machine")


def lines(records: list[dict]) -> plt.Figure:
    """TFLOP/s over rows, a panel for each head dimension, mask and pass."""
    found = panels(records)
    dims = sorted({dim for _, _, dim in found})
    rows = [
        (part, mask)
        for part in ("forward", "backward")
        for mask in ("full", "causal")
        if any(key[:2] == (part, mask) for key in found)
    ]
    size = (4 * len(dims), 2.6 * len(rows))
    figure, grid = plt.subplots(len(rows), len(dims), figsize=size, squeeze=False)
    for y, (part, mask) in enumerate(rows):
        for x, dim in enumerate(dims):
            panel = grid[y][x]
            for name, points in found[part, mask, dim].items():
                xs, ys = zip(*sorted(points), strict=True)
                panel.plot(xs, ys, "o-", ms=3, lw=1.4, label=name, color=COLORS.get(name))
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_title(f"{part}, {mask}, head dimension {dim}", fontsize=9)
            panel.grid(alpha=0.3)
            panel.tick_params(labelsize=7)
    grid[0][0].legend(fontsize=7)
    for panel in grid[-1]:
        panel.set_xlabel("rows", fontsize=8)
    for line in grid:
        line[0].set_ylabel("TFLOP/s", fontsize=8)
    figure.suptitle(
        f"{machine(records)['gpu']}, bf16, batch x rows = 16384, heads x dim = 2048", fontsize=10
    )
    return figure


def main() -> None:
    """The command line."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    figure = lines(records) if panels(records) else bars(records)
    figure.tight_layout()
    figure.savefig(Path(sys.argv[2]), dpi=110)


if __name__ == "__main__":
    main()
