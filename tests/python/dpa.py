"""A case of the kit through DotProductAttention: any layout, any of the three backends."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

import te_attention.torch as tea
from cases import options_of
from kit import Case
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.constants import AttnMaskTypes, QKVLayouts

BACKENDS = ("FLASH", "FUSED", "UNFUSED")
LAYOUTS = QKVLayouts[:15]
MASKS = AttnMaskTypes[:6]
WINDOWS = (None, (3, 0), (3, 2))
BIASES = {  # of TransformerEngine: the words of the kit
    "none": ("no_bias", ""),
    "1hss": ("post_scale_bias", "bias=post_scale bias_broadcast=1"),
    "bhss": ("post_scale_bias", "bias=post_scale"),
    "11ss": ("post_scale_bias", "bias=post_scale bias_broadcast=3"),
    "pre": ("pre_scale_bias", "bias=pre_scale bias_broadcast=1"),
    "alibi": ("alibi", "alibi=standard"),
    "slopes": ("alibi", "alibi=slopes"),
}
SOFTMAXES = {"vanilla": "", "off-by-one": "softmax=off_by_one", "learnable": "softmax=learnable"}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Of Unfused, which rounds scores and probabilities; relative to the largest element.
TOLERANCES = {"fp16": 6e-3, "bf16": 4e-2, "fp32": 1e-5}
GRADIENTS = ("DQ", "DK", "DV", "DBIAS", "DSINK")


class Config(NamedTuple):
    """The parameters of a test."""

    layout: str
    mask: str
    window: tuple[int, int] | None
    bias: str
    softmax: str
    dtype: str
    gaps: bool
    top_left: bool
    cross: bool
    dims: tuple[int, int]
    groups: int
    dbias: bool

    @property
    def form(self) -> str:
        return "".join(c for c in self.layout.split("_")[0] if c.isalpha())

    def is_valid(self) -> bool:
        ragged, padding = self.form == "thd", "padding" in self.mask
        shared = 3 if "3" in self.layout else 2 if "2" in self.layout else 1
        alike = self.groups == 4 and not self.cross if shared == 3 else True
        return (
            (padding or not ragged)
            and (ragged or not self.gaps)
            and (shared == 1 or self.dims[0] == self.dims[1])
            and alike
            and not (self.top_left and "causal" in self.mask)
            and not (self.window and self.window[1] and "causal" in self.mask)
            and not (self.window and not self.window[1] and "causal" not in self.mask)
        )

    def wants_dbias(self) -> bool:
        """The kit leaves out both small gradients or none."""
        return self.dbias or self.softmax != "vanilla"

    def line(self) -> str:
        """The same for the kit."""
        form = "ragged" if self.form == "thd" else "padded" if "padding" in self.mask else "dense"
        rows = (23, 40) if self.cross else (32, 32)
        words = [f"dtype={self.dtype} training=1 heads_q=4 heads_kv={self.groups}"]
        words += [f"dim_qk={self.dims[0]} dim_v={self.dims[1]}"]
        words += [BIASES[self.bias][1], SOFTMAXES[self.softmax]]
        if "causal" in self.mask:
            words.append("causal=1")
        if "bottom_right" in self.mask or ("causal" not in self.mask and not self.top_left):
            words.append("bottom_right=1")
        for name, bound in zip(("left", "right"), self.window or (), strict=False):
            words.append(f"window_{name}={bound + 1}")
        run = ["seed=7"]
        if not self.wants_dbias():
            run.append("omit_optional=1")
        if form != "dense":
            words.append(f"q_form={form} kv_form={form}")
            run += [f"lens_q=5,0,{rows[0]} lens_kv={'9,3' if self.cross else '5,0'},{rows[1]}"]
        if form == "ragged":
            run += [f"max_q={rows[0]} max_kv={rows[1]}"]
            run += ["gap=2 tail=3"] if self.gaps else []
            words += ["gaps=1"] if self.gaps else []
        else:
            words.append(f"batch={2 if form == 'dense' else 3}")
            words.append(f"seqlen_q={rows[0]} seqlen_kv={rows[1]}")
        return " ".join(words) + " | " + " ".join(run)


def drawn(count: int, seed: int, dtypes: tuple[str, ...]) -> list[Config]:
    """Valid configurations, no two alike, each layout, mask and bias about equally often."""
    random_ = random.Random(seed)
    found: dict[Config, None] = {}
    pick = random_.choice
    while len(found) < count:
        n = len(found)
        layout = LAYOUTS[n % 15]
        config = Config(
            layout=layout,
            mask=MASKS[n // 15 % 6] if layout[0] != "t" else pick([m for m in MASKS if "pad" in m]),
            window=pick(WINDOWS),
            bias=(*BIASES, "none", "none", "none")[(n + 2 * (n // 15)) % 10],
            softmax=pick((*SOFTMAXES, "vanilla", "vanilla", "vanilla")),
            dtype=pick(dtypes),
            gaps=layout[0] == "t" and pick((True, False)),
            top_left=pick((True, False, False)),
            cross=pick((True, False)),
            dims=pick(((32, 32), (64, 64), (16, 32), (64, 16))),
            groups=pick((1, 2, 4)),
            dbias=pick((True, False)),
        )
        if config.is_valid():
            found[config] = None
    return list(found)


@contextmanager
def only(*backends: str) -> Iterator[None]:
    """Switches all other backends off."""
    names = {b: f"NVTE_{b}_ATTN" for b in BACKENDS}
    before = {name: os.environ.get(name) for name in names.values()}
    os.environ.update({name: str(int(b in backends)) for b, name in names.items()})
    _attention_backends["backend_selection_requires_update"] = True
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _attention_backends["backend_selection_requires_update"] = True


def laid_out(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Leaves with gradients that lie as the layout says; inputs are [b, s, h, d] or [t, h, d]."""
    moved = [t.transpose(0, 1) if layout[0] == "s" else t for t in (q, k, v)]
    parts = layout.split("_")
    count = 4 - len(parts)
    views = [t.clone(memory_format=torch.contiguous_format) for t in moved[: 3 - count]]
    if count == 1:
        views = [t.clone(memory_format=torch.contiguous_format) for t in moved]
    else:
        axis = parts[-1].index(str(count)) - len(parts[-1])
        views += torch.stack(moved[3 - count :], dim=axis).unbind(axis)
    return [t.detach().requires_grad_() for t in views]


