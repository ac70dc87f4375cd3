#!/usr/bin/env python3
"""Checks the direction of #include, so that no layer learns of one that is built on it."""

import re
from pathlib import Path

import checks

ENGINES = ("hopper", "cudnn", "portable", "cpu")
OWN_API = ("te_attention.h", "te_attention_ops.h")
NVTE_API = "transformer_engine"

# The folders and public headers that each folder of src/ may include, besides itself.
ALLOWED = {
    "math": ("te_attention.h",),
    "core": ("math", "te_attention.h"),
    "gpu": ("core",),
    **dict.fromkeys(ENGINES, ("core", "gpu", "math", "te_attention.h")),
    "ops": ("core", "gpu", "math", *OWN_API),
    "nvte": ("core", "ops", *OWN_API, NVTE_API),
    "torch": OWN_API,  # a front end: the public API alone
}
EXCEPTIONS = {"core/registry.cpp": ENGINES}  # the one table of engines
PUBLIC = (*OWN_API, NVTE_API)
USERS = {"include": PUBLIC, "examples": (*PUBLIC, "kit")}  # the demo asks the oracle
HOST_ONLY = ("math", "core")
DEVICE_OR_FRAMEWORK = re.compile(r"(cuda|cudnn|nccl|nvrtc|cublas|torch|ATen|c10|xla|Python\.h)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)


def includes(path: Path) -> list[tuple[int, str, bool]]:
    """(line, file, quoted) of every #include."""
    text = checks.without_comments(path.read_text())
    return [
        (text.count("\n", 0, m.start()) + 1, m.group(2), m.group(1) == '"')
        for m in INCLUDE.finditer(text)
    ]


def ours(target: str, quoted: bool) -> bool:
    """Is this a header of the project rather than of the system?"""
    return quoted or target.split("/")[0] in PUBLIC


def check_source(path: Path, root: Path) -> list[str]:
    """The wrong includes of one file of src/."""
    inside = path.relative_to(root / "src").as_posix()
    layer = inside.split("/")[0]
    if layer not in ALLOWED:
        return [f"src/{inside}:1: {layer} is no layer; needs one of {', '.join(ALLOWED)}"]
    may = (layer, *ALLOWED[layer], *EXCEPTIONS.get(inside, ()))
    problems = []
    for line, target, quoted in includes(path):
        where = f"src/{inside}:{line}: {layer} includes {target}"
        if ours(target, quoted):
            if target.split("/")[0] not in may:
                problems.append(f"{where}; it may include {', '.join(may)}")
        elif layer in HOST_ONLY and DEVICE_OR_FRAMEWORK.match(target):
            problems.append(f"{where}; it knows no device code and no framework")
    return problems


def check_public(path: Path, root: Path, may: tuple[str, ...]) -> list[str]:
    """The wrong includes of a public header or an example, which must do with the public API."""
    # A header beside the file itself is fine: it is read by this same check.
    return [
        f"{path.relative_to(root)}:{line}: includes {target}; it may include the public headers"
        for line, target, quoted in includes(path)
        if quoted and target.split("/")[0] not in may and not (path.parent / target).exists()
    ]


def check(root: Path) -> list[str]:
    """Every wrong include of the project."""
    problems = []
    for path in checks.cpp_sources(root, "src"):
        problems += check_source(path, root)
    for folder, may in USERS.items():
        for path in checks.cpp_sources(root, folder):
            problems += check_public(path, root, may)
    return problems


if __name__ == "__main__":
    checks.main(check)
