#!/usr/bin/env python3
"""Writes docs/performance.md from the committed records of bench/results.

usage: report.py

A table for each file: a row for each problem and pass, a column for each contender. Figures are
TFLOP/s, as the programs printed them. tests/docs/test_pages.py sees whether the page is current.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
PAGE = ROOT / "docs/performance.md"
HEAD = """# Performance

Written by `bench/report.py` from the records in `bench/results`, which are as the programs printed
them. TFLOP/s, more is better; what was not timed is left out. Contenders of a row ran in turns, in
one process on the same tensors. `cudnn` and `fa2` are PyTorch's back ends, `our-cudnn` is our
engine that calls the same cuDNN, the others are our kernels. PyTorch's back ends know no FP8: the
peer there is cuDNN by `our-cudnn`. Each table is of the commit that it names: what changed since is
told by the pages of the engines. How figures are taken, and how to take them again:
[bench](../bench/README.md).
"""


def section(path: Path) -> str:
    """The table of one file."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    machine = next(r for r in records if r["case"] == "machine")
    timed = [r for r in records if "tflops" in r]
    names = list(dict.fromkeys(r["contender"] for r in timed))
    rows: dict[str, dict[str, float]] = {}
    for record in timed:
        rows.setdefault(record["what"], {})[record["contender"]] = record["tflops"]
    versions = f"torch {machine['torch']}, cuDNN {machine.get('cudnn', 'unknown')}"
    lines = [f"\n## {path.stem}\n", f"{machine['gpu']}, {versions}, {machine['date']},"]
    lines.append(f"commit {machine['commit']}: `{machine.get('command', machine['program'])}`.")
    chart = path.with_suffix(".png")
    if chart.exists():
        lines.append(f"\n![{path.stem}](../{chart.relative_to(ROOT)})")
    lines += ["", f"| | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
    for what, figures in rows.items():
        cells = [f"{figures[name]:.0f}" if name in figures else "" for name in names]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    host = [r for r in records if r["case"] == "host"]
    if host:
        said = [f"{r['contender']} {r['what'].removeprefix('host ')} {r['host_us']}" for r in host]
        lines.append(f"\nMicroseconds of the host for a call: {', '.join(said)}.")
    first = [r for r in records if r["case"] == "first"]
    if first:
        said = [
            f"{r['contender']} {r['what'].removeprefix('first ')} "
            f"{r['first_ms']:.2f} / {r['later_ms']:.2f}"
            for r in first
        ]
        lines.append(
            f"\nMilliseconds of the first call of a planned shape, other shapes having run before, "
            f"and of later ones, with the host's waiting: {', '.join(said)}."
        )
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, of what is in the folder of results."""
    return HEAD + "".join(map(section, sorted(RESULTS.glob("*/*.jsonl"))))


if __name__ == "__main__":
    PAGE.write_text(page())