class Outcome:
    """One case in memory, and what each way of computing it gave."""

    def __init__(self, config: Config, case: Case, device: str) -> None:
        self.config, self.case, self.device = config, case, device
        case.fill(False)
        self.options = options_of(case, device)
        self.rows = {name: case[name].to(device) for name in ("Q", "K", "V", "DOUT")}
        self.options.pop("rng_state")

    def reference(self) -> tuple[dict[str, torch.Tensor], str]:
        """Of attention(), and what the oracle finds wrong with it."""
        form = "thd" if self.config.form == "thd" else "bshd"
        inputs = [self.rows[name].clone().requires_grad_() for name in ("Q", "K", "V")]
        options = dict(self.options, format=form)
        small = [
            options[option].requires_grad_()
            for option, name in (("bias", "DBIAS"), ("sink", "DSINK"))
            if self.case[name] is not None
        ]
        o, self.lse = tea.attention(*inputs, return_lse=True, **options)
        gradients = torch.autograd.grad(o, inputs + small, self.rows["DOUT"])
        names = [n for n in GRADIENTS if n in ("DQ", "DK", "DV") or self.case[n] is not None]
        found = dict(zip(names, gradients, strict=True)) | {"O": o.detach()}
        text = tea.explain(*inputs, **options).splitlines()[1:]
        self.engine = next(row for row in text if row.endswith("accepts")).split(":")[0]
        return found, self.wrong(found)

    def wrong(self, found: dict[str, torch.Tensor]) -> str:
        """The results of the oracle."""
        for name, value in (found | {"LSE": self.lse}).items():
            self.case[name].copy_(value.detach())
        for name in GRADIENTS:  # TransformerEngine knows no gradient of an offset that is zero
            if name not in found and self.case[name] is not None:
                return f"no {name}"
        return self.case.compare(self.engine)

    def module(self) -> DotProductAttention:
        config, options = self.config, self.options
        out = DotProductAttention(
            4,
            config.dims,
            config.groups,
            qkv_format=config.form,
            attn_mask_type=config.mask,
            window_size=config.window,
            bottom_right_diagonal=False if config.top_left else None,
            attention_type="cross" if config.cross else "self",
            softmax_type=config.softmax,
        ).to(self.device)
        if config.softmax != "vanilla" and isinstance(options["sink"], torch.Tensor):
            out.softmax_offset = torch.nn.Parameter(options["sink"].detach().clone())
        return out

    def by_module(self, **extra: object) -> dict[str, torch.Tensor]:
        """Of DotProductAttention, on whatever backends are on."""
        config, options = self.config, self.options
        q, k, v = laid_out(config.layout, *(self.rows[name] for name in ("Q", "K", "V")))
        module = self.module()
        given = {
            "cu_seqlens_q": options["cu_seqlens_q"],
            "cu_seqlens_kv": options["cu_seqlens_kv"],
            "max_seqlen_q": options["max_seqlen_q"],
            "max_seqlen_kv": options["max_seqlen_kv"],
            "cu_seqlens_q_padded": options["offsets_q"],
            "cu_seqlens_kv_padded": options["offsets_kv"],
            "core_attention_bias_type": BIASES[config.bias][0],
        }
        inputs = {"DQ": q, "DK": k, "DV": v}
        if config.bias == "slopes":
            given["alibi_slopes"] = options["alibi"]
        if options["bias"] is not None:
            inputs["DBIAS"] = options["bias"].detach().clone().requires_grad_(config.wants_dbias())
            given["core_attention_bias"] = inputs["DBIAS"]
        if config.softmax != "vanilla":
            inputs["DSINK"] = module.softmax_offset
        o = module(q, k, v, **(given | extra)).unflatten(-1, (4, config.dims[1]))
        dout = self.rows["DOUT"]
        if config.form == "sbhd":
            dout = dout.transpose(0, 1)
        wanted = [t for t in inputs.values() if t.requires_grad]
        names = [name for name, t in inputs.items() if t.requires_grad]
        found = dict(zip(names, torch.autograd.grad(o, wanted, dout), strict=True)) | {"O": o}
        if config.form == "sbhd":
            rows = ("O", "DQ", "DK", "DV")
            found = {n: t.transpose(0, 1) if n in rows else t for n, t in found.items()}
        return {name: t.detach() for name, t in found.items()}


