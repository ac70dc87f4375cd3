#!/usr/bin/env python3
"""Builds an operator on LibTorch's stable ABI and loads it under every Python that has torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

LOAD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.arange(6.0).reshape(2, 3)
assert torch.ops.te_attention_probe.rows(x) == 2
assert torch.equal(torch.ops.te_attention_probe.same(x), x)
print(sys.version.split()[0], torch.__version__)
"""


def report(fact: str, holds: bool, **figures) -> None:
    print(json.dumps({"fact": fact, "holds": holds, **figures}), flush=True)


def pythons() -> list[Path]:
    """Interpreters on the path, of pyenv, and this one."""
    found = {Path(sys.executable)}
    places = [Path(p) for p in os.environ.get("PATH", "").split(":") if p]
    places += Path.home().glob(".pyenv/versions/*/bin")
    places += [*Path("/opt").glob("*/bin"), *Path("/opt").glob("*/.venv/bin")]
    for place in places:
        found |= {
            p
            for p in place.glob("python3*")
            if p.name.replace("python3", "").strip(".0123456789") == ""
        }
    return sorted({p.absolute() for p in found if os.access(p, os.X_OK)})


def main() -> None:
    library = Path(sys.argv[1]).resolve() / "stable_op.so"
    root = Path(torch.__file__).parent
    command = [
        "g++",
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]
    command += [f"-I{root}/include", str(Path(__file__).with_name("stable_op.cpp"))]
    command += [f"-L{root}/lib", "-ltorch_cpu", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report("stable ABI library builds", done.returncode == 0, error=done.stderr[-600:])
    if done.returncode:
        return
    symbols = subprocess.run(
        ["nm", "-DC", "--undefined-only", library], capture_output=True, text=True, check=False
    )
    needed = [s.split(maxsplit=1)[1] for s in symbols.stdout.splitlines()]
    odd = [s for s in needed if "at::" in s or "c10::" in s or s.startswith("Py")]
    report(
        "it needs no C++ symbol of torch and none of Python",
        not odd,
        needed=len(needed),
        odd=odd[:5],
    )
    for python in pythons():
        run = subprocess.run(
            [python, "-c", LOAD, library], capture_output=True, text=True, check=False
        )
        last = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()[-1:]
        report("stable ABI library loads", run.returncode == 0, python=str(python), said=last)


if __name__ == "__main__":
    main()
