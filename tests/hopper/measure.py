#!/usr/bin/env python3
"""Builds and runs, on a machine with an sm_90 device, the tests of the device words and the probes.

usage: measure.py FOLDER [PART...]    logs and facts.jsonl go to FOLDER; a summary is printed.

Parts, all of them unless named: words, forward, peers, profile, memcheck, probes, boxes, torch,
stable.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NVCC = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++20", "-O3", "-lineinfo"]
NVCC += ["--expt-relaxed-constexpr", *(f"-I{ROOT / d}" for d in ("include", "src", "tests"))]
PROBES = (
    "device",
    "launch_cost",
    "map_cost",
    "capture_first",
    "capture_attributes",
    "capture_driver_first",
    "guard_read",
    "guard_box",
)
FIRST_CALL = """
import ctypes, json, sys, time
start = time.perf_counter()
library = ctypes.CDLL(sys.argv[1])
opened = time.perf_counter() - start
library.make_context.restype = library.first_call.restype = ctypes.c_double
figures = [library.make_context(), *(library.first_call(i) for i in (0, 1, 119))]
names = ("context_ms", "first_ms", "second_ms", "last_ms")
print(json.dumps({"fact": "first call of a library of 120 kernels", "holds": True,
    "dlopen_ms": opened * 1e3, **dict(zip(names, figures))}))
"""


class Measurement:
    """Runs commands, keeps their output in a folder and their JSON lines in one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: list[dict] = []
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, command: list, limit: int = 120, **environment: str) -> str:
        """The output of a command, whatever becomes of it."""
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [str(c) for c in command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                env={**os.environ, **environment},
                cwd=ROOT,
                check=False,
            )
            output, code = done.stdout, str(done.returncode)
        except subprocess.TimeoutExpired as e:
            output, code = (e.stdout or b"").decode(errors="replace"), "timeout"
        except OSError as e:
            output, code = str(e), "not started"
        took = time.perf_counter() - start
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"=== {name}: exit {code}, {took:.1f} s\n{output}\n")
        print(f"{name}: exit {code}, {took:.1f} s", flush=True)
        for line in output.splitlines():
            if line.startswith("{"):
                self.note({"from": name, **json.loads(line)})
        return output

    def note(self, fact: dict) -> None:
        """Keeps a fact, and prints it."""
        self.facts.append(fact)
        text = json.dumps(fact)
        print("  " + text[:400], flush=True)
        with (self.folder / "facts.jsonl").open("a") as file:
            file.write(text + "\n")


