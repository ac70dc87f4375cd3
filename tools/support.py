#!/usr/bin/env python3
"""Writes docs/support.md: which engine takes which problem of docs/support.txt on this machine.

usage: support.py TE_ATTN [--device N]

What is printed comes from tea_explain(): the code that refuses is the code that would run.
"""

import argparse
import functools
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs/support.txt"
PAGE = ROOT / "docs/support.md"
AT_ONCE = 4  # processes: planning takes an engine some time
HEAD = """# What runs where

Written by `tools/support.py` from [support.txt](support.txt) and what `tea_explain()` says on
{where}.
The first engine of a row that takes a problem runs it, unless it yields or runs only where it is
named ({named}). The numbers are reasons, below. On the host the engine `cpu` takes every problem
of the list.

"""


def problems() -> list[tuple[str, str]]:
    """(name, problem) of every line; words in capitals stand for the lines that define them."""
    words: dict[str, dict[str, str]] = {}
    found = []
    for line in LIST.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, colon, text = line.partition(": ")
        if not colon:
            word, _, text = line.partition(" ")
            words[word] = fields(text)
            continue
        base, _, more = text.partition(" ")
        merged = words[base] | fields(more)
        found.append((name, " ".join(f"{key}={value}" for key, value in merged.items())))
    return found


def fields(text: str) -> dict[str, str]:
    """The words of a problem by their names."""
    return dict(word.split("=", 1) for word in text.split())


def explain(te_attn: Path, problems: list[str], device: int) -> list[dict[str, str]]:
    """What each engine says to each problem: one process, since the first plan is the slow one."""
    command = [te_attn, "explain", "-", "--device", str(device)]
    done = subprocess.run(
        command, input="\n".join(problems), capture_output=True, text=True, check=False
    )
    answers = []
    for text in done.stdout.removesuffix("\n\n").split("\n\n"):
        said = dict(re.findall(r"^([\w-]+): (.*)$", text, re.MULTILINE))
        answers.append({e: why for e, why in said.items() if "runs on the host" not in why})
    if len(answers) != len(problems) or not all(answers):
        raise SystemExit(f"{len(answers)} answers to {len(problems)}: {done.stderr}{done.stdout}")
    return answers


def table(answers: list[tuple[str, dict[str, str]]]) -> str:
    """The matrix, and the reasons that it numbers."""
    engines = list(answers[0][1])
    reasons: list[str] = []
    lines = [
        f"| problem | {' | '.join(f'`{e}`' for e in engines)} |",
        "|---" * (1 + len(engines)) + "|",
    ]
    for name, said in answers:
        cells = []
        for engine in engines:
            refused = re.fullmatch(r"refused: (.*)", said[engine])
            if not refused:
                cells.append("yields" if "yields" in said[engine] else "yes")
                continue
            why = f"`{engine}`: {refused[1][:200]}"
            if why not in reasons:
                reasons.append(why)
            cells.append(f"no ({reasons.index(why) + 1})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    numbered = [f"{i + 1}. {why}" for i, why in enumerate(reasons)]
    return "\n".join([*lines, "", *numbered, ""])


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("te_attn", type=lambda path: Path(path).resolve())
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--where", default="this machine", help="how the page calls it")
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    names, texts = zip(*problems(), strict=True)
    shares = [list(range(first, len(texts), AT_ONCE)) for first in range(AT_ONCE)]
    said: dict[int, dict[str, str]] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ask = functools.partial(explain, arguments.te_attn, device=arguments.device)
        for share, some in zip(
            shares, pool.map(ask, [[texts[i] for i in s] for s in shares]), strict=True
        ):
            said.update(zip(share, some, strict=True))
    answers = [(name, said[i]) for i, name in enumerate(names)]
    named = [e for e, why in answers[0][1].items() if "when named" in why]
    head = HEAD.format(where=arguments.where, named=", ".join(f"`{e}`" for e in named) or "none")
    arguments.output.write_text(head + table(answers))


if __name__ == "__main__":
    main()
