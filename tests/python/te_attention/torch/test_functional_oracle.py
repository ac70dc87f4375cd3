"""Every argument of attention() against the float64 oracle: random cases over hostile memory."""

import pytest

from cases import run
from kit import draw

BLOCKS, SIZE = 16, 34  # cases: the product


def cases(block: int) -> list[tuple[int, str]]:
    """SIZE cases from the seeds of a block. attention() does not take fp8."""
    found: list[tuple[int, str]] = []
    seed = 1000 * (block + 1)
    while len(found) < SIZE:
        line = draw(seed)
        if "dtype=e" not in line.split("|")[0]:
            found.append((seed, line))
        seed += 1
    return found


@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_cases_agree_with_the_oracle(block: int) -> None:
    for seed, line in cases(block):
        wrong = run(line, choice=seed, large=seed // 2 % 2 == 0)
        assert not wrong, f"{line}\n{wrong}"
