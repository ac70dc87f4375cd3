"""The whole grid of TransformerEngine's test of JAX attention, through transformer_engine.jax.

usage: te_jax_grid.py [--divisor N] [--every N] [--first N]

Rows and keys are those of TransformerEngine's shapes, divided by --divisor. Prints every case whose
values differ, how many ran, and why the others did not; the exit code says whether any failed.
"""

import argparse
import collections
import sys
import time

import jax
import numpy as np

import te_jax_cases as cases


def main() -> None:
    """Runs every --every-th case that an engine takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divisor", type=int, default=16)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    reasons = collections.Counter()
    running = []
    for case in (every := cases.grid(options.divisor)):
        reason = cases.refused(case)
        if reason:
            reasons[reason] += 1
        else:
            running.append(case)
    chosen = running[options.first :: options.every]
    # On a GPU scores of full size would take NumPy longer than a compilation.
    xp = np if jax.default_backend() == "cpu" else jax.numpy
    start, failed, with_values = time.time(), 0, 0
    for i, case in enumerate(chosen):
        try:
            wrong = cases.run(case, xp)
        except Exception as error:  # any of them is a finding
            wrong = f"{type(error).__name__}: {error}"
        with_values += not case.dropout
        if wrong:
            failed += 1
            print(f"{case}: {wrong}", flush=True)
        if i % 200 == 199:  # compiled programs stay in memory otherwise
            jax.clear_caches()
            print(f"{i + 1} of {len(chosen)} after {time.time() - start:.0f} s", flush=True)
    print(f"{len(every)} combinations, {len(running)} that run; not run:")
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    print(f"{failed} of {len(chosen)} failed, {with_values} of them with values compared")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
