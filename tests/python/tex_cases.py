"""Cases of the kit through transformer_engine_torch: every layout, mask, bias and softmax type."""

import random
from dataclasses import dataclass
from unittest.mock import patch

import torch

import transformer_engine_torch as tex
from kit import Case
from te_attention.torch._arguments import trimmed
from te_attention.torch._library import OPS
from transformer_engine_torch import fused_attn
from transformer_engine_torch.calls import BackwardCall, ForwardCall
from transformer_engine_torch.layouts import layout_of

LAYOUTS = tuple(tex.NVTE_QKV_Layout)
MASKS = tuple(tex.NVTE_Mask_Type)
BIASES = tuple(tex.NVTE_Bias_Type)
SOFTMAXES = tuple(tex.NVTE_Softmax_Type)
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PAGE_SIZES = (1, 16, 64, 256)


@dataclass
class Choice:
    """One call, in TransformerEngine's words."""

    layout: tex.NVTE_QKV_Layout
    mask: tex.NVTE_Mask_Type
    bias: tex.NVTE_Bias_Type = BIASES[0]
    softmax: tex.NVTE_Softmax_Type = SOFTMAXES[0]
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    dtype: str = "bf16"
    dropout: float = 0.0
    training: bool = True
    gaps: bool = False
    max_logit: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 32)
    lens_q: tuple[int, ...] = (5, 0, 17)
    lens_kv: tuple[int, ...] = (9, 3, 20)
    rows: tuple[int, int] = (19, 24)
    broadcast: str = ""
    page_size: int = 16
    deterministic: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        """Takes back what the layout rules out."""
        shape = layout_of(self.layout)
        ragged = "thd" in (shape.q, shape.kv)
        self.gaps = self.gaps and ragged
        self.training = self.training and not shape.paged
        self.dropout = self.dropout if self.training else 0.0
        if shape.shared == 3:
            self.heads = (self.heads[0],) * 2
            self.lens_kv, self.rows = self.lens_q, (self.rows[0],) * 2
        if shape.shared > 1:
            self.dims = (self.dims[0],) * 2

    @property
    def padding(self) -> bool:
        return fused_attn._MASKS[self.mask][1]

    def line(self) -> str:
        """The same call as a case of the kit."""
        shape = layout_of(self.layout)
        form_q = "ragged" if shape.q == "thd" else "padded" if self.padding else "dense"
        form_kv = "ragged" if shape.kv == "thd" else "padded" if self.padding else "dense"
        form_kv = "paged" if shape.paged else form_kv
        varies = {"ragged", "paged"}
        causal = "causal" in fused_attn._MASKS[self.mask][0]
        bottom_right = "right" in fused_attn._MASKS[self.mask][0] if causal else self.bottom_right
        words = {
            "dtype": self.dtype,
            "deterministic": int(self.deterministic),
            "training": int(self.training),
            "outputs": "lse+max" if self.max_logit else "lse",
            "q_form": form_q,
            "kv_form": form_kv,
            "gaps": int(self.gaps),
            "page_size": self.page_size if shape.paged else 0,
            "heads_q": self.heads[0],
            "heads_kv": self.heads[1],
            "dim_qk": self.dims[0],
            "dim_v": self.dims[1],
            "batch": 0 if {form_q, form_kv} & varies else len(self.lens_q),
            "seqlen_q": 0 if form_q in varies else self.rows[0],
            "seqlen_kv": 0 if form_kv in varies else self.rows[1],
            "causal": int(causal),
            "bottom_right": int(bottom_right),
            "window_left": self.window[0] + 1,
            "window_right": self.window[1] + 1,
            "bias": {1: "pre_scale", 2: "post_scale"}.get(self.bias, 0),
            "bias_broadcast": self.broadcast if self.bias in (1, 2) else 0,
            "alibi": "standard" if self.bias == 3 else 0,
            "softmax": {1: "off_by_one", 2: "learnable"}.get(self.softmax, 0),
            "dropout": self.dropout,
        }
        run = {
            "lens_q": "" if form_q == "dense" else ",".join(map(str, self.lens_q)),
            "lens_kv": "" if form_kv == "dense" else ",".join(map(str, self.lens_kv)),
            "gap": 2 if self.gaps else 0,
            "tail": 3 if "ragged" in (form_q, form_kv) else 0,
            "seed": self.seed,
            "spare_pages": int(shape.paged),
        }

        def text(table: dict) -> str:
            return " ".join(f"{name}={value}" for name, value in table.items() if value)

        return f"{text(words)} | {text(run)}"


