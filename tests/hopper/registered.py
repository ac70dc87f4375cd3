#!/usr/bin/env python3
"""Checks that each kernel the host code may launch is one that nvcc registered.

usage: registered.py KERNEL OBJECT...    KERNEL: the name of a kernel template

A kernel has a host function, which is launched, and a stub of nvcc's, which registers it. They are
matched by name, and where the compilers name a template argument differently the host code holds a
second function that CUDA does not know: its launch ends in cudaErrorInvalidResourceHandle.
"""

import re
import subprocess
import sys


def count(name: str, path: str) -> tuple[int, int]:
    """Host functions of the kernel, and stubs."""
    listing = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
    host, stubs = set(), set()
    for line in listing.splitlines():
        kind, symbol = line.split()[-2:]
        if f"{len(name)}{name}I" not in symbol:
            continue
        stub = re.search(r"(\d+)__device_stub__", symbol)
        if stub:  # variables of the stub carry its name after its length
            stubs.add(symbol[stub.end(1) :][: int(stub[1])])
        elif kind in "tTwW" and not symbol.endswith(".cold"):
            host.add(symbol)
    return len(host), len(stubs)


def main() -> None:
    kernel, *objects = sys.argv[1:]
    counts = [count(kernel, path) for path in objects]
    host, stubs = (sum(c) for c in zip(*counts, strict=True))
    print(f"{kernel}: {host} host functions, {stubs} registered")
    sys.exit(host != stubs or host == 0)


if __name__ == "__main__":
    main()
