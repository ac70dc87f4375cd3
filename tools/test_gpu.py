#!/usr/bin/env python3
"""Every test that needs a GPU, with one summary: `make test-gpu`.

usage: test_gpu.py BUILD [--draws N] [--log FOLDER] [--jobs N] [--patience X] [ROW...]

BUILD is a build folder with device code. Rows are named in the summary; none means all of them,
those of several GPUs only where there are as many.
N rows (4 for each GPU) run side by side, spread over the GPUs, and the summary has them as they
end. Each row's output and summary.jsonl are in FOLDER (BUILD/test-gpu unless given). --patience: a
slow machine may take X times the limits of time.
Exit code 0 only if every row passed; a machine without a GPU is a failure, not a pass.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "tests/gpu/sanitizer_allowed.txt"
ANY_PROBLEM = "dtype=bf16 heads_q=1 heads_kv=1 dim_qk=64 batch=1 seqlen_q=64 seqlen_kv=64"
MATRIX = "--gtest_filter=Sanitized.*"
# Where a tool of the sanitizer does not watch the whole matrix: its runs, each with more arguments.
# initcheck does not see what bulk copies write: the sums of Hopper's backward kernel, which reads
# them itself, are some million findings in the matrix, and few enough to be printed in a part.
RUNS_OF = {
    "racecheck": [("--gtest_filter=Races.*",)],
    "initcheck": [
        (MATRIX, "--kernel-name-exclude", "kns=hopper8backward15backward_kernel"),
        ("--gtest_filter=Initialized.*",),
    ],
}
ENGINE_KERNEL = re.compile(r"8portable|6hopper|5cudnn")
# Runs of a perturbed program, of eight launches per case, each of which sleeps elsewhere.
PERTURBED = {"forward": 8, "backward": 3}
SHOWN = 500  # characters of a finding in the summary
PRINTED = 100_000  # findings of a tool at most: what is allowed alone can be more than its 100
PYTESTS = 8  # rows that share the Python tests, each a process: most of it is PyTorch on one core
JAX_PROCESSES = 4  # that share the cases of a row
ROWS_OF_A_GPU = CORES_OF_A_ROW = 4  # with which every row ends well within its limit
# The name of a failed case: te-attn fuzz, the kit, GoogleTest, pytest, the programs of Hopper.
FAILED_CASE = re.compile(
    r"^ *(seed \d+ .*|reproduce: .*|\[  FAILED  \] \w+\.\w+.*|FAILED.*)$", re.MULTILINE
)
JAX_TESTS = (
    ROOT / "tests/python/te_attention/jax",
    ROOT / "tests/python/te_attention_transformer_engine/transformer_engine/jax",
    ROOT / "tests/python/te_attention_transformer_engine/transformer_engine_jax",
)
JAX_ON_HOST = ROOT / "tests/python/te_attention/jax_devices"  # devices that XLA makes of the host


class RowError(Exception):
    """Why a row did not pass."""


class Suite:
    """The programs of one build, and the log of a row."""

    def __init__(self, build: Path, log: Path, draws: int, row: str, patience: float = 1) -> None:
        """`draws`: random cases of the row fuzz; other rows take a share of them.

        `patience`: how many times its limit a command may take, since other rows run.
        """
        self.build, self.log, self.draws, self.row = build, log, draws, row
        self.patience, self.gpus = patience, ""  # all of the machine's unless main() says which
        log.mkdir(parents=True, exist_ok=True)

    def program(self, path: str) -> Path:
        """A program of the build."""
        program = self.build / path
        if not program.exists():
            raise RowError(f"{program} was not built (needs nvcc: TE_ATTENTION_CUDA=ON)")
        return program

    def run(self, command: list, limit: float) -> str:
        """The output of a command that must end with code 0."""
        log, limit = self.log / f"{self.row}.txt", limit * self.patience
        gpus = {"CUDA_VISIBLE_DEVICES": self.gpus} if self.gpus else {}
        with log.open("a") as out:
            out.write(f"$ {' '.join(map(str, command))}\n")
            out.flush()
            begin = out.tell()
            try:
                done = subprocess.run(
                    [str(c) for c in command],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    check=False,
                    cwd=self.log,
                    env=os.environ | gpus,
                )
            except subprocess.TimeoutExpired:
                raise RowError(f"not ready after {limit:.0f} s: {log}") from None
        text = log.read_bytes()[begin:].decode(errors="replace")
        if done.returncode:
            cases = [case[:400] for case in FAILED_CASE.findall(text)[:2]]
            raise RowError("; ".join([f"exit code {done.returncode}", *cases, str(log)]))
        return text

    def tests(self, filter_: str, limit: int = 200) -> str:
        """GoogleTests by name; a skipped one is no pass, and none at all is a failure."""
        command = [self.program("tests/gpu/gpu_tests"), f"--gtest_filter={filter_}"]
        return f"{passed_tests(self.run(command, limit))} tests"

    def fuzz(self) -> str:
        """Random cases by the engine that the library chooses."""
        return self.draw(self.draws, 300, "--device", 0)

    def draw(self, count: int, limit: int, *where: object) -> str:
        """So many random cases; where all were refused, nothing was tested."""
        said = last(self.run([self.program("te-attn"), "fuzz", max(count, 1), *where], limit))
        counts = re.fullmatch(r"\d+ of (\d+) cases failed, (\d+) refused", said)
        if not counts or int(counts[1]) <= int(counts[2]):
            raise RowError(f"no case ran: {said!r}")
        return said

    def fuzz_some(self, option: str) -> str:
        """Random cases of a kind, by the library's choice and by every engine."""
        chosen = self.draw(self.draws // 4, 200, option, "--device", 0)
        return f"chosen: {chosen}; {self.fuzz_others(option)}"

    def fuzz_others(self, *more: str) -> str:
        """The same seeds on every engine of the GPU by its name, and on the CPU's."""
        explain = [self.program("te-attn"), "explain", ANY_PROBLEM, "--device", 0]
        engines = re.findall(r"^([\w-]+): accepts", self.run(explain, 60), re.MULTILINE)
        if not engines:
            raise RowError(f"no engine of the GPU accepts {ANY_PROBLEM}")
        wheres = {engine: ("--engine", engine, "--device", 0) for engine in engines}
        wheres["cpu"] = ("--engine", "cpu")
        count = self.draws // 4
        every = wheres.items()
        return "; ".join(f"{name}: {self.draw(count, 200, *more, *at)}" for name, at in every)

    def coverage(self) -> str:
        """Whether that matrix runs every kernel of the engines, as ncu sees them."""
        tests = self.program("tests/gpu/gpu_tests")
        built = self.run([tool_path("cuobjdump"), "-res-usage", tests], 60)
        every = {
            name for name in re.findall(r"Function (\w+):", built) if ENGINE_KERNEL.search(name)
        }
        command = [tool_path("ncu"), "--metrics", "launch__block_size", "--csv", "--page", "raw"]
        command += ["--print-kernel-base", "mangled", "--clock-control", "none"]
        # Not those of the tests themselves, which launch more: ncu adds time to each.
        command += ["--kernel-name-base", "mangled"]
        command += ["--kernel-name", f"regex:{ENGINE_KERNEL.pattern}"]
        command += ["--log-file", self.log / "kernels.csv"]
        passed_tests(self.run([*command, tests, MATRIX], 400))
        seen = set(re.findall(r"\w+", (self.log / "kernels.csv").read_text(errors="replace")))
        missed = sorted(every - seen)
        if missed or not every:
            raise RowError(f"{len(missed)} of {len(every)} kernels never ran, first: {missed[:3]}")
        return f"all {len(every)} kernels ran"

    def hopper(self, direction: str) -> str:
        """The Hopper kernels of one direction without the library."""
        return last(self.run([self.program(f"tests/hopper/hopper_check_{direction}")], 400))

    def perturbed(self, direction: str) -> str:
        """Whether Hopper kernels compute the same bits where their roles sleep at random."""
        plain_program = f"hopper_check_{direction}"
        count, runs = PERTURBED[direction], []
        for program in (plain_program, *[f"{plain_program}_perturbed"] * count):
            text = self.run([self.program(f"tests/hopper/{program}"), 1, "digests"], 200)
            runs.append(sorted(re.findall(r"^digest (.*) (\w{16})$", text, re.MULTILINE)))
        plain = runs[0]
        if not plain or len(dict(plain)) != len(plain):
            raise RowError(f"{len(plain)} digests of {len(dict(plain))} cases")
        for number, digests in enumerate(runs[1:], 1):
            if digests != plain:
                other = sorted(set(digests) ^ set(plain))[0][0]
                raise RowError(f"perturbed run {number} differs, first in: {other}")
        return f"{len(plain)} cases, the same bits in {count} perturbed runs"

    def sanitize(self, tool: str) -> str:
        """The fixed matrix of tests/gpu/sanitized.cpp, or a part, under a tool of the sanitizer."""
        runs = RUNS_OF.get(tool, [(MATRIX,)])
        count = sum(self.watch(tool, number, *run) for number, run in enumerate(runs, 1))
        return f"{count} tests, 0 findings outside the allow-list"

    def watch(self, tool: str, number: int, tests: str, *more: str) -> int:
        """How many GoogleTests passed under a tool that found nothing but what is allowed."""
        program = self.program("tests/gpu/gpu_tests")
        report = self.log / f"{tool}.{number}.report"
        report.unlink(missing_ok=True)
        command = [tool_path("compute-sanitizer"), "--tool", tool, "--print-limit", PRINTED, *more]
        # Without the host's calls, which take longest to find where thousands are allowed.
        command += ["--show-backtrace", "device", "--log-file", report]
        failure, count = None, 0
        try:
            count = passed_tests(self.run([*command, program, tests], 400))
        except RowError as e:  # what was found says more, if anything was
            failure = e
        said = report.read_text(errors="replace") if report.exists() else ""
        findings = unexpected(said, allow_list())
        if findings:
            kept = "; ".join(finding[:SHOWN] for finding in findings[:3])
            raise RowError(f"{len(findings)} findings, first: {kept} ({report})")
        if failure:
            raise failure
        return count

    def pytest(self, share: str, folder: str = "tests/python") -> str:
        """A share of a folder's Python tests that are marked gpu, without those that take times."""
        self.program("src/torch/libte_attention_torch.so")
        kit = self.program("tests/python/libte_attention_kit_shim.so")
        packages = self.build / "python"
        path = (packages, packages / "te_attention_transformer_engine", ROOT / "tests/python")
        path = f"PYTHONPATH={':'.join(map(str, path))}"
        threads = f"OMP_NUM_THREADS={max(1, (os.cpu_count() or 1) // PYTESTS)}"
        command = ["env", path, threads, f"TE_ATTENTION_KIT={kit}", torch_python(), "-m", "pytest"]
        command += ["-q", "-m", "gpu and not timing", "-p", "share", "--share", share]
        command += ["-p", "no:cacheprovider", "-c", ROOT / "tests/pytest.ini"]
        command += [f"--ignore={folder}" for folder in (*JAX_TESTS, JAX_ON_HOST)]
        text = self.run([*command, ROOT / folder], 300)
        return f"{pytest_passed(text)} tests"

    def jax_python(self) -> list:
        """A Python that has jax with CUDA, with the build's packages."""
        self.program("src/jax/libte_attention_jax.so")
        kit = self.program("tests/python/libte_attention_kit_shim.so")
        packages = self.build / "python"
        path = (packages, packages / "te_attention_transformer_engine", ROOT / "tests/python")
        memory = "XLA_PYTHON_CLIENT_PREALLOCATE=false"
        path = f"PYTHONPATH={':'.join(map(str, path))}"
        return ["env", path, memory, f"TE_ATTENTION_KIT={kit}", jax_python()]

    def jax(self) -> str:
        """The Python tests of JAX that are marked gpu."""
        command = [*self.jax_python(), "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        text = self.run([*command, "-c", ROOT / "tests/pytest.ini", *JAX_TESTS], 500)
        return f"{pytest_passed(text)} tests"

    def jax_draws(self, *arguments: str) -> str:
        """Cases through te_attention.jax against the oracle; most of their time is compilation."""
        command = [*self.jax_python(), ROOT / "tests/python/jax_draws.py", *arguments]
        return last(self.run([*command, "--jobs", str(JAX_PROCESSES), "--limit", "500"], 560))

    def jax_devices(self, parts: str) -> str:
        """Parts of context parallelism of JAX, over two GPUs of one process."""
        command = [*self.jax_python(), ROOT / "bench/jax_context_parallel.py", "--parts", parts]
        text = self.run(command, 560)
        count = text.count('"ok": true')
        return f"{count} figures"


def pytest_passed(text: str) -> int:
    """As passed_tests(), for pytest."""
    passed = re.search(r"\b(\d+) passed", last(text))
    skipped = re.search(r"\b(\d+) (?:skipped|xfailed)", last(text))
    if skipped or not passed:
        raise RowError(f"{skipped[1] if skipped else 'all'} tests did not run")
    return int(passed[1])


def pythons() -> list[str]:
    """The Pythons that may have what a row needs: the tests' environment, then the running one."""
    find = [ROOT / "tools/python_env", "--path"]
    environment = subprocess.run(find, capture_output=True, text=True, check=False).stdout.strip()
    return [python for python in (environment, sys.executable) if Path(python).is_file()]


@functools.cache
def torch_python() -> str:
    """A Python that has pytest and torch 2.10 or later."""
    wants = (
        "import pytest, torch; assert tuple(map(int, torch.__version__.split('.')[:2])) > (2, 9)"
    )
    for python in pythons():
        done = subprocess.run([python, "-c", wants], capture_output=True, check=False)
        if not done.returncode:
            return python
    raise RowError("no Python here has pytest and torch 2.10 or later")


@functools.cache
def jax_python() -> str:
    """A Python that has pytest and jax on a GPU."""
    wants = "import pytest, jax; assert jax.default_backend() == 'gpu'"
    for python in (sys.executable, "python3"):
        done = subprocess.run([python, "-c", wants], capture_output=True, check=False)
        if not done.returncode:
            return python
    raise RowError("no Python here has pytest and jax with a GPU")


# PyTorch is asked which cuDNN it loaded: that need not be the one of a package nvidia.cudnn.
LOADED_CUDNN = """
import torch
torch.backends.cudnn.version()  # loads the library if nothing has loaded it yet
for line in open("/proc/self/maps"):
    if "/libcudnn.so.9" in line:
        print(line.split(maxsplit=5)[5].strip())
        break
"""


def cudnn_of(python: str) -> str:
    """The folder of the cuDNN that PyTorch loads there, or nothing."""
    command = [python, "-c", LOADED_CUDNN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = done.stdout.strip()
    return str(Path(found).parent) if not done.returncode and found else ""


def prefer_cudnn_of_torch() -> str:
    """Lets every row load PyTorch's cuDNN, not an older one of the loader's; says which it is."""
    # Any PyTorch will do: torch_python() also wants pytest, which no GoogleTest needs.
    folder = next(filter(None, map(cudnn_of, pythons())), "")
    if not folder:
        return "the loader's, if it has one"
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{before}" if before else folder
    return folder


def passed_tests(text: str) -> int:
    """How many GoogleTests passed; a skipped one is no pass, and none at all is a failure."""
    passed = re.search(r"\[  PASSED  \] (\d+) test", text)
    skipped = re.search(r"\[  SKIPPED \] (\d+) test", text)
    if skipped or not passed or passed[1] == "0":
        raise RowError(f"{skipped[1] if skipped else 'all'} tests did not run")
    return int(passed[1])


def tool_path(name: str) -> str:
    """A tool of CUDA."""
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if not found:
        raise RowError(f"{name} is not installed")
    return found


def unexpected(report: str, allowed: list[str]) -> list[str]:
    """The findings of a sanitizer, without those that match a pattern of the allow list."""
    lines = [line.removeprefix("=========").strip() for line in report.splitlines()]
    summaries = [line for line in lines if re.match(r"(ERROR|RACECHECK) SUMMARY", line)]
    if not summaries:
        return ["no summary: the tool did not end"]
    body = [line for line in lines if line not in summaries and line != "COMPUTE-SANITIZER"]
    findings = [text.strip() for text in re.split(r"\n{2,}", "\n".join(body)) if text.strip()]
    bad = [text for text in findings if not any(re.search(p, text) for p in allowed)]
    counted = sum(int(n) for n in re.findall(r"SUMMARY: (\d+) ", "\n".join(summaries)))
    if counted > len(findings):  # a finding that was not printed is not on the allow list
        bad.append(summaries[-1])
    return [" ".join(line.strip() for line in text.splitlines()) for text in bad]


def allow_list() -> list[str]:
    """The patterns, one a line; # starts a comment."""
    return [line for line in ALLOWED.read_text().splitlines() if line and line[0] != "#"]


def gpu_names() -> list[str]:
    """The GPUs of the machine."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    return done.stdout.strip().splitlines()


def last(text: str) -> str:
    """The last line of an output."""
    lines = text.strip().splitlines()
    return lines[-1][:80] if lines else ""


# Begun in this order: the longest first, or the end would wait for them.
ROWS = {
    "jax-devices": lambda s: s.jax_devices("bits,messages,results"),
    "jax-devices-grid": lambda s: s.jax_devices("grid"),
    "fuzz-training": lambda s: s.fuzz_some("--training"),
    "coverage": Suite.coverage,
    "fuzz-decoding": lambda s: s.fuzz_some("--decoding"),
    "fuzz-prefill": lambda s: s.fuzz_some("--prefill"),
    "jax": Suite.jax,
    "invariance": lambda s: s.tests("Invariance.*", 400),
    "jax-draws": lambda s: s.jax_draws("1000"),
    "jax-problems": lambda s: s.jax_draws("100000", "--problems"),
    "problems": lambda s: s.tests("Problems.*", 300),
    "racecheck": functools.partial(Suite.sanitize, tool="racecheck"),
    **{
        f"pytest-{n}": functools.partial(Suite.pytest, share=f"{n}/{PYTESTS}")
        for n in range(1, PYTESTS + 1)
    },
    **{
        f"hopper-{direction}": functools.partial(Suite.hopper, direction=direction)
        for direction in PERTURBED
    },
    "fuzz-others": Suite.fuzz_others,
    "initcheck": functools.partial(Suite.sanitize, tool="initcheck"),
    "large": lambda s: s.tests("*Large.*"),
    "hopper-perturbed": functools.partial(Suite.perturbed, direction="forward"),
    "fuzz-parts": lambda s: s.fuzz_some("--parts"),
    "hopper-backward-perturbed": functools.partial(Suite.perturbed, direction="backward"),
    # A process of its own: files of the two folders have the same names.
    "pytest-torch": functools.partial(Suite.pytest, share="1/1", folder="tests/torch"),
    "other": lambda s: s.tests(
        "-FirstCall.*:Driver.*:Memory.*:Amax.*:Mirror*:OracleOfTheGpu.*:Problems.*:*Graph.*:"
        "Reruns.*:*Large.*:Sanitized.*:Races.*:Initialized.*:Invariance.*"
    ),
    "fuzz": Suite.fuzz,
    "device": lambda s: s.tests("Driver.*:Memory.*:Amax.*:Mirror*:OracleOfTheGpu.*"),
    "graphs": lambda s: s.tests("*Graph.*"),
    **{tool: functools.partial(Suite.sanitize, tool=tool) for tool in ("memcheck", "synccheck")},
    "first-call": lambda s: s.tests("FirstCall.*"),
    # Its seven processes start CUDA one after the other: 2 s, or 74 s on a machine of four GPUs.
    "hopper-primitives": lambda s: last(s.run([s.program("tests/hopper/hopper_primitives")], 200)),
    "reruns": lambda s: s.tests("Reruns.*"),
}
GPUS = {"jax-devices": 2, "jax-devices-grid": 2}  # that a row needs; 1 where nothing is said


def default_rows(gpus: int) -> list[str]:
    """The rows that so many GPUs can run; says which are left out."""
    for row, needed in GPUS.items():
        if needed > gpus:
            print(f"  {row:15} not run: needs {needed} GPUs", flush=True)
    return [row for row in ROWS if GPUS.get(row, 1) <= gpus]


def outcome(suite: Suite) -> dict:
    """Runs the suite's row: what the summary says of it."""
    start = time.perf_counter()
    try:
        verdict, detail = "ok", ROWS[suite.row](suite)
    except RowError as e:
        verdict, detail = "FAILED", str(e)
    seconds = round(time.perf_counter() - start, 1)
    return {"row": suite.row, "verdict": verdict, "seconds": seconds, "detail": detail}


class Places:
    """Where rows run: so many on each GPU."""

    def __init__(self, gpus: list[str], on_each: int) -> None:
        """`gpus`: as in CUDA_VISIBLE_DEVICES."""
        self.free, self.change = dict.fromkeys(gpus, on_each), threading.Condition()

    @contextlib.contextmanager
    def on(self, count: int) -> Iterator[str]:
        """A place on each of `count` GPUs, those with the most that are free."""

        def with_a_place() -> list[str]:
            gpus = [gpu for gpu, places in self.free.items() if places]
            return sorted(gpus, key=self.free.get, reverse=True)

        with self.change:
            self.change.wait_for(lambda: len(with_a_place()) >= count)
            taken = with_a_place()[:count]
            for gpu in taken:
                self.free[gpu] -= 1
        try:
            yield ",".join(sorted(taken))
        finally:
            with self.change:
                for gpu in taken:
                    self.free[gpu] += 1
                self.change.notify_all()


def outcomes(suites: list[Suite], gpus: list[str], jobs: int) -> Iterator[dict]:
    """Runs `jobs` rows at once, since most keep the CPU busy; yields each one's fact at its end."""
    places = Places(gpus, -(-jobs // len(gpus)))

    def run(suite: Suite) -> dict:
        with places.on(min(GPUS.get(suite.row, 1), len(gpus))) as suite.gpus:
            return outcome(suite)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, suite) for suite in suites]):
            yield done.result()


def main() -> None:
    """Runs the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--draws", type=int, default=20000)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--patience", type=float, default=1)
    parser.add_argument("rows", nargs="*")
    options = parser.parse_intermixed_args()
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"rows {sorted(unknown)}: need some of {', '.join(ROWS)}")
    names = gpu_names()
    if not names:
        sys.exit("test-gpu: FAILED: this machine has no GPU (nvidia-smi shows none)")
    log = (options.log or options.build / "test-gpu").resolve()
    if log.exists() and any(log.iterdir()) and not (log / "summary.jsonl").exists():
        parser.error(f"--log {log}: holds files of others; needs a new folder or an earlier log")
    shutil.rmtree(log, ignore_errors=True)
    chosen, cores = os.environ.get("CUDA_VISIBLE_DEVICES"), os.cpu_count() or 1
    gpus = chosen.split(",") if chosen else [str(number) for number in range(len(names))]
    jobs = options.jobs or ROWS_OF_A_GPU * len(gpus)
    patience = max(1, jobs / len(gpus) / ROWS_OF_A_GPU, jobs * CORES_OF_A_ROW / cores)
    patience *= options.patience
    print(f"{len(gpus)} x {names[0]}, {cores} cores, {jobs} rows at a time", end="")
    print(f", cuDNN: {prefer_cudnn_of_torch()}", flush=True)
    rows = options.rows or default_rows(len(gpus))
    suites = [Suite(options.build.resolve(), log, options.draws, row, patience) for row in rows]
    failed, begin = [], time.perf_counter()
    for fact in outcomes(suites, gpus, jobs):
        if fact["verdict"] != "ok":
            failed.append(fact["row"])
        print("  {row:15} {verdict:7} {seconds:6.1f} s  {detail}".format(**fact), flush=True)
        with (log / "summary.jsonl").open("a") as file:
            file.write(json.dumps(fact) + "\n")
    took = time.perf_counter() - begin
    print(f"test-gpu: {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}, {took:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