def drawn(seed: int) -> Choice:
    """A random call."""
    pick = random.Random(seed)
    heads_kv = pick.choice([1, 2, 3])
    lens = [tuple(pick.choice([0, 1, 7, 16, 33, 70]) for _ in range(3)) for _ in range(2)]
    return Choice(
        layout=pick.choice(LAYOUTS),
        mask=pick.choice(MASKS),
        bias=pick.choice(BIASES),
        softmax=pick.choice(SOFTMAXES),
        window=pick.choice([(-1, -1), (-1, 0), (5, 0), (3, 4)]),
        bottom_right=pick.random() < 0.5,
        dtype=pick.choice(list(TORCH)),
        dropout=pick.choice([0.0, 0.0, 0.25]),
        training=pick.random() < 0.8,
        gaps=pick.random() < 0.5,
        max_logit=pick.random() < 0.3,
        heads=(heads_kv * pick.choice([1, 2, 4]), heads_kv),
        dims=(pick.choice([8, 64, 128, 160]), pick.choice([32, 64, 128])),
        lens_q=lens[0],
        lens_kv=lens[1],
        rows=(max(lens[0]) + pick.choice([0, 3]) or 1, max(lens[1]) + pick.choice([0, 5]) or 1),
        broadcast=pick.choice(["", "batch", "batch+head", "head"]),
        page_size=pick.choice(PAGE_SIZES),
        deterministic=pick.random() < 0.3,
        seed=seed + 1,
    )


