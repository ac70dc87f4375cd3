#!/usr/bin/env python3
"""Checks that tests mirror the sources: src/x/y.cpp has tests/x/test_y.cpp, which uses it.

What only Python can call has its test in Python: src/torch/y.cpp has tests/torch/test_y.py (and so
src/jax), and python/x/y.py has tests/python/x/test_y*.py.
"""

import re
from pathlib import Path

import checks

NAME = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
VARIABLE = re.compile(r"^extern\b[^;(]*?\b(\w+);", re.MULTILINE)
IN_PYTHON = ("torch", "jax")  # folders of src/ whose functions only Python calls
NO_FUNCTION = {"if", "for", "while", "switch", "return", "sizeof", "defined", "decltype", "alignas"}


def names(path: Path) -> set[str]:
    """The functions and extern variables that a file mentions."""
    text = checks.without_comments(path.read_text())
    return {*NAME.findall(text), *VARIABLE.findall(text)} - NO_FUNCTION


def public_names(source: Path, root: Path) -> set[str]:
    """The interface of `source`: the names of its own header, else those of any header."""
    own = source.with_suffix(".h")
    if own.exists():
        return names(own)
    headers = [
        p for d in ("include", "src") for p in checks.cpp_sources(root, d) if p.suffix == ".h"
    ]
    return names(source) & {name for header in headers for name in names(header)}


def check_python(source: Path, root: Path, folder: Path) -> list[str]:
    """A source without a test in Python."""
    if list(folder.glob(f"test_{source.stem}*.py")):
        return []
    needed = (folder / f"test_{source.stem}.py").relative_to(root)
    return [f"{source.relative_to(root)}:1: has no test; needs {needed}"]


def check(root: Path) -> list[str]:
    """Every source without a test of its own."""
    problems = []
    for source in sorted(root.glob("src/*/*.cpp")):
        if source.parent.name in IN_PYTHON:
            problems += check_python(source, root, root / "tests" / source.parent.name)
            continue
        test = root / "tests" / source.parent.name / f"test_{source.name}"
        where = f"{source.relative_to(root)}:1:"
        if not test.exists():
            problems.append(f"{where} has no test; needs {test.relative_to(root)}")
            continue
        words = set(re.findall(r"\w+", checks.without_comments(test.read_text())))
        offered = public_names(source, root)
        if not words & offered:
            some = ", ".join(sorted(offered)[:5])
            problems.append(f"{where} {test.relative_to(root)} uses none of its functions ({some})")
    for source in sorted((root / "python").rglob("*.py")):
        if source.name.startswith("_"):
            continue  # used by the modules that users import, and tested through them
        folder = root / "tests" / source.parent.relative_to(root)
        problems += check_python(source, root, folder)
    return problems


if __name__ == "__main__":
    checks.main(check)
