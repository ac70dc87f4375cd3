"""Recipes: fields, defaults, predicates, and what is refused."""

import dataclasses

import pytest

from te_attention.torch import fp8
from te_attention.torch.fp8 import Format

RECIPES = {
    "delayed": fp8.DelayedScaling,
    "float8_current_scaling": fp8.Float8CurrentScaling,
    "mxfp8": fp8.MXFP8BlockScaling,
    "float8_block_scaling": fp8.Float8BlockScaling,
    "nvfp4": fp8.NVFP4BlockScaling,
    "custom": fp8.CustomRecipe,
}


@pytest.mark.parametrize("name", RECIPES)
def test_predicates(name: str) -> None:
    recipe = RECIPES[name]()
    assert [other for other in RECIPES if getattr(recipe, other)()] == [name]
    per_tensor = name in ("delayed", "float8_current_scaling")
    assert recipe.float8_per_tensor_scaling() is per_tensor
    assert isinstance(recipe, fp8.Recipe)
    recipe.fp8_dpa = recipe.fp8_mha = True  # plain attributes, which programs write


def test_fields_of_delayed_scaling() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(fp8.DelayedScaling)}
    assert fields == {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
    }
    text = repr(fp8.DelayedScaling(amax_compute_algo="most_recent"))
    assert text == repr(fp8.DelayedScaling())  # the algorithm does not separate reductions
    assert text != repr(fp8.DelayedScaling(amax_history_len=1))


def test_fields_of_current_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f.name for f in dataclasses.fields(fp8.Float8CurrentScaling)]
    assert names[:2] == ["use_power_2_scales", "fp8_format"]
    assert names[-2:] == ["fp8_dpa", "fp8_mha"]
    assert not fp8.Float8CurrentScaling().use_power_2_scales
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    recipe = fp8.Float8CurrentScaling()
    assert recipe.use_power_2_scales
    assert recipe.fp8_quant_fwd_inp.power_2_scale


def test_formats() -> None:
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert Format.E4M3.value.max_bwd == 448


@pytest.mark.parametrize("kind", [fp8.DelayedScaling, fp8.Float8CurrentScaling])
def test_e5m2_alone_is_refused(kind: type) -> None:
    with pytest.raises(AssertionError, match="fp8_format is E5M2; needs E4M3 or HYBRID"):
        kind(fp8_format=Format.E5M2)


@pytest.mark.parametrize("kind", [fp8.DelayedScaling, fp8.Float8CurrentScaling])
@pytest.mark.parametrize(("value", "seen"), [("HYBRID", "'HYBRID'"), (Format.E2M1, "E2M1")])
def test_what_is_no_format_of_8_bits_is_refused(kind: type, value: object, seen: str) -> None:
    with pytest.raises(AssertionError, match=f"fp8_format is {seen}; needs E4M3 or HYBRID"):
        kind(fp8_format=value)


@pytest.mark.parametrize("length", [0, -1, 2.5, "16"])
def test_a_history_has_at_least_one_place(length: object) -> None:
    with pytest.raises(ValueError, match=f"amax_history_len is {length!r}; needs an integer from"):
        fp8.DelayedScaling(amax_history_len=length)


def test_a_margin_is_a_number() -> None:
    with pytest.raises(ValueError, match="margin is 'a'; needs a number"):
        fp8.DelayedScaling(margin="a")


def test_functions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"amax_compute_algo is .*; needs 'max' or"):
        fp8.DelayedScaling(amax_compute_algo=max)
    with pytest.raises(ValueError, match="scaling_factor_compute_algo is a function; needs None"):
        fp8.DelayedScaling(scaling_factor_compute_algo=max)