def _ordered(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """Between the order of the kit and that of a format: its own inverse."""
    return tensor.transpose(0, 1) if form == "sbhd" else tensor


def _inputs(case: Case, choice: Choice, device: str) -> list[torch.Tensor]:
    """Q, K and V in buffers as the layout says, with the poison of the case around them."""
    layout = layout_of(choice.layout)
    q, k, v = (
        _ordered(case[name], form).contiguous().to(device)
        for name, form in (("Q", layout.q), ("K", layout.kv), ("V", layout.kv))
    )
    alone = [q, k, v][: 3 - layout.shared] if layout.shared > 1 else [q, k, v]
    if layout.shared == 1:
        return alone
    return [*alone, *torch.stack([q, k, v][3 - layout.shared :], layout.axis).unbind(layout.axis)]


class Call:
    """A choice on the memory of a case: forward, backward, and the comparison with the oracle."""

    def __init__(self, case: Case, choice: Choice, device: str) -> None:
        self.case, self.choice, self.device = case, choice, device
        self.q, self.k, self.v = _inputs(case, choice, device)
        self.cu = [self._integers(f"CU_SEQLENS_{s}", i) for i, s in enumerate(("Q", "KV"))]
        self.padded = [self.tensor("OFFSETS_Q"), self.tensor("OFFSETS_KV")]
        if choice.gaps:  # TransformerEngine uses both or none
            self.padded = [a if b is None else b for a, b in zip(self.cu, self.padded, strict=True)]
        self.bias = self.tensor("BIAS")
        sink = torch.zeros(choice.heads[0]) if choice.softmax == 1 else self.tensor("SINK")
        self.sink = None if sink is None else sink.reshape(1, -1, 1, 1).to(device)
        self.tables = [
            None if t is None else t.reshape(len(choice.lens_q), -1)
            for t in (self.tensor("TABLE_K"), self.tensor("TABLE_V"))
        ]
        if self.tables[1] is None:
            self.tables[1] = self.tables[0]

    def tensor(self, name: str) -> torch.Tensor | None:
        value = self.case[name]
        return None if value is None else value.clone().to(self.device)

    def _integers(self, name: str, side: int) -> torch.Tensor:
        value = self.tensor(name)  # dense: TransformerEngine has it all the same
        if value is not None:
            return value
        rows = self.choice.rows[side]
        return rows * torch.arange(len(self.choice.lens_q) + 1, dtype=torch.int32).to(self.device)

    @property
    def _common(self) -> tuple:
        c = self.choice
        return (c.layout, c.bias, c.mask, c.softmax, c.window, c.bottom_right)

    def forward_call(self) -> ForwardCall:
        c = self.choice
        scale = c.dims[0] ** -0.5
        return ForwardCall(
            *(self.case.max_q, self.case.max_kv, c.training, scale, c.dropout, True),
            *(*self._common, *self.cu, self.q, self.k, self.v, TORCH[c.dtype], *self.padded),
            *(*self.tables, None, None, self.bias, self.sink, None, 16, c.max_logit, False),
        )

    def backward_call(self, o: torch.Tensor, aux: list) -> BackwardCall:
        c = self.choice
        dtype = fused_attn.DType(
            next(k for k, v in fused_attn.TORCH_DTYPES.items() if v == TORCH[c.dtype])
        )
        dout = _ordered(self.case["DOUT"], layout_of(c.layout).q).contiguous().to(self.device)
        return BackwardCall(
            *(self.case.max_q, self.case.max_kv, c.dims[0] ** -0.5, c.dropout, True),
            *(*self._common, c.deterministic, *self.cu, self.q, self.k, self.v, o, dout),
            *(TORCH[c.dtype], dtype, aux, *self.padded, None, None, None, False),
        )

    def engine(self) -> str:
        call = self.forward_call()
        rng_state = torch.zeros(2, dtype=torch.int64, device=self.device)
        text = OPS.explain.default(
            *trimmed(
                fused_attn._arguments(
                    call, fused_attn._options(call), rng_state, self.bias, self.sink
                )._replace(deterministic=self.choice.deterministic)
            )
        )
        return next(r for r in text.splitlines()[1:] if r.endswith("accepts")).split(":")[0]


def run(choice: Choice, large: bool, device: str = "cpu") -> str:
    """The error of a call, or ""."""
    with Case(choice.line()) as case:
        case.fill(large)
        call = Call(case, choice, device)
        layout = layout_of(choice.layout)
        with patch.object(fused_attn, "new_rng_state", return_value=call.tensor("RNG_STATE")):
            o, lse, largest, rng_state, inputs = fused_attn.forward(call.forward_call())
        case["O"].copy_(_ordered(o, layout.q))
        case["LSE"].copy_(lse)
        if choice.max_logit:
            case["MAX"].copy_(largest)
        aux = [lse.unsqueeze(-1), rng_state, *inputs]
        wrong = case.damage(backward=False)
        if choice.training:
            gradients = tex.fused_attn_bwd(*call.backward_call(o, aux))
            wrong += _check_memory(call, layout, gradients)
            forms = (layout.q, layout.kv, layout.kv)
            for name, form, value in zip(("DQ", "DK", "DV"), forms, gradients[:3], strict=True):
                case[name].copy_(_ordered(value, form))
            for name, value in zip(("DBIAS", "DSINK"), gradients[3:], strict=True):
                if (case[name] is None) != (value is None):
                    wrong += f"{name} is {value}\n"
                elif value is not None:
                    case[name].copy_(value.reshape(case[name].shape))
            wrong += case.damage(backward=True)
        return wrong + case.compare(call.engine())


def _strides(tensor: torch.Tensor) -> list[int]:
    return [n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _check_memory(call: Call, layout, gradients: list) -> str:
    """dQ, dK and dV share memory, and have strides, as Q, K and V."""
    inputs = (call.q, call.k, call.v)
    same = [_strides(a) == _strides(b) for a, b in zip(gradients[:3], inputs, strict=True)]
    owners = len({t.untyped_storage().data_ptr() for t in gradients[:3]})
    if all(same) and owners == 4 - layout.shared:
        return ""
    return f"gradients in {owners} buffers with strides {[g.stride() for g in gradients[:3]]}\n"
