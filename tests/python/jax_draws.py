"""Random cases through te_attention.jax against the float64 oracle: options and transformations.

usage: jax_draws.py COUNT [SEED]

Each case runs under jit; by its number it also runs under vmap (a mapped axis of one),
jax.checkpoint or lax.scan. Prints how many ran, were refused (and why), and failed; the exit code
says whether any did.
"""

import collections
import sys

import jax

import jax_cases
from kit import draw

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


def main() -> None:
    """Runs COUNT cases that can be said."""
    count = int(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    ran, refused, failed = 0, collections.Counter(), 0
    while ran < count:
        line = draw(seed)
        seed += 1
        reason = jax_cases.unsayable(line)
        if reason:
            refused[reason] += 1
            continue
        name = list(TRANSFORMS)[ran % len(TRANSFORMS)]
        try:
            wrong = jax_cases.run(line, large=ran % 2 == 0, transform=TRANSFORMS[name])
        except Exception as error:  # any of them is a finding
            wrong = f"{type(error).__name__}: {error}"
        ran += 1
        if ran % 200 == 0:
            jax.clear_caches()
        if wrong:
            failed += 1
            print(f"{name}: {line}\n{wrong}", flush=True)
    print(f"{failed} of {ran} cases failed, {sum(refused.values())} refused: {dict(refused)}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
