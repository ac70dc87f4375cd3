"""Random cases of FP8 through attention(fp8=Fp8(...)), forward and backward, against the oracle.

usage: fp8_draws.py COUNT [SEED] [DEVICE]

Prints how many have run after every 100, in the end how many ran, were refused (and why), and
failed; the exit code says whether any did.
"""

import collections
import sys

import torch

from cases import FP8_BACKWARD, TYPES, Formats, options_of, saturates
from kit import Case, draw
from te_attention import torch as tea

FP8 = ("e4m3", "e5m2")
SCALES = tuple(dict.fromkeys((*FP8_BACKWARD, "O_SCALE")))
AMAXES = ("S_AMAX", "O_AMAX", "DP_AMAX", "DQ_AMAX", "DK_AMAX", "DV_AMAX")
SATURATION = "s_scale is so large that probabilities saturate"


def unsayable(line: str) -> str:
    """Why attention() cannot be asked for a case, or ""."""
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    dtype, training = words.get("dtype"), words.get("training") == "1"
    if dtype not in FP8:
        return "not FP8"
    o = words.get("o_dtype", dtype)
    dout = words.get("dout_dtype", o)
    if training and dout not in FP8:
        return "a dO that stays in 16 bits: attention() casts it"
    if training and o in FP8 and dout != o:
        return "O and dO in two FP8 types: autograd gives dO the type of O"
    return ""


def _scales(case: Case, device: str, o_dtype: torch.dtype) -> tea.Fp8:
    """The scales of a case. A dO that autograd holds in O's type is cast to its codes again."""
    own = {n: case[n] for n in SCALES}
    fields = {n.lower(): None if t is None else t.to(device) for n, t in own.items()}
    dtype = case.field("dtype")
    names = {"dout_dtype": case.field("o_dtype", dtype), "dqkv_dtype": dtype}
    types = {n: getattr(torch, TYPES[case.field(n, other)]) for n, other in names.items()}
    if fields["dp_scale"] is None:  # 1 in a case; attention() would find one
        fields["dp_scale"] = torch.ones(1, device=device)
    if o_dtype.itemsize > 1:
        inverse = fields["dout_scale_inv"]
        fields["dout_scale"] = torch.ones(1, device=device) if inverse is None else 1 / inverse
    return tea.Fp8(**fields, **types, o_dtype=o_dtype)


def _dout(case: Case, formats: Formats, device: str, o_dtype: torch.dtype) -> torch.Tensor:
    codes = formats.order(case["DOUT"].to(device), "q")
    if o_dtype.itemsize == 1:
        return codes
    inverse = case["DOUT_SCALE_INV"]
    return (codes.float() * (1 if inverse is None else inverse.to(device))).to(o_dtype)


def _write_amaxes(case: Case, amax: torch.Tensor, training: bool) -> None:
    """The largest of what the case holds and of what was seen; one for dQ, dK and dV, or three."""
    found = dict(zip(AMAXES, amax.cpu(), strict=True))
    if case["DK_AMAX"] is None:
        found["DQ_AMAX"] = amax[3:].max().cpu()
    for name in AMAXES if training else AMAXES[:2]:
        if case[name] is not None:
            case[name].copy_(torch.maximum(case[name].flatten()[0], found[name]))


def _write_statistics(case: Case, lse: torch.Tensor, largest: torch.Tensor) -> None:
    for name, value in (("LSE", lse), ("MAX", largest)):
        if case[name] is not None:
            case[name].copy_(value)
    if case["SUM_EXP"] is not None:
        sums = (lse.double() - largest.double()).exp()
        case["SUM_EXP"].copy_(torch.where(largest != -torch.inf, sums, 0))


def run(line: str, choice: int, large: bool, device: str = "cpu", engine: str = "") -> str:
    """The error of a case, or "". `choice` picks the formats."""
    with Case(line) as case:
        case.fill(large)
        formats, training = Formats(case, choice), case.field("training") == "1"
        options = options_of(case, device)
        o_dtype = getattr(torch, TYPES[case.field("o_dtype", case.field("dtype"))])
        fp8 = _scales(case, device, o_dtype)
        inputs = []
        for name, side in (("Q", "q"), ("K", "kv"), ("V", "kv")):
            tensor = formats.order(case[name].to(device), side).detach()
            inputs.append(tensor.requires_grad_(training))
            if training:
                tensor.grad_dtype = None
        for name, gradient in (("bias", "DBIAS"), ("sink", "DSINK")):
            if case[gradient] is not None and isinstance(options[name], torch.Tensor):
                inputs.append(options[name].requires_grad_())
        words = options | {"format": formats.text, "engine": engine, "fp8": fp8}
        wanted = {"return_lse": True, "return_max_logit": True, "return_amax": True}
        try:
            with torch.set_grad_enabled(training):
                o, lse, largest, amax = tea.attention(*inputs[:3], **words, **wanted)
        except RuntimeError as error:
            if SATURATION in str(error) and saturates(case):
                return SATURATION
            return f"RuntimeError: {error}"
        reported = device == "cpu" and not options["dropout"]  # which may drop what saturates
        if reported and saturates(case) and largest.isfinite().any():
            return "s_scale is too large, and no error was raised"
        with torch.no_grad():
            case["O"].copy_(formats.order(o, "q"))
            _write_statistics(case, lse, largest)
            wrong = case.damage(backward=False)
            if training:
                wrong += _differentiate(case, formats, (o, lse), inputs, device)
            _write_amaxes(case, amax, training)
        said = tea.explain(*inputs[:3], **words)
        first = next(row for row in said.splitlines()[1:] if row.endswith("accepts"))
        return wrong + case.compare(engine or first.split(":")[0])


def _differentiate(case: Case, formats: Formats, outputs: tuple, inputs: list, device: str) -> str:
    o, lse = outputs
    incoming = [_dout(case, formats, device, o.dtype)]
    if case["DLSE"] is not None:
        incoming.append(case["DLSE"].to(device))
    found = torch.autograd.grad((o, lse)[: len(incoming)], inputs, incoming)
    for name, side, value in zip(("DQ", "DK", "DV"), ("q", "kv", "kv"), found, strict=False):
        case[name].copy_(formats.order(value, side))
    small = list(found[3:])
    for name in ("DBIAS", "DSINK"):
        if case[name] is not None:
            case[name].copy_(small.pop(0))
    return case.damage(backward=True)


def tally(count: int, seed: int, device: str = "cpu") -> tuple[int, collections.Counter, list[str]]:
    """Runs `count` cases from a seed on: how many ran, why others did not, and the wrong ones."""
    ran, refused, wrong = 0, collections.Counter(), []
    while ran < count:
        line = draw(seed)
        seed += 1
        if reason := unsayable(line):
            refused[reason] += 1
            continue
        try:
            error = run(line, seed, large=seed % 2 == 0, device=device)
        except Exception as failure:  # any of them is a finding
            error = f"{type(failure).__name__}: {failure}"
        if error == SATURATION:
            refused[error] += 1
            continue
        ran += 1
        if error:
            wrong.append(f"{line}\n{error}")
        if ran % 100 == 0:
            print(f"{ran} of {count} ran, {len(wrong)} failed; next seed {seed}", flush=True)
    return ran, refused, wrong


def main() -> None:
    """Runs COUNT cases that can be said."""
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 3_000_000
    device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
    ran, refused, wrong = tally(int(sys.argv[1]), seed, device)
    print("\n".join(wrong))
    print(f"{len(wrong)} of {ran} cases failed, {refused.total()} refused: {dict(refused)}")
    sys.exit(len(wrong) > 0)


if __name__ == "__main__":
    main()
