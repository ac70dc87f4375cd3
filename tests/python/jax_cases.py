"""A case of the kit through te_attention.jax under jit, and its results back into its memory."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from cases import options_of
from kit import Case
from te_attention import _library as core
from te_attention import jax as tea

MASKS = {
    None: (False, False),
    "causal": (True, False),
    "bottom_right": (False, True),
    "causal_bottom_right": (True, True),
}


RESULTS = ("o", "dout", "dqkv")


def unsayable(line: str) -> str:
    """Why one call of te_attention.jax cannot say a case, or nothing."""
    problem, _, settings = line.partition("|")
    words = dict(word.split("=", 1) for word in problem.split())
    settings = dict(word.split("=", 1) for word in settings.split())
    forms = [words.get(f"{side}_form", "dense") for side in ("q", "kv")]
    if words["dtype"].startswith("e") or words.get("kv_dtype", "default") != "default":
        return "fp8"
    if "paged" in forms:
        return "pages"
    if any(words.get(f"{name}_dtype", words["dtype"]) != words["dtype"] for name in RESULTS):
        return "results of another type than the inputs"
    if "shift" in settings or "origin_step" in settings:
        return "an origin for each sequence, or a shift of the mask"
    if any(int(words.get(f"window_{side}", 0)) > 2**62 for side in ("left", "right")):
        return "a window beyond 2^62"
    return "one ragged side" if forms.count("ragged") == 1 else ""


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy, contiguous."""
    if tensor.dtype == torch.bfloat16:
        array = tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = tensor.contiguous().numpy()
    return jnp.array(array)


def write(case: Case, name: str, value: jax.Array) -> None:
    """Into the case's own memory."""
    array = np.asarray(value)
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array.copy())
    case[name].copy_(tensor)


def _lengths(case: Case, given: dict) -> tuple[dict, dict]:
    """cu_seqlens, bounds and offsets of ragged sides; lengths of padded ones."""
    arrays, static = {}, {}
    for short, name in (("q", "query_seq_lengths"), ("kv", "key_value_seq_lengths")):
        cu, offsets = given[f"cu_seqlens_{short}"], given[f"offsets_{short}"]
        if case.form("q") == "ragged":
            arrays[f"cu_seqlens_{short}"] = to_jax(cu)
            static[f"max_seqlen_{short}"] = given[f"max_seqlen_{short}"]
            if offsets is not None:
                arrays[f"offsets_{short}"] = to_jax(offsets)
        elif cu is not None:
            arrays[name] = to_jax(cu.diff())
    return arrays, static


def arguments_of(case: Case) -> tuple[dict, dict]:
    """Arrays, and options that are none, of attention() or ragged_attention()."""
    given = options_of(case, "cpu")
    causal, bottom_right = MASKS[given["mask"]]
    arrays, static = _lengths(case, given)
    static |= {
        **{"is_causal": causal, "bottom_right": bottom_right, "scale": given["scale"]},
        **{"local_window_size": given["window"], "bias_type": given["bias_type"]},
        **{name: given[name] for name in ("softcap", "deterministic", "batch_invariant")},
    }
    for name in ("alibi", "sink", "bias"):
        value = given[name]
        if isinstance(value, torch.Tensor):
            arrays[name] = to_jax(value)
        elif value not in (None, False):
            static[name] = value
    if given["dropout"] and case.field("training") == "1":  # which turns dropout on
        static["dropout"] = given["dropout"]
        arrays["dropout_key"] = jnp.array(given["rng_state"].numpy().view(np.uint32))
    if given["origin"] is not None:
        static["origin"] = given["origin"].tolist()
    return arrays, static


@contextlib.contextmanager
def x64(enabled: bool):
    """64-bit types, within a block."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _program(attention, static: dict, training: bool, transform: Callable):
    """Forward, and backward if it trains, as one function under jit."""

    def program(qkv: list, small: dict, arrays: dict, arriving: list) -> tuple:
        def forward(qkv: list, small: dict) -> tuple:
            wants = {"return_residual": True, "return_max_logit": True}

            def call(qkv: list, small: dict, arrays: dict) -> tuple:
                return attention(*qkv, **small, **arrays, **static, **wants)

            out = transform(call)(qkv, small, arrays)
            return out[: len(arriving)], out

        if not training:
            return forward(qkv, small)[1], None
        _, pull, out = jax.vjp(forward, qkv, small, has_aux=True)
        return out, pull(tuple(arriving))

    return jax.jit(program)


def _rows(case: Case, x: jax.Array) -> jax.Array:
    """[B, T, N] to the order of LSE in the C API, and back."""
    return x if case.form("q") == "ragged" else x.swapaxes(1, 2)


def _write_forward(case: Case, o: jax.Array, lse: jax.Array, largest: jax.Array) -> None:
    write(case, "O", o)
    for name, value in (("LSE", lse), ("MAX", largest)):
        if case[name] is not None:
            write(case, name, _rows(case, value))
    if case["SUM_EXP"] is not None:
        wide = [np.asarray(_rows(case, x), np.float64) for x in (lse, largest)]
        with np.errstate(all="ignore"):
            sums = np.exp(wide[0] - wide[1])
        write(case, "SUM_EXP", np.where(wide[1] == -np.inf, 0, sums))


def _write_backward(case: Case, gradients: tuple) -> None:
    for name, value in zip(("DQ", "DK", "DV"), gradients[0], strict=True):
        write(case, name, value)
    for name, value in gradients[1].items():
        write(case, f"D{name.upper()}", value)


def run(
    line: str,
    large: bool,
    engine: str = "",
    device: int = -1,
    transform: Callable = lambda f: f,
) -> str:
    """The error of a case, or an empty text. `transform`: of the differentiated function."""
    with Case(line) as case, x64(case.field("dtype") == "fp64"):
        case.fill(large)
        arrays, static = arguments_of(case)
        attention = tea.ragged_attention if case.form("q") == "ragged" else tea.attention
        small = {
            name: arrays.pop(name)
            for name, gradient in (("bias", "DBIAS"), ("sink", "DSINK"))
            if case[gradient] is not None and name in arrays
        }
        training = case.field("training") == "1"
        arriving = [to_jax(case["DOUT"])] if training else []
        if case["DLSE"] is not None:
            arriving.append(_rows(case, to_jax(case["DLSE"])))
        program = _program(attention, static | {"engine": engine}, training, transform)
        qkv = [to_jax(case[name]) for name in "QKV"]
        out, gradients = program(qkv, small, arrays, arriving)
        _write_forward(case, *out)
        wrong = case.damage(backward=False)
        if gradients is not None:
            _write_backward(case, gradients)
            wrong += case.damage(backward=True)
        return wrong + case.compare(engine or _chosen(case, device))


def _chosen(case: Case, device: int) -> str:
    """The engine that runs a case, whose error bounds apply; an empty text: none does.

    The case has strides in its own memory, and none in JAX.
    """
    fields = {name: value for name, value in case.fields.items() if "stride" not in name}
    said = core.explain(" ".join(f"{name}={value}" for name, value in fields.items()), device)
    accepting = (row for row in said.splitlines() if row.endswith("accepts"))
    return next(accepting, "").split(":")[0]


def refused(line: str, device: int) -> str:
    """Why a case does not run on a device (-1: the CPU), or nothing."""
    reason = unsayable(line)
    if reason or device < 0:
        return reason
    with Case(line) as case:
        return "" if _chosen(case, device) else "no engine of the device"
