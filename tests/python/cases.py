"""A case of the kit through te_attention.torch, and its results back into the case's memory."""

import torch

from kit import Case
from te_attention import _library as core
from te_attention import torch as tea
from te_attention.torch import functional
from te_attention.torch._library import OPS

ORDERS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}


class Formats:
    """The formats of one run: what the case has as [batch, row, head, dim] in another order."""

    def __init__(self, case: Case, choice: int) -> None:
        names = tuple(ORDERS)
        self.q = "thd" if case.form("q") == "ragged" else names[choice % 3]
        self.kv = "thd" if case.form("kv") == "ragged" else names[choice // 3 % 3]
        self.text = f"{self.q}_{self.kv}"

    def order(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """From the order of the case to that of the format, and back: each is its own inverse."""
        form = getattr(self, side)
        return tensor if form == "thd" else tensor.permute(ORDERS[form])


def options_of(case: Case, device: str) -> dict:
    """The arguments of attention() after q, k and v."""

    def tensor(name: str) -> torch.Tensor | None:
        value = case[name]
        return None if value is None else value.to(device)

    def bound(name: str) -> int | None:
        value = int(case.field(name))
        return value - 1 if value else None

    masks = {(0, 0): None, (1, 0): "causal", (0, 1): "bottom_right", (1, 1): "causal_bottom_right"}
    softmax = case.field("softmax", "vanilla")
    alibi = case.field("alibi", "none")
    slopes = tensor("SLOPES")
    if slopes is not None and int(case.field("slopes_stride")):
        heads, stride = int(case.field("heads_q")), int(case.field("slopes_stride"))
        slopes = slopes.as_strided((case.batch, heads), (stride, 1)).contiguous()
    tables = [tensor(n) for n in ("TABLE_K", "TABLE_V")]
    tables = [
        None if t is None else t.reshape(case.batch, t.numel() // max(case.batch, 1))
        for t in tables
    ]
    width = max((t.shape[1] for t in tables if t is not None), default=0)  # the front end has one
    tables = [
        None if t is None else torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in tables
    ]
    sink = tensor("SINK")
    if softmax == "off_by_one":  # a logit of zero; as a tensor where its gradient is wanted
        heads = int(case.field("heads_q"))
        dsink = case["DSINK"]
        zeros = {"dtype": None if dsink is None else dsink.dtype, "device": device}
        sink = "off_by_one" if dsink is None else torch.zeros(heads, **zeros)
    varies_kv = case.form("kv") in ("ragged", "paged")
    return {
        "mask": masks[int(case.field("causal")), int(case.field("bottom_right"))],
        "window": (bound("window_left"), bound("window_right")),
        "bias": tensor("BIAS"),
        "bias_type": "pre_scale" if case.field("bias") == "pre_scale" else "post_scale",
        "alibi": slopes if alibi == "slopes" else alibi == "standard",
        "softcap": float(case.field("softcap")),
        "sink": sink,
        "dropout": float(case.field("dropout")),
        "rng_state": tensor("RNG_STATE"),
        "scale": float(case.field("scale")) if case.field("has_scale") == "1" else None,
        "cu_seqlens_q": tensor("CU_SEQLENS_Q"),
        "cu_seqlens_kv": tensor("CU_SEQLENS_KV"),
        "max_seqlen_q": case.max_q if case.form("q") == "ragged" else None,
        "max_seqlen_kv": case.max_kv if varies_kv else None,
        "offsets_q": tensor("OFFSETS_Q"),
        "offsets_kv": tensor("OFFSETS_KV"),
        "page_table": tables[0],
        "page_table_v": tables[1],
        "origin": torch.tensor(case.origin, device=device) if any(case.origin) else None,
        "deterministic": case.field("deterministic") == "1",
        "batch_invariant": case.field("batch_invariant") == "1",
        "max_ctas": int(case.field("max_ctas")) or None,
    }


def _write(case: Case, name: str, value: torch.Tensor) -> None:
    case[name].copy_(value)


def _write_forward(case: Case, formats: Formats, o, lse, largest) -> None:
    _write(case, "O", formats.order(o, "q"))
    for name, value in (("LSE", lse), ("MAX", largest)):
        if case[name] is not None:
            _write(case, name, value)
    if case["SUM_EXP"] is not None:
        seen = largest != -torch.inf
        sums = (lse.double() - largest.double()).exp()
        _write(case, "SUM_EXP", torch.where(seen, sums, 0))


def run(line: str, choice: int, large: bool, device: str = "cpu", engine: str = "") -> str:
    """The error of a case, or "". `choice` picks the formats and the way backward."""
    with Case(line) as case:
        case.fill(large)
        formats = Formats(case, choice)
        training = case.field("training") == "1"
        options = options_of(case, device)
        inputs = [
            formats.order(case[name].to(device), side).requires_grad_(training)
            for name, side in (("Q", "q"), ("K", "kv"), ("V", "kv"))
        ]
        for name, gradient in (("bias", "DBIAS"), ("sink", "DSINK")):
            if case[gradient] is not None and isinstance(options[name], torch.Tensor):
                inputs.append(options[name].requires_grad_())
        with torch.set_grad_enabled(training):
            o, lse, largest = tea.attention(
                *inputs[:3],
                format=formats.text,
                return_lse=True,
                return_max_logit=True,
                engine=engine,
                **options,
            )
        with torch.no_grad():
            _write_forward(case, formats, o, lse, largest)
        wrong = case.damage(backward=False)
        if training:
            _differentiate(case, formats, (o, lse, largest), inputs, options, choice)
            wrong += case.damage(backward=True)
        name = tea.explain(*inputs[:3], format=formats.text, engine=engine, **options)
        first = next(row for row in name.splitlines()[1:] if row.endswith("accepts"))
        return wrong + case.compare(engine or first.split(":")[0])


def _differentiate(case, formats, outputs, inputs, options, choice) -> None:
    dout = formats.order(case["DOUT"].to(inputs[0].device), "q")
    dlse = case["DLSE"]
    dlse = None if dlse is None else dlse.to(inputs[0].device)
    if choice % 2 and inputs[0].device.type == "cpu":
        small = _backward_in_place(case, formats, outputs, dout, dlse, inputs, options)
    else:
        kept = outputs[:2] if dlse is not None else outputs[:1]
        gradients = torch.autograd.grad(kept, inputs, [dout, dlse][: len(kept)])
        for name, side, value in zip(
            ("DQ", "DK", "DV"), ("q", "kv", "kv"), gradients[:3], strict=True
        ):
            _write(case, name, formats.order(value, side))
        small = list(gradients[3:])
    for name in ("DBIAS", "DSINK"):
        if case[name] is not None:
            _write(case, name, small.pop(0))


def _backward_in_place(case, formats, outputs, dout, dlse, inputs, options) -> list:
    """By the operator that writes into given memory: here packed and odd strides arrive."""
    arguments = functional.describe(*inputs[:3], format=formats.text, **options)
    out = [formats.order(case[n], s) for n, s in (("DQ", "q"), ("DK", "kv"), ("DV", "kv"))]
    o, lse, _ = outputs
    wanted = [case[name] is not None for name in ("DBIAS", "DSINK")]
    with torch.no_grad():
        small = OPS.backward_out.default(*out, dout, dlse, o, lse, *wanted, *arguments)
    return [value for value, wants in zip(small, wanted, strict=True) if wants]


FP8_FORWARD = ("Q_SCALE_INV", "K_SCALE_INV", "V_SCALE_INV", "S_SCALE", "S_SCALE_INV", "O_SCALE")
FP8_BACKWARD = (
    *FP8_FORWARD[:5],
    *("O_SCALE_INV", "DOUT_SCALE_INV", "DP_SCALE", "DP_SCALE_INV"),
    *("DQ_SCALE", "DK_SCALE", "DV_SCALE"),
)
TYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
TYPES |= {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def _write_amax(case: Case, name: str, *parts: torch.Tensor) -> None:
    """The largest of what the case holds and of what was seen."""
    if case[name] is not None:
        _write(case, name, torch.stack([case[name].flatten()[0], *(p.cpu() for p in parts)]).max())


def saturates(case: Case) -> bool:
    """Whether the scale of S is too large for the largest probability, which dropout enlarges."""
    scale = 1.0 if case["S_SCALE"] is None else case["S_SCALE"].item()
    largest = 448 if case.field("dtype") == "e4m3" else 57344
    keep = 1 - float(case.field("dropout")) if case.field("training") == "1" else 1
    return scale > largest * keep * 1.000001


def run_fp8(line: str, choice: int, large: bool, device: str = "cpu") -> str:
    """As run(), of FP8 tensors, by the operators that take their scales."""
    with Case(line) as case:
        case.fill(large)
        problem = " ".join(f"{name}={value}" for name, value in case.fields.items())
        said = core.explain(problem, -1 if device == "cpu" else 0)
        engine = next(row for row in said.splitlines() if row.endswith("accepts")).split(":")[0]

        def scales(names: tuple[str, ...]) -> list[torch.Tensor | None]:
            return [None if case[name] is None else case[name].to(device) for name in names]

        formats = Formats(case, choice)
        training = case.field("training") == "1"
        inputs = [
            formats.order(case[name].to(device), side)
            for name, side in (("Q", "q"), ("K", "kv"), ("V", "kv"))
        ]
        options = options_of(case, device)
        arguments = functional.describe(
            *inputs, format=formats.text, return_max_logit=True, **options
        )._replace(training=training)
        dtype = case.field("dtype")
        o_dtype = TYPES[case.field("o_dtype", dtype)]
        o, lse, largest, amax = OPS.fp8_forward(*scales(FP8_FORWARD), o_dtype, *arguments)
        _write_forward(case, formats, o, lse, largest)
        for name, value in zip(("S_AMAX", "O_AMAX"), amax, strict=True):
            _write_amax(case, name, value)
        wrong = case.damage(backward=False)
        if training:
            dout = formats.order(case["DOUT"].to(device), "q")
            dlse = None if case["DLSE"] is None else case["DLSE"].to(device)
            wanted = [case[name] is not None for name in ("DBIAS", "DSINK")]
            *gradients, dbias, dsink, amax = OPS.fp8_backward(
                *(dout, dlse, o, lse, *wanted, *scales(FP8_BACKWARD)),
                *(TYPES[case.field("dqkv_dtype", dtype)], *arguments),
            )
            for name, side, value in zip(
                ("DQ", "DK", "DV"), ("q", "kv", "kv"), gradients, strict=True
            ):
                _write(case, name, formats.order(value, side))
            for name, value in (("DBIAS", dbias), ("DSINK", dsink)):
                if case[name] is not None:
                    _write(case, name, value)
            _write_amax(case, "DP_AMAX", amax[0])
            if case["DK_AMAX"] is None:  # then that of dQ is of all three
                _write_amax(case, "DQ_AMAX", *amax[1:])
            else:
                for name, value in zip(("DQ_AMAX", "DK_AMAX", "DV_AMAX"), amax[1:], strict=True):
                    _write_amax(case, name, value)
            wrong += case.damage(backward=True)
        return wrong + case.compare(engine)