def far(config: Config, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    """The outputs that are further apart than rounding explains."""
    out = []
    for name, value in got.items():
        steep = 3 if name == "DSINK" else 1  # a sum over all rows, most of which cancels
        a, b = value.double(), want[name].double()
        most = max(float(b.abs().max()) if b.numel() else 0.0, 1e-3)
        worst = float((a - b).abs().max()) / most if a.numel() else 0.0
        if not worst <= steep * TOLERANCES[config.dtype]:
            out.append(f"{name} is off by {worst:.2e} of its largest element")
    return out


def check(config: Config, device: str) -> list[str]:
    """Runs a configuration on every backend that takes it; returns which, or what is wrong."""
    ran, problems = [], []
    with Case(config.line()) as case:
        outcome = Outcome(config, case, device)
        want, wrong = outcome.reference()
        problems += [f"attention(): {wrong}"] if wrong else []
        for backend in BACKENDS:
            with only(backend):
                try:
                    got = outcome.by_module()
                except ValueError as error:
                    assert "the backend is none" in str(error), error
                    continue
            ran.append(backend)
            if backend != "UNFUSED":
                wrong = outcome.wrong(got)
                problems += [f"{backend}: {wrong}"] if wrong else []
            else:
                problems += [f"{backend}: {text}" for text in far(config, got, want)]
    assert not problems, "\n".join([str(config), config.line(), *problems])
    return ran
