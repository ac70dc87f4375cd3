"""Unfused, Flash and Fused against each other and the float64 oracle, forward and backward."""

from itertools import product

import pytest

from dpa import BIASES, LAYOUTS, MASKS, SOFTMAXES, WINDOWS, Config, check, drawn

HOST = drawn(420, 0, ("fp16", "bf16", "bf16", "fp32"))
DEVICE = drawn(1050, 1, ("fp16", "bf16"))


def named(config: Config) -> str:
    return "-".join(str(value) for value in config).replace(" ", "")


@pytest.mark.parametrize("config", HOST, ids=named)
def test_backends_agree(config: Config) -> None:
    assert "UNFUSED" in check(config, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("config", DEVICE, ids=named)
def test_backends_agree_on_a_gpu(config: Config) -> None:
    assert "UNFUSED" in check(config, "cuda")


@pytest.mark.parametrize("configs", [HOST, DEVICE], ids=["host", "device"])
def test_every_pair_of_options_is_drawn(configs: list[Config]) -> None:
    choices = {
        "layout": LAYOUTS,
        "mask": MASKS,
        "window": WINDOWS,
        "bias": tuple(BIASES),
        "softmax": tuple(SOFTMAXES),
    }
    seen = {(a, getattr(c, a), b, getattr(c, b)) for c in configs for a in choices for b in choices}
    plain = configs[0]._replace(dims=(32, 32), groups=4, cross=False, top_left=False, gaps=False)
    for a, b in product(choices, choices):
        for x, y in product(choices[a], choices[b]):
            config = plain._replace(layout="sb3hd", mask="no_mask", window=None)
            config = config._replace(**({a: x} | {b: y}))
            if "mask" not in (a, b) and (config.form == "thd" or config.window is not None):
                causal = config.window is not None and not config.window[1]
                config = config._replace(mask="padding_causal" if causal else "padding")
            if config.is_valid() and (a != b or x == y):
                assert (a, x, b, y) in seen, f"no case has {a}={x} and {b}={y}"


def test_most_cases_run_on_more_than_one_backend() -> None:
    ran = [check(config, "cpu") for config in HOST[:45] if config.dtype != "fp32"]
    assert sum(len(backends) > 1 for backends in ran) > len(ran) // 2
    assert {backend for backends in ran for backend in backends} == {"FLASH", "FUSED", "UNFUSED"}
