"""Every line of tests/problems that one call can say, under jit, against the float64 oracle."""

from pathlib import Path

import pytest

from jax_cases import run, unsayable
from jax_draws import TRANSFORMS

FOLDER = Path(__file__).parents[3] / "problems"
FILES = sorted(path.name for path in FOLDER.glob("*.txt"))
UNSAYABLE = {
    *("fp8", "pages", "one ragged side", "a window beyond 2^62"),
    "results of another type than the inputs",
    "an origin for each sequence, or a shift of the mask",
}


def lines(name: str) -> list[tuple[int, str]]:
    """Number and text of each line that is a problem."""
    rows = enumerate((FOLDER / name).read_text().splitlines(), 1)
    return [(n, row) for n, row in rows if row and not row.startswith("#")]


@pytest.mark.parametrize("name", FILES)
def test_every_line_agrees_with_the_oracle(name: str) -> None:
    for number, line in lines(name):
        if not unsayable(line):
            wrong = run(line, large=number % 2 == 0)
            assert not wrong, f"{name}:{number} {line}\n{wrong}"


def test_most_lines_can_be_said() -> None:
    every = [line for name in FILES for _, line in lines(name)]
    said = [line for line in every if not unsayable(line)]
    assert len(said) > 800
    assert {unsayable(line) for line in every} - {""} == UNSAYABLE


@pytest.mark.parametrize("shared", ["batch", "batch+row"])
def test_a_mapped_axis_rounds_the_gradient_of_a_shared_bias_once(shared: str) -> None:
    """It was rounded for each batch, before the sum over batches."""
    line = "dtype=bf16 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=5 seqlen_kv=6"
    line += f" bias=post_scale bias_broadcast={shared}"
    assert not run(line, large=False, transform=TRANSFORMS["vmap"])
