"""TransformerEngine's context-parallel cases in bf16, rebuilt.

Every rank computes the whole problem alone, then its share with a context-parallel group, and
compares O, dQ, dK and dV of its rows, and the gradient of the sink and the largest score whole.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

import transformer_engine_torch as tex
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

ROWS = 4096
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class Config:
    """A problem: two sequences of ROWS."""

    heads: int = 12
    groups: int = 12
    dim: int = 128
    dim_v: int = 128
    causal: bool = True
    window: bool = False  # of an eighth of the rows
    bias: bool = False
    sink: bool = False
    max_logit: bool = False


FLASH = {
    "cp_1_0": Config(),
    "cp_1_2": Config(window=True),
    "cp_2_1": Config(groups=2, causal=False),
}
FUSED = {
    "cp_1_0": Config(max_logit=True),
    "cp_1_1": Config(causal=False, max_logit=True),
    "cp_1_4": Config(window=True),
    "cp_2_0": Config(groups=2),
    "cp_2_2": Config(groups=2, bias=True),
    "cp_2_4": Config(groups=2, window=True),
    "cp_3_2": Config(dim_v=64, bias=True),
    "cp_4_2": Config(heads=64, groups=8, dim=64, dim_v=64, sink=True),
}


@dataclass(frozen=True)
class Case:
    """A configuration, by which backend, in which format and with which cp_comm_type."""

    backend: str
    name: str
    form: str
    comm_type: str

    @property
    def config(self) -> Config:
        """Of the name."""
        return (FLASH if self.backend == "flash" else FUSED)[self.name]

    @property
    def world(self) -> int:
        """The ranks with which TransformerEngine tests it."""
        return 4 if self.comm_type == "a2a+p2p" else 2

    def __str__(self) -> str:
        return f"{self.backend} {self.name} {self.form} {self.comm_type}"


def _is_run(case: Case) -> bool:
    """Whether TransformerEngine runs it, and does not skip it."""
    c, comm = case.config, case.comm_type
    if case.form == "thd" and (comm in ("all_gather", "a2a+p2p") or c.bias):
        return False
    if c.window and comm in ("p2p", "a2a+p2p"):
        return False
    if c.bias and comm != "p2p":
        return False
    return not c.sink or comm == "a2a"


CASES = [
    case
    for backend, configs in (("flash", FLASH), ("fused", FUSED))
    for name in configs
    for form in ("sbhd", "thd")
    for comm in COMM_TYPES
    if _is_run(case := Case(backend, name, form, comm))
]


class _Problem:
    """The tensors of all rows, the same on every rank."""

    def __init__(self, case: Case, world: int, device: torch.device, rows: int) -> None:
        self.case, self.world, self.device, self.rows = case, world, device, rows
        c, generator = case.config, torch.Generator().manual_seed(1234)
        self.thd = case.form == "thd"
        if self.thd:
            lengths = torch.randint(0, rows + 1, (2,), generator=generator)
            padded = (lengths + 2 * world - 1) // (2 * world) * (2 * world)
            self.starts = _prefix(padded).to(device)
            # Flash has no padding: its pads are tokens.
            self.cu = self.starts if case.backend == "flash" else _prefix(lengths).to(device)
        leading = (int(padded.sum()),) if self.thd else (rows, 2)

        def tensor(heads: int, dim: int) -> Tensor:
            x = torch.randn(*leading, heads, dim, generator=generator).clamp(-1, 1)
            return x.to(device, torch.bfloat16)

        self.q, self.k = tensor(c.heads, c.dim), tensor(c.groups, c.dim)
        self.v, self.dout = tensor(c.groups, c.dim_v), tensor(c.heads, c.dim_v).flatten(-2)
        self.bias = None
        if c.bias:
            bias = torch.randn(1, 1, rows, rows, generator=generator)
            self.bias = bias.to(device, torch.bfloat16)

    def share(self, tensor: Tensor, rank: int, axis: int = 0) -> Tensor:
        """The rows of a rank."""
        if self.thd:
            index = tex.thd_get_partitioned_indices(
                self.starts, tensor.shape[axis], self.world, rank
            )
            return tensor.index_select(axis, index)
        chunks = tensor.chunk(2 * self.world, axis)
        return torch.cat([chunks[rank], chunks[2 * self.world - 1 - rank]], axis)

    def padding(self) -> Tensor:
        """Which of all tokens are padding."""
        place = torch.arange(int(self.starts[-1]), device=self.device)
        sequence = torch.searchsorted(self.starts[1:], place, right=True)
        return place - self.starts[sequence] >= self.cu.diff()[sequence]

    def options(self) -> dict[str, object]:
        """Of DotProductAttention.forward(), but for the bias."""
        if not self.thd:
            return {}
        words = {"cu_seqlens_q": self.cu, "cu_seqlens_kv": self.cu}
        words |= {"max_seqlen_q": self.rows, "max_seqlen_kv": self.rows}
        if self.case.backend == "flash":
            return words
        return words | {"cu_seqlens_q_padded": self.starts, "cu_seqlens_kv_padded": self.starts}


def _prefix(lengths: Tensor) -> Tensor:
    out = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)
    out[1:] = lengths.cumsum(0)
    return out


def _module(case: Case, rows: int, device: torch.device) -> DotProductAttention:
    c = case.config
    mask = "causal" if c.causal else "no_mask"
    if case.form == "thd":
        mask = "padding_causal" if c.causal else "padding"
    module = DotProductAttention(
        c.heads,
        (c.dim, c.dim_v),
        num_gqa_groups=c.groups,
        qkv_format=case.form,
        attn_mask_type=mask,
        window_size=(rows // 8, 0) if c.window else None,
        softmax_type="learnable" if c.sink else "vanilla",
        return_max_logit=c.max_logit,
    ).to(device)
    if c.sink:
        with torch.no_grad():
            torch.manual_seed(5)
            module.softmax_offset.copy_(torch.randn(c.heads))
    return module


def _run(module, tensors: list[Tensor], bias: Tensor | None, dout: Tensor, options) -> dict:
    """Results and gradients by name."""
    q, k, v = (t.detach().clone().requires_grad_() for t in tensors)
    words = {} if bias is None else {
        "core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias
    }  # fmt: skip
    out = module(q, k, v, **options, **words)
    found = {}
    if isinstance(out, tuple):
        out, found["max_logit"] = out
    if module.softmax_offset is not None:
        module.softmax_offset.grad = None
    out.backward(dout)
    if module.softmax_offset is not None:
        found["d_softmax_offset"] = module.softmax_offset.grad
    return found | {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _switch(backend: str) -> None:
    for name in ("flash", "fused"):
        os.environ[f"NVTE_{name.upper()}_ATTN"] = str(int(name == backend))
    _attention_backends["backend_selection_requires_update"] = True


def check(
    case: Case, rank: int, group: object, device: torch.device | str = "cpu", rows: int = ROWS
) -> str:
    """The errors of this rank, or ""; group: of case.world ranks, or a list of two."""
    device = torch.device(device)
    _switch(case.backend)
    problem, module = _Problem(case, case.world, device, rows), _module(case, rows, device)
    tensors = [problem.q, problem.k, problem.v]
    wanted = _run(module, tensors, problem.bias, problem.dout, problem.options())
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    module.set_context_parallel_group(group, list(range(case.world)), stream, case.comm_type)
    bias = None if problem.bias is None else problem.share(problem.bias, rank, 2)
    shares = [problem.share(t, rank) for t in tensors]
    dout = problem.share(problem.dout, rank)
    got = _run(module, shares, bias, dout, problem.options())
    tolerance = 3.5e-2 if case.config.groups < case.config.heads else 2.5e-2
    wrong = []
    for name, one in got.items():
        whole = wanted[name]
        exact = whole if name in ("max_logit", "d_softmax_offset") else problem.share(whole, rank)
        try:
            torch.testing.assert_close(one, exact, atol=tolerance, rtol=tolerance)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        if problem.thd and exact is not whole and case.backend == "fused":
            padding = problem.share(problem.padding(), rank)
            if one[padding].any():
                wrong.append(f"{name} is not zero in padding")
    return "\n".join(wrong)
