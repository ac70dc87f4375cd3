"""A part of TransformerEngine's grids; te_jax_grid.py runs all of the first."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import te_jax_cases as cases

# A prime, so that each value of each axis is in the part.
RUNNING = [case for case in cases.grid(16) if not cases.refused(case)][::29]


@pytest.fixture(scope="module", autouse=True)
def _programs_are_freed() -> Iterator[None]:
    yield
    jax.clear_caches()


def test_every_value_of_every_axis_is_in_the_part() -> None:
    for name in ("mask", "softmax", "is_thd", "dropout", "has_window", "descriptor", "has_bias"):
        assert len({getattr(case, name) for case in RUNNING}) > 1, name
    assert {case.mask.name for case in RUNNING} == set(cases.MASKS)
    assert len({case.shape for case in RUNNING}) == 6  # all but the one whose layout cannot pack it


def test_more_cases_run_than_in_transformer_engine() -> None:
    running = [case for case in cases.grid() if not cases.refused(case)]
    assert len(cases.grid()) == 5040
    assert len(running) > 1182


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_values(case: cases.Grid) -> None:
    assert not cases.run(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [x for x in cases.grid(2) if not cases.refused(x)][::53], ids=str)
def test_values_on_a_gpu(case: cases.Grid) -> None:
    assert not cases.run(case, jnp)


@pytest.mark.parametrize("case", cases.deterministic_grid(16), ids=str)
def test_deterministic_values(case: cases.Grid, monkeypatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    reason = cases.refused(case)
    if reason:
        assert reason.startswith(("THD", "bottom-right"))
        return
    assert not cases.run(case)


@pytest.mark.parametrize("case", cases.of_one_rank(8), ids=str)
def test_values_of_one_rank_of_context_parallelism(case: cases.Grid) -> None:
    assert not cases.run(case, context_parallel_causal_load_balanced=True)
