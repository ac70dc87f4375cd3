"""Cases through te_attention.jax against the float64 oracle: options and transformations.

usage: jax_draws.py COUNT [SEED] [--problems] [--jobs N] [--limit SECONDS]

Random cases from SEED on, or with --problems the lines of tests/problems; on the GPU where JAX has
one. Each case runs under jit; by its number it also runs under vmap (a mapped axis of one),
jax.checkpoint or lax.scan. N processes share them. Prints how many ran, were refused (and why), and
failed; the exit code says whether any did, or whether the time was over before COUNT ran.
"""

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax

import jax_cases
from kit import draw

PROBLEMS = Path(__file__).parents[1] / "problems"
TRANSFORMS = {
    "plain": lambda f: f,
    "vmap": lambda f: (
        lambda *x: jax.tree.map(
            lambda leaf: leaf[0], jax.vmap(f)(*jax.tree.map(lambda leaf: leaf[None], x))
        )
    ),
    "checkpoint": jax.checkpoint,
    "scan": lambda f: (
        lambda *x: jax.tree.map(
            lambda leaf: leaf[0], jax.lax.scan(lambda c, _: (c, f(*x)), 0, length=1)[1]
        )
    ),
}


def problems() -> list[str]:
    """The lines of tests/problems."""
    rows = [row for path in sorted(PROBLEMS.glob("*.txt")) for row in path.read_text().splitlines()]
    return [row for row in rows if row and not row.startswith("#")]


def run(lines: Iterable[str], count: int, end: float) -> dict:
    """Runs lines until `count` ran, there are no more, or the time is over."""
    device = -1 if jax.default_backend() == "cpu" else 0
    ran, refused, failed, is_over = 0, collections.Counter(), 0, False
    for line in lines:
        is_over = time.monotonic() > end
        if ran == count or is_over:
            break
        reason = jax_cases.refused(line, device)
        if reason:
            refused[reason] += 1
            continue
        name = list(TRANSFORMS)[ran % len(TRANSFORMS)]
        try:
            wrong = jax_cases.run(line, ran % 2 == 0, "", device, TRANSFORMS[name])
        except Exception as error:  # any of them is a finding
            wrong = f"{type(error).__name__}: {error}"
        ran += 1
        if ran % 200 == 0:
            jax.clear_caches()
        if wrong:
            failed += 1
            print(f"{name}: {line}\n{wrong}", flush=True)
    out = {"ran": ran, "failed": failed, "refused": refused, "over": is_over and ran < count}
    return out | {"device": jax.devices()[0].device_kind}


def share(options: argparse.Namespace) -> dict:
    """The cases of this process: every --jobs-th from the one of its number on."""
    first, step = options.share, options.jobs
    count = len(range(first, options.count, step))
    if options.problems:
        lines = itertools.islice(problems(), first, None, step)
    else:
        lines = map(draw, itertools.count(options.seed + first, step))
    return run(lines, count, time.monotonic() + options.limit)


def shares(options: argparse.Namespace) -> dict:
    """All processes, whose last lines are their counts. Their findings are printed."""
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, __file__, *sys.argv[1:], "--share"]
    children = [
        subprocess.Popen([*command, str(i)], env=os.environ | memory, text=True, stdout=-1)
        for i in range(options.jobs)
    ]
    total = {"ran": 0, "failed": 0, "refused": collections.Counter(), "over": False, "device": ""}
    for child in children:
        text = child.communicate()[0].rstrip().rpartition("\n")
        print(text[0], end="\n" * bool(text[0]), flush=True)
        if child.returncode:
            total["failed"] += 1
            print(f"a process ended with code {child.returncode}: {text[2]}", flush=True)
            continue
        part = json.loads(text[2])
        for name in ("ran", "failed"):
            total[name] += part[name]
        total["refused"].update(part["refused"])
        total |= {"over": total["over"] or part["over"], "device": part["device"]}
    return total


def main() -> None:
    """Runs COUNT cases that can be said."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="at most, of all processes")
    parser.add_argument("seed", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--problems", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=86400)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        print(json.dumps(share(options)))
        return
    options.share = 0
    total = share(options) if options.jobs == 1 else shares(options)
    refused = dict(total["refused"])
    print(f"{total['failed']} of {total['ran']} cases failed on {total['device']}, ", end="")
    print(f"{sum(refused.values())} refused: {refused}")
    if total["over"]:
        print(f"{total['ran']} ran within {options.limit:.0f} s; needs all, or {options.count}")
    sys.exit(total["failed"] > 0 or total["over"])


if __name__ == "__main__":
    main()
