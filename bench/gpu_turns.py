"""Contenders that take turns on a GPU: their timing, command line and records.

Used by the programs that compare the library with FlashAttention-3, PyTorch's back ends and other
builds of the library in one process.
"""

import argparse
import contextlib
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from gpu_vs_torch import ceilings, machine
from library import Library

Task = Callable[[], object]


class Timer:
    """A contender's calls as a graph; without one where capture is refused."""

    def __init__(self, tasks: list[Task], window_ms: float) -> None:
        """Estimates the time of a call and captures, on the current stream."""
        self.tasks = tasks
        self.calls = len(tasks)
        self.run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        estimate = (time.perf_counter() - begin) * 1e3
        self.times = max(1, min(200, int(window_ms / estimate)), math.ceil(10 / len(tasks)))
        self.calls = self.times * len(tasks)
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        try:
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(self.times):
                    self.run()
            finally:
                self.graph.capture_end()
        except RuntimeError:
            self.graph = None
        self.queue()
        torch.cuda.synchronize()

    def run(self) -> None:
        """One call for each copy."""
        for task in self.tasks:
            task()

    def queue(self) -> None:
        """All calls of a timing."""
        if self.graph:
            self.graph.replay()
        else:
            for _ in range(self.times):
                self.run()

    def take(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Untimed calls, then timed ones."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.queue()
        start.record()
        self.queue()
        end.record()
        return start, end


def prepare(
    makers: dict[str, Callable[[], tuple]],
    error_of: Callable[[torch.Tensor], float],
    tolerance: float,
    window_ms: float,
) -> tuple[dict[str, Timer], dict[str, dict], dict[str, str]]:
    """A timer of each contender, others with what is wrong with them, and the engines' names.

    By name of a contender, `makers` has the function that returns its tasks, the output of the
    first one, and its engine. `error_of` an output above the tolerance is wrong.
    """
    timers: dict[str, Timer] = {}
    engines: dict[str, str] = {}
    refused: dict[str, str] = {}
    wrong: dict[str, float] = {}
    for name, make in makers.items():
        try:
            tasks, output, engines[name] = make()
            tasks[0]()
            torch.cuda.synchronize()
            error = error_of(output)
            if error <= tolerance:
                timers[name] = Timer(tasks, window_ms)
            else:  # NaN too
                wrong[name] = error
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0]
    bad = {"wrong": wrong, "refused": refused}
    return timers, {key: value for key, value in bad.items() if value}, engines


def take_turns(timers: dict[str, Timer], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a call, by round; each round has another order."""
    shuffle = random.Random(1)
    taken: dict[str, list] = {name: [] for name in timers}
    for _ in range(rounds):
        for name in shuffle.sample(list(timers), len(timers)):
            taken[name].append(timers[name].take())
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) / timers[name].calls for start, end in events]
        for name, events in taken.items()
    }


def command_line(doc: str, engines: list[str], window_ms: float) -> argparse.Namespace:
    """The arguments of a program whose documentation is `doc`, with its defaults."""
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="libte_attention.so")
    parser.add_argument(
        "--other",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="another build of the library, whose engine hopper is timed too",
    )
    parser.add_argument("--peers", type=Path, help="the folder of fa3.py and libfa3.so")
    parser.add_argument("--output", type=Path, help="where lines of JSON go")
    parser.add_argument("--engines", type=words, default=engines)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--window-ms", type=float, default=window_ms, help="how long a timing lasts"
    )
    parser.add_argument("--only", default="", help="a regular expression that names match")
    parser.add_argument("--seconds", type=float, default=500, help="no cell begins later than this")
    return parser.parse_args()


class Libraries:
    """The library, other builds of it by name, and FlashAttention-3: its module and library."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Loads them."""
        self.own = Library(arguments.library.resolve())
        others = (other.split("=", 1) for other in arguments.other)
        self.others = {name: Library(Path(path).resolve()) for name, path in others}
        self.fa3 = None
        if arguments.peers:
            sys.path.append(str(arguments.peers.resolve()))
            import fa3

            self.fa3 = fa3, fa3.Library(arguments.peers.resolve() / "libfa3.so")


def records_of(
    shapes: Iterable, run: Callable[[object], dict], arguments: argparse.Namespace
) -> Iterator[dict]:
    """The record of every shape whose name matches, until the time is over."""
    begin = time.perf_counter()
    for shape in shapes:
        if not re.search(arguments.only, shape.what):
            continue
        if time.perf_counter() - begin > arguments.seconds:
            yield {"case": "skipped", "what": shape.what}
        else:
            yield run(shape)


def write_records(
    program: str, cells: Iterable[dict], row: Callable[[dict], str], output: Path | None
) -> None:
    """Runs the cells between two looks at the ceilings; prints and writes each record at once."""

    def suite() -> Iterator[dict]:
        yield {**machine(), "program": program}
        yield {"case": "ceiling", "when": "before", **ceilings()}
        yield from cells
        yield {"case": "ceiling", "when": "after", **ceilings()}

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        file = stack.enter_context(output.open("w")) if output else None
        for record in suite():
            print(row(record), flush=True)
            if file:
                file.write(json.dumps(record) + "\n")
                file.flush()