def build(m: Measurement, target: Path) -> None:
    """Every program into `target`, compiling in parallel."""
    target.mkdir(parents=True, exist_ok=True)
    encoder = ROOT / "src/hopper/tensor_map.cu"
    programs = {
        "words": [*HERE.glob("words*.cu"), encoder],
        "probe": [*HERE.glob("probe/probe*.cu"), encoder],
    }
    kernels = list((ROOT / "src/hopper").glob("*.cu"))
    programs["check_forward"] = [HERE / "check_forward.cu", *kernels]
    programs["forward.so"] = [HERE / "forward_library.cu", *kernels]

    def object_of(source: Path) -> Path:
        return target / (str(source.relative_to(ROOT)).replace("/", "_") + ".o")

    def compile_one(source: Path) -> str:
        log = subprocess.run(
            [*NVCC, "-Xcompiler=-fPIC", "-Xptxas", "-v", "-c", source, "-o", object_of(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        return f"=== {source.name}: {log.returncode}\n{log.stdout}{log.stderr}"

    with concurrent.futures.ThreadPoolExecutor() as pool:
        logs = pool.map(compile_one, {s for sources in programs.values() for s in sources})
        (m.folder / "build.txt").write_text("\n".join(logs))
    for name, sources in programs.items():
        shared = ["-shared"] if name.endswith(".so") else []
        m.run(f"link {name}", [*NVCC, *shared, *map(object_of, sources), "-o", target / name])


def run_words(m: Measurement, programs: Path) -> None:
    print(m.run("words", [programs / "words"])[-3000:])


def run_forward(m: Measurement, programs: Path) -> None:
    """Whether every kernel is one that CUDA knows, then every case of the forward pass."""
    for name, objects in (
        ("check", "src_hopper_*.cu.o"),
        ("so", "tests_hopper_forward_library.cu.o"),
    ):
        found = programs.glob(objects)
        m.run(f"registered {name}", [sys.executable, HERE / "registered.py", "entry", *found])
    print(m.run("forward", [programs / "check_forward"], 120)[-6000:])


def run_memcheck(m: Measurement, programs: Path) -> None:
    """The words and the forward pass (fewer cases of it) under the memory checker."""
    memcheck = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all"]
    print(m.run("words under memcheck", [*memcheck, programs / "words"], 60)[-800:])
    print(
        m.run("forward under memcheck", [*memcheck, programs / "check_forward", "29"], 100)[-2000:]
    )


def peers_command(programs: Path) -> list:
    return [sys.executable, HERE / "probe/forward_peers.py", programs / "forward.so"]


def run_peers(m: Measurement, programs: Path) -> None:
    """Times beside the peers'."""
    m.run("peers", peers_command(programs), 240)


def run_profile(m: Measurement, programs: Path) -> None:
    profile = ["ncu", "--clock-control", "none", "--set", "full", "-f", "-k", "regex:entry"]
    profile += ["--launch-skip", "2", "--launch-count", "1", "-o", m.folder / "forward"]
    m.run("profile", [*profile, *peers_command(programs), "64", "512", "causal"], 60)
    report = m.folder / "forward.ncu-rep"
    text = m.run("profile text", ["ncu", "--import", report, "--page", "details"], 60)
    (m.folder / "ncu.txt").write_text(text)


def run_boxes(m: Measurement, programs: Path) -> None:
    m.run("box_limits LAZY", [programs / "probe", "box_limits"], CUDA_MODULE_LOADING="LAZY")


def run_probes(m: Measurement, programs: Path) -> None:
    """Each probe in a process of its own; captures once per way of loading modules."""
    for probe in PROBES:
        loadings = ("LAZY", "EAGER") if probe.startswith("capture") else ("LAZY",)
        for loading in loadings:
            name = f"{probe} {loading}"
            m.run(name, [programs / "probe", probe], CUDA_MODULE_LOADING=loading)
    library = [*NVCC, "-Xfatbin=--compress-mode=size", "-Xcompiler=-fPIC", "-shared"]
    m.run("build many", [*library, HERE / "probe/many.cu", "-o", programs / "many.so"])
    for loading in ("LAZY", "EAGER"):
        command = [sys.executable, "-c", FIRST_CALL, programs / "many.so"]
        m.run(f"first call {loading}", command, CUDA_MODULE_LOADING=loading)


def run_torch(m: Measurement, _: Path) -> None:
    m.run("torch", [sys.executable, HERE / "probe/torch_facts.py"], 180)


def run_stable(m: Measurement, programs: Path) -> None:
    m.run("stable", [sys.executable, HERE / "probe/stable_abi.py", programs], 240)


PARTS = {
    "words": run_words,
    "forward": run_forward,
    "peers": run_peers,
    "profile": run_profile,
    "memcheck": run_memcheck,
    "probes": run_probes,
    "boxes": run_boxes,
    "torch": run_torch,
    "stable": run_stable,
}


def main() -> None:
    folder, *parts = sys.argv[1:]
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"unknown parts {sorted(unknown)}: need some of {list(PARTS)}")
    m = Measurement(Path(folder))
    programs = ROOT / "build" / "measure"
    m.run("machine", ["nvidia-smi"])
    build(m, programs)
    for part in parts or PARTS:
        PARTS[part](m, programs)


if __name__ == "__main__":
    main()
