#!/usr/bin/env python3
"""Draws the losses of examples/torch/fp8_gpt.py: against the steps, and relative to bf16.

usage: loss_curve.py RECORDS.jsonl CURVE.svg
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 640, 180, 56, 30, 50
COLORS = {"bf16": "#8a8a8a", "delayed": "#1b6ca8", "current": "#c9822b"}
LABEL = 'font-family="sans-serif" font-size="11"'


def panel(top: int, title: str, unit: str, series: dict[str, list[float]]) -> list[str]:
    """One diagram: a line for each series, and the least and the largest value."""
    values = [x for line in series.values() for x in line]
    least, largest = min(values), max(values)
    spread = largest - least or 1.0
    out = [f'<text x="{LEFT}" y="{top - 8}" {LABEL}>{title}</text>']
    for value, y in ((largest, top), (least, top + HEIGHT)):
        out.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        text = f"{value:.2f}{unit}"
        out.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" {LABEL}>{text}</text>')
    for name, line in series.items():
        step = WIDTH / max(len(line) - 1, 1)
        points = " ".join(
            f"{LEFT + i * step:.1f},{top + (largest - x) / spread * HEIGHT:.1f}"
            for i, x in enumerate(line)
        )
        color = COLORS[name]
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.2"/>')
    return out


def curve(losses: dict[str, list[float]]) -> str:
    """The picture."""
    changes = {
        name: [100 * (a / b - 1) for a, b in zip(line, losses["bf16"], strict=True)]
        for name, line in losses.items()
        if name != "bf16"
    }
    second = TOP + HEIGHT + GAP
    height = second + HEIGHT + 30
    steps = len(losses["bf16"])
    parts = panel(TOP, f"loss of {steps} steps", "", losses)
    parts += panel(second, "relative to bf16", " %", changes)
    for i, name in enumerate(losses):
        x = LEFT + WIDTH - 200 + 70 * i
        parts.append(f'<text x="{x}" y="{TOP - 8}" fill="{COLORS[name]}" {LABEL}>{name}</text>')
    size = f'width="{LEFT + WIDTH + 20}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect {size} fill="white"/>'
    return "\n".join([head, *parts, "</svg>", ""])


def main() -> None:
    """The command line."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    losses = {r["recipe"]: r["loss"] for r in records if r["case"] == "fp8-gpt"}
    Path(sys.argv[2]).write_text(curve(losses))


if __name__ == "__main__":
    main()
