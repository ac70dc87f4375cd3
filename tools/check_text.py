#!/usr/bin/env python3
"""Checks what every text file must keep to: no machine paths, tabs, bare TODOs or oversize."""

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
