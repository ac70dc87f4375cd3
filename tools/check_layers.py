#!/usr/bin/env python3
"""Checks the direction of #include and import: no layer knows of one that is built on it."""

import ast
import re
from pathlib import Path

import checks

ENGINES = ("hopper", "cudnn", "portable", "cpu")
OWN_API = ("te_attention.h", "te_attention_ops.h", "te_attention_cp.h")
NVTE_API = "transformer_engine"

# The folders and public headers that each folder of src/ may include, besides itself.
ALLOWED = {
    "math": ("te_attention.h",),
    "core": ("math", "te_attention.h", "te_attention_cp.h"),
    "gpu": ("core", "math"),
    **dict.fromkeys(ENGINES, ("core", "gpu", "math", "te_attention.h")),
    "composite": (*ENGINES, "core"),
    "ops": ("core", "gpu", "math", *OWN_API),
    "nvte": ("core", "ops", *OWN_API, NVTE_API),
    "frontend": OWN_API,  # the public API alone
    "torch": ("frontend", *OWN_API),
    "jax": ("frontend", *OWN_API, NVTE_API, "xla"),
}
EXCEPTIONS = {"core/registry.cpp": (*ENGINES, "composite")}  # the table of engines
PUBLIC = (*OWN_API, NVTE_API)
USERS = {"include": PUBLIC, "examples": (*PUBLIC, "kit")}  # the demo asks the oracle
HOST_ONLY = ("math", "core")
DEVICE_OR_FRAMEWORK = re.compile(r"(cuda|cudnn|nccl|nvrtc|cublas|torch|ATen|c10|xla|Python\.h)")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)

# The import names that each package of python/ must not use. A package built on another one
# imports public names of it only: these have no part that begins with an underscore.
COMPATIBILITY = re.compile(r"(te_attention_)?transformer_engine(_\w+)?")
PACKAGES = {"te_attention": COMPATIBILITY, "te_attention_transformer_engine": None}
BUILT_ON = {"te_attention_transformer_engine": "te_attention"}


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
    # A header in the file's own folder is allowed, because this check reads it too.
    return [
        f"{path.relative_to(root)}:{line}: includes {target}; it may include the public headers"
        for line, target, quoted in includes(path)
        if quoted and target.split("/")[0] not in may and not (path.parent / target).exists()
    ]


def dotted(node: ast.AST, bound: dict[str, str]) -> str:
    """The dotted name of an expression that begins with an imported name, or ""."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    base = dotted(node.value, bound) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base else ""


def imported(node: ast.AST) -> dict[str, str]:
    """The absolute imports of one statement: the names that it binds, and their dotted names."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name: a.name for a in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {}


def by_function(node: ast.AST) -> str:
    """The module that a call of import_module() or __import__() names, or ""."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return ""
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return str(node.args[0].value) if function in ("import_module", "__import__") else ""


def python_names(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, and of attributes of what it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = [(node.lineno, name) for node in nodes for name in imported(node).values()]
    found += [(node.lineno, name) for node in nodes if (name := by_function(node))]
    bound = {key: name for node in nodes for key, name in imported(node).items()}
    bound |= {key.split(".")[0]: key.split(".")[0] for key in bound if "." in key}
    found += [(node.lineno, name) for node in nodes if (name := dotted(node, bound))]
    return sorted(set(found))


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with an underscore; __version__ and such do not."""
    return any(p.startswith("_") and not p.endswith("__") for p in name.split("."))


def check_python(path: Path, root: Path) -> list[str]:
    """The wrong imports of one file of python/."""
    package = path.relative_to(root / "python").parts[0]
    where = path.relative_to(root)
    if package not in PACKAGES:
        return [f"{where}:1: {package} is no package; needs one of {', '.join(PACKAGES)}"]
    problems = {}  # one for each line
    for line, name in python_names(path):
        top = name.split(".")[0]
        if PACKAGES[package] and PACKAGES[package].fullmatch(top):
            problems[line] = f"{where}:{line}: {package} imports {top}, which is built on it"
        elif top == BUILT_ON.get(package) and is_private(name):
            problems.setdefault(line, f"{where}:{line}: {package} uses {name}; needs a public name")
    return list(problems.values())


def check(root: Path) -> list[str]:
    """Every wrong include and import of the project."""
    problems = []
    for path in checks.cpp_sources(root, "src"):
        problems += check_source(path, root)
    for folder, may in USERS.items():
        for path in checks.cpp_sources(root, folder):
            problems += check_public(path, root, may)
    for path in sorted((root / "python").rglob("*.py")):
        problems += check_python(path, root)
    return problems


if __name__ == "__main__":
    checks.main(check)
