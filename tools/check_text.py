#!/usr/bin/env python3
"""Checks every text file: machine paths, tabs, bare TODOs, size, and rejected terms."""

import re
from pathlib import Path

import checks

MAX_COLUMNS = 100
MAX_LINES = 600
CODE = checks.CPP | {".py"}
TABS_ALLOWED = {"Makefile"}
VERBATIM = {"LICENSE"}

MACHINE_PATH = re.compile(r"(?<![\w.}/-])/(?:work|home|root|Users|tmp|mnt|scratch)/\w")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\([^)]+\): \S)")  # TODO(who): why


# Files that are written in the standard terms of the field. The other folders follow: they still
# contain some of the terms below.
CONVERTED = re.compile(
    r"README\.md$|docs/|bench/README\.md$|python/|packaging/|include/|"
    r"src/(composite|core|frontend|gpu|hopper|math|nvte|ops|portable|torch)/"
)
# Terms that are always rejected there, with the standard term. Whole words, in any case.
REJECTED = {
    "porter": "store warp, or epilogue",
    "caretaker": "zero-fill warp",
    "share_out": "per-warpgroup key range",
    "beside": "with, next to, compared with, or alongside",
    "neighbours?|neighbouring": "adjacent, or supporting operations",
    "nonsense": "invalid",
    "sane": "valid",
    "unseen": "masked",
    "bends?|bending": "score modification",
    "soften": "softmax",
    "weigh": "convert P",
    "foreseen": "known on the host",
    "let_next_begin": "launch_dependent_grids()",
    "kernel before": "predecessor grid",
    "seldom": "rarely, or slow path",
    "told": "specified",
    "mend": "fix",
    "landed": "merged",
    "nobody|whoever": "a noun",
}
# Words that are rejected only in a pattern, or in the files of one.
REJECTED_IN = (
    (r"copy engine", r"src/(hopper|gpu)/", "TMA"),
    (r"assembler", r".", "ptxas"),
    (r"\bmatrix units?\b", r".", "tensor cores"),
    (r"\bmultiprocessors?\b", r"src/|docs/kernels/", "SM"),
    (r"\bplanner\b", r"src/hopper/", "scheduler warp"),
    (r"\bmail\b", r"src/(hopper|gpu)/", "work queue"),
    (r"\btakes? turns\b|\bhas a turn\b", r"src/|docs/", "ping-pong, or alternate"),
    (r"\b(second|third|[a-z]+th) run\b", r"docs/", "date and commit"),
    (r"\blies? (in|beside|there)\b", r".", "is stored in, or resides in"),
)
_REJECTED = [(re.compile(rf"\b({term})\b", re.IGNORECASE), use) for term, use in REJECTED.items()]
_REJECTED_IN = [
    (re.compile(term, re.IGNORECASE), re.compile(where), use) for term, where, use in REJECTED_IN
]
CODE_IN_MARKDOWN = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def rejected_terms(text: str, name: str) -> list[str]:
    """The rejected terms of a file, each with its standard term."""
    if not CONVERTED.match(name):
        return []
    if name.endswith(".md"):  # names and diffs of code that is not converted yet
        text = CODE_IN_MARKDOWN.sub(lambda code: "\n" * code.group().count("\n"), text)
    terms = [*_REJECTED, *((term, use) for term, where, use in _REJECTED_IN if where.match(name))]
    return [
        f"{name}:{number}: says {found.group()!r}; needs a standard term: {use}"
        for number, line in enumerate(text.split("\n"), 1)
        for term, use in terms
        if (found := term.search(line))
    ]


def line_problem(line: str, path: Path) -> str | None:
    """What is wrong with one line, or None."""
    if MACHINE_PATH.search(line):
        return "names a path of one machine"
    if "\t" in line and path.name not in TABS_ALLOWED:
        return "has a tab; needs spaces"
    if line != line.rstrip():
        return "ends in white space"
    if (found := UNFINISHED.search(line)) and path.name != Path(__file__).name:
        return f"has a {found.group()} without a name and a reason"
    if path.suffix in CODE and len(line) > MAX_COLUMNS:
        return f"has {len(line)} columns; needs at most {MAX_COLUMNS}"
    return None


def check_file(path: Path, name: str) -> list[str]:
    """What is wrong with one file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []  # not text
    lines = text.split("\n")
    problems = [
        f"{name}:{number}: {problem}"
        for number, line in enumerate(lines, 1)
        if (problem := line_problem(line, path))
    ]
    if text and not text.endswith("\n"):
        problems.append(f"{name}:{len(lines)}: does not end in a newline")
    problems += rejected_terms(text, name)
    if path.suffix in CODE and len(lines) - 1 > MAX_LINES:
        problems.append(f"{name}:1: has {len(lines) - 1} lines; needs at most {MAX_LINES}")
    return problems


def check(root: Path) -> list[str]:
    """What is wrong with any file of the project."""
    problems = []
    for path in checks.project_files(root):
        if path.name not in VERBATIM:
            problems += check_file(path, path.relative_to(root).as_posix())
    return problems


if __name__ == "__main__":
    checks.main(check)
