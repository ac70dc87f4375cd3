"""A share of the tests, for one of several processes: -p share --share 2/4 runs tests 2, 6, 10 ...

Consecutive tests take about the same time, so that the shares do too.
"""

from collections.abc import Sequence

import pytest


def part(items: Sequence, share: str) -> list:
    """The `items` that belong to share "n/of"."""
    number, _, of = share.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"--share is {share}; needs N/OF with N from 1 to OF")
    return list(items[int(number) - 1 :: int(of)])


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--share N/OF`."""
    parser.addoption("--share", default="1/1", help="run the tests N, N + OF ... only: N/OF")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """Keeps a share of what -m and -k have left."""
    kept = part(items, config.getoption("--share"))
    others = set(items) - set(kept)
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = kept
