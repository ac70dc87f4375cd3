#!/usr/bin/env python3
"""Checks every text file: machine paths, tabs, bare TODOs, size, and rejected terms."""

import ast
import re
from pathlib import Path

import checks

MAX_COLUMNS = 100
MAX_LINES = 600
MAX_FUNCTION_LINES = 120  # without the docstring; clang-tidy checks C++
CODE = checks.CPP | {".py"}
TABS_ALLOWED = {"Makefile"}
VERBATIM = {"LICENSE"}

MACHINE_PATH = re.compile(r"(?<![\w.}/-])/(?:work|home|root|Users|tmp|mnt|scratch)/\w")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\([^)]+\): \S)")  # TODO(who): why


# Files whose terms are not checked, with the reason.
TERMS_NOT_CHECKED = {
    r"tools/check_text\.py$": "has the lists of the rejected terms",
    r"tests/tools/test_check_text\.py$": "tests the rejection of terms",
    r"examples/gpt/data/": "is a text in the public domain",
    r"bench/results/": "are records of measurements, as the programs of their commit wrote them",
}
_NOT_CHECKED = re.compile("|".join(TERMS_NOT_CHECKED))
# Terms that are always rejected, with the standard term. Whole words, in any case.
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
    r"let_next\w*": "launch_dependent_grids()",
    r"wait_for_kernel_before": "wait_on_dependent_grids()",
    "kernel before": "predecessor grid",
    "seldom": "rarely, or slow path",
    "told": "specified",
    "mend": "fix",
    "landed": "merged",
    "finishers?": "dQ postprocess warp, or epilogue",
    "hand_over": "epilogue",
    "rows kernel": "preprocess kernel",
    "key wg": "consumer warpgroup",
    "blocks? of threads": "CTA",
    "sees? nothing": "attends to no key, or fully masked",
    "nobody|whoever": "a noun",
}
# Words that are rejected only in a pattern, or in the files of one.
REJECTED_IN = (
    (r"copy engine", r"src/(?!cudnn)|tests/(hopper|gpu|problems)/|docs/kernels/", "TMA"),
    (r"assembler", r".", "ptxas"),
    (r"\bmatrix units?\b", r".", "tensor cores"),
    (r"\bmultiprocessors?\b", r"src/|docs/kernels/", "SM"),
    (r"\bplanner\b", r"src/hopper/", "scheduler warp"),
    (r"\bmail\b", r"src/(hopper|gpu)/", "work queue"),
    (r"\btakes? turns\b|\bhas a turn\b", r"src/|docs/", "ping-pong, or alternate"),
    (r"\b(second|third|[a-z]+th) run\b", r"docs/", "date and commit"),
    (r"\blies? (in|beside|there)\b", r".", "is stored in, or resides in"),
    (r"(//|/\*|#|\"{3}) ?(?-i:What|Who|Whose|Such)\b", r"(?!.*\.md$)", "a subject: a noun"),
)
_REJECTED = [(re.compile(rf"\b({term})\b", re.IGNORECASE), use) for term, use in REJECTED.items()]
_REJECTED_IN = [
    (re.compile(term, re.IGNORECASE), re.compile(where), use) for term, where, use in REJECTED_IN
]
WORD_BOUNDARY = re.compile(r"(?<=[a-z\d])(?=[A-Z])|_")  # in an identifier
CODE_IN_MARKDOWN = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def rejected_terms(text: str, name: str) -> list[str]:
    """The rejected terms of a file, in identifiers too, each with its standard term."""
    if _NOT_CHECKED.match(name):
        return []
    if name.endswith(".md"):  # code may quote names of other projects
        text = CODE_IN_MARKDOWN.sub(lambda code: "\n" * code.group().count("\n"), text)
    here = [(term, use) for term, where, use in _REJECTED_IN if where.match(name)]
    words = WORD_BOUNDARY.sub(" ", text)
    found = [
        (content.count("\n", 0, match.start()) + 1, match.group(), use)
        for content, terms in ((text, [*_REJECTED, *here]), (words, _REJECTED))
        for term, use in terms
        for match in term.finditer(content)
    ]
    return [
        f"{name}:{number}: says {said!r}; needs a standard term: {use}"
        for number, said, use in sorted(set(found))
    ]


def line_problem(line: str, path: Path) -> str | None:
    """The problem of one line, or None."""
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


def long_functions(text: str, name: str) -> list[str]:
    """The functions of a Python file that have too many lines."""
    problems = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                problems.append(
                    f"{name}:{node.lineno}: {node.name}() has {lines} lines without its docstring; "
                    f"needs at most {MAX_FUNCTION_LINES}"
                )
    return problems


def check_file(path: Path, name: str) -> list[str]:
    """The problems of one file."""
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
    if path.suffix == ".py" and not problems:
        problems += long_functions(text, name)
    if path.suffix in CODE and len(lines) - 1 > MAX_LINES:
        problems.append(f"{name}:1: has {len(lines) - 1} lines; needs at most {MAX_LINES}")
    return problems


def check(root: Path) -> list[str]:
    """The problems of all files of the project."""
    problems = []
    for path in checks.project_files(root):
        if path.name not in VERBATIM:
            problems += check_file(path, path.relative_to(root).as_posix())
    return problems


if __name__ == "__main__":
    checks.main(check)
