#!/usr/bin/env python3
"""Context parallelism on several GPUs over NCCL: results, failures, times, memory and overlap.

usage: PYTHONPATH=BUILD/python:BUILD/python/te_attention_transformer_engine:tests/python
       python3 bench/context_parallel.py [--parts NAME,...] [--ranks 2] [--rows 65536]
       [--heads 32] [--strategies NAME,...] [--max-ctas N] [--output FILE] [--trace FOLDER]
       [--device cuda]

Each part runs in processes of its own, one for each rank and GPU, for at most its limit. It prints
figures with their bars, and one line of JSON for each to FILE. Exit code 0 only if none is missed.
--device cpu runs the parts that need no GPU over gloo, to test the program.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import context_parallel_parts as parts_of
import torch
import torch.distributed as dist
from context_parallel_lock_step import lock_step
from context_parallel_parts import SECONDS, Rank
from facts import commit, processor
from torch import multiprocessing

ROWS, HEADS = 65536, 32
STRATEGIES = ("ring", "all_gather", "a2a")


class Part(NamedTuple):
    """A part. limit: seconds of all of it; timeout: of NCCL; mortal: ranks that may end early."""

    body: Callable[[Rank], None]
    limit: int
    timeout: int = 120
    mortal: tuple[int, ...] = ()


PARTS = {
    "results": Part(parts_of.results, 180),
    "transformer-engine": Part(parts_of.transformer_engine, 240),
    "disagreements": Part(parts_of.disagreements, 90),
    "killed-before": Part(parts_of.killed_before, 60, mortal=(1,)),
    "killed-within": Part(parts_of.killed_within, 60, mortal=(1,)),
    "speed": Part(parts_of.speed, 180),
    "window": Part(parts_of.window, 60),
    "memory": Part(parts_of.memory, 60),
    "timeline": Part(parts_of.timeline, 90),
    "lock-step": Part(lock_step, 90),
    "host": Part(parts_of.host, 60),
    "graph": Part(parts_of.graph, 60),
}


@dataclass
class Options:
    """Of the command line, for all ranks."""

    ranks: int
    rows: int
    heads: int
    device: str
    trace: str
    max_ctas: int | None  # of the ranks' kernels
    strategies: tuple[str, ...]  # of the part speed


def work(rank: int, part: str, options: Options, folder: str, port: int) -> None:
    """One rank of one part; its figures are in FOLDER/RANK.jsonl."""
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # it would delay the end of a process
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "nccl" if device.type == "cuda" else "gloo"
    words = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=options.ranks,
        timeout=timedelta(seconds=PARTS[part].timeout), **words,
    )  # fmt: skip
    with Path(folder, f"{rank}.jsonl").open("w") as file:
        here = Rank(rank, options, device, dist.new_group(backend="gloo"), file)
        try:
            PARTS[part].body(here)
        except Exception:
            here.figure("error", traceback.format_exc()[-2000:], wanted=None)
            file.flush()
            os._exit(1)
        here.figure("finished", 1, wanted=1)
    os._exit(0)  # a group whose other ranks may be dead cannot be destroyed


def run(part: str, options: Options) -> list[dict]:
    """The figures of all ranks of a part."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, begin = multiprocessing.get_context("spawn"), time.monotonic()
    figures: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = (part, options, folder, store.port)
        processes = [
            context.Process(target=work, args=(rank, *arguments)) for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        ends: dict[int, float] = {}
        while len(ends) < options.ranks and time.monotonic() < begin + PARTS[part].limit:
            time.sleep(0.05)
            for rank, process in enumerate(processes):
                if rank not in ends and not process.is_alive():
                    ends[rank] = time.monotonic()
        for process in processes:
            process.kill()
            process.join()
        for rank in range(options.ranks):
            path = Path(folder, f"{rank}.jsonl")
            lines = path.read_text().splitlines() if path.exists() else []
            found = [{"part": part, "rank": rank} | json.loads(line) for line in lines]
            figures += [f for f in found if f["name"] not in ("finished", "begin")]
            last = found[-1] if found else {"name": "", "value": begin}
            line = {"part": part, "rank": rank, "name": "process", "bar": "finished", "ok": False}
            if rank not in ends:
                figures.append(line | {"value": f"not ready after {PARTS[part].limit} s"})
            elif (
                last["name"] == "begin" and rank not in PARTS[part].mortal
            ):  # NCCL has ended the process
                taken = round(ends[rank] - last["value"], 1)
                figures.append(line | {"name": "seconds until NCCL ended the process",
                                       "value": taken, "bar": f"<= {SECONDS}",
                                       "ok": taken <= SECONDS})  # fmt: skip
            elif last["name"] != "finished" and rank not in PARTS[part].mortal:
                figures.append(line | {"value": "ended early"})
    return figures


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--max-ctas", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trace", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    parts = given.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts {sorted(unknown)}: needs some of {', '.join(PARTS)}")
    if given.device == "cuda" and torch.cuda.device_count() < given.ranks:
        sys.exit(f"FAILED: {torch.cuda.device_count()} GPUs; needs {given.ranks}")
    options = Options(given.ranks, given.rows, given.heads, given.device, given.trace,
                      given.max_ctas, tuple(given.strategies.split(",")))  # fmt: skip
    name = torch.cuda.get_device_name() if given.device == "cuda" else processor()
    facts = {"machine": name, "commit": commit(), "torch": torch.__version__, **vars(options),
             "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    lines = [facts]
    print(json.dumps(facts), flush=True)
    missed = 0
    for part in parts:
        begin = time.monotonic()
        figures = run(part, options)
        print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
        for figure in figures:
            missed += not figure["ok"]
            verdict = "ok" if figure["ok"] else "MISSED"
            text = "  {verdict:6} rank {rank} {name}: {value} (bar: {bar})"
            print(text.format(verdict=verdict, **figure), flush=True)
        lines += figures
        if given.output:
            given.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{missed} of {len(lines) - 1} figures missed their bar")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
