#!/usr/bin/env python3
"""Times the GPU engines, and PyTorch's cuDNN where it can, on the attention of known models.

usage: gpu_models.py --library build/libte_attention.so [--output FILE.jsonl]
As gpu_vs_torch.py does: contenders take turns on the same tensors in one process, and outputs that
differ from a peer's are not timed. A peer is PyTorch's back end, or our engine `cudnn` where
PyTorch has no words for the problem (windows, pages).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu_vs_torch import PEERS, Bench, Cell, Task, command_line, machine, write
from library import Attention, Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Model:
    """One attention layer: heads, head dimensions, sizes, mask."""

    name: str
    heads: int
    heads_kv: int
    dim: int
    batch: int
    rows: int
    keys: int = 0  # 0: as many as rows
    dim_v: int = 0  # 0: dim
    causal: bool = True
    window: int = 0  # keys that a row sees, itself among them; 0: all
    page: int = 0  # slots of a page of keys; 0: no pages
    training: bool = True


MODELS = (
    Model("llama-3 64/8 d128", 64, 8, 128, 4, 2048),
    *(Model("llama-3 64/8 d128", 64, 8, 128, 1, rows) for rows in (2048, 4096, 8192, 16384)),
    *(
        Model("deepseek 128 d192/128", 128, 128, 192, 1, rows, dim_v=128)
        for rows in (2048, 4096, 8192)
    ),
    Model("gpt-oss 64/8 d64 window 128", 64, 8, 64, 2, 4096, window=128),
    Model("gpt-oss 64/8 d64", 64, 8, 64, 2, 4096),
    Model("bert 16 d64", 16, 16, 64, 32, 512, causal=False),
    Model("decode 64/8 d128", 64, 8, 128, 32, 1, keys=8192, causal=False, training=False),
    Model("decode 64/8 d128 paged", 64, 8, 128, 32, 1, 8192, causal=False, page=64, training=False),
)


class ModelCell(Cell):
    """A model's layer and its tensors."""

    suite = "models"

    def __init__(self, model: Model) -> None:
        """Allocates; nothing is planned yet."""
        self.model, self.causal = model, model.causal
        self.keys, self.dim_v = model.keys or model.rows, model.dim_v or model.dim

        def make(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

        b, h, g, d = model.batch, model.heads, model.heads_kv, model.dim
        places, slots = (b * self.keys // model.page, model.page) if model.page else (b, self.keys)
        self.tensors = {"Q": make(b, model.rows, h, d), "K": make(places, slots, g, d)}
        self.tensors["V"] = make(places, slots, g, self.dim_v)
        self.tensors["O"] = torch.empty_like(make(b, model.rows, h, self.dim_v))
        if model.training:
            self.tensors["DOUT"] = make(b, model.rows, h, self.dim_v)
            self.tensors["LSE"] = torch.empty(b, h, model.rows, device="cuda")
            for name in ("Q", "K", "V"):
                self.tensors[f"D{name}"] = torch.empty_like(self.tensors[name])
        if model.page:
            table = torch.randperm(places, device="cuda", dtype=torch.int32)
            self.tensors["TABLE_K"] = table.reshape(b, -1)
            lengths = torch.arange(b + 1, device="cuda", dtype=torch.int32) * self.keys
            self.tensors["CU_SEQLENS_KV"] = lengths
        self.what = f"{model.name} b={b} s={model.rows}" + (f"/{self.keys}" if model.keys else "")

    def flop(self, part: str) -> float:
        """Operations of a pass over the pairs that the mask allows."""
        m = self.model
        pairs = float(m.rows * self.keys)
        if m.window:
            pairs = m.rows * m.window - m.window * (m.window - 1) / 2
        elif m.causal:
            pairs /= 2
        each = m.dim + self.dim_v if part == "forward" else 3 * m.dim + 2 * self.dim_v
        return 2 * m.batch * m.heads * pairs * each

    def ours(self, library: Library, engine: str) -> dict[str, Task]:
        """Our passes by an engine's name."""
        m = self.model
        options = f"training={int(m.training)} causal={int(m.causal)} dim_v={self.dim_v}"
        options += f" window_left={m.window}" if m.window else ""
        plan = Attention(library, options, self.tensors, engine, self.keys if m.page else 0)
        passes = {"forward": plan.forward}
        return passes | ({"backward": plan.backward} if m.training else {})

    def theirs(self, backend: SDPBackend) -> dict[str, Task]:
        """PyTorch's passes by a backend."""
        m = self.model
        if m.window or m.page:
            raise RuntimeError("PyTorch has no such argument")
        inputs = [self.tensors[n].detach().requires_grad_(m.training) for n in ("Q", "K", "V")]

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    *inputs, is_causal=m.causal, enable_gqa=m.heads != m.heads_kv
                )

        def forward() -> torch.Tensor:
            with torch.set_grad_enabled(m.training):  # with a gradient it writes LSE, as ours do
                return run()

        if not m.training:
            forward()
            return {"forward": forward}
        out = run()

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, inputs, self.tensors["DOUT"], retain_graph=True)

        backward()
        return {"forward": forward, "backward": backward}


class Models(Bench):
    """The suite over its cells."""

    def compare(
        self, cell: Cell, found: dict[str, dict[str, Task]]
    ) -> dict[tuple[str, str], float]:
        """As for MHA; where PyTorch has no words for it, our own engine of cuDNN is the peer."""
        if any(name in PEERS for name in found):
            return self.compare_parts(cell, found)
        judge = found.get("our-cudnn", {})
        differs = {}
        for name, passes in found.items():
            for part, task in passes.items():
                names = ("O",) if part == "forward" else ("DQ", "DK", "DV")
                if part not in judge:
                    differs[name, part] = math.inf
                    continue
                judge[part]()
                want = [cell.tensors[n].clone() for n in names]
                task()
                differs[name, part] = apart(cell, names, want)
        return differs

    def compare_parts(
        self, cell: Cell, found: dict[str, dict[str, Task]]
    ) -> dict[tuple[str, str], float]:
        """Against PyTorch's, whose passes return their results."""
        peer = next(found[name] for name in PEERS if name in found)
        differs = {}
        for name, passes in found.items():
            if name in PEERS:
                continue
            for part, task in passes.items():
                names = ("O",) if part == "forward" else ("DQ", "DK", "DV")
                want = peer[part]()
                task()
                differs[name, part] = apart(cell, names, [want] if part == "forward" else want)
        return differs

    def models(self) -> Iterator[dict]:
        """Every layer."""
        for model in MODELS:
            yield from self.cell(ModelCell(model))
            torch.cuda.empty_cache()


def apart(cell: Cell, names: tuple[str, ...], want: list[torch.Tensor]) -> float:
    """The largest |ours - theirs| / |theirs|; a NaN is as far away as anything can be."""
    ratios = []
    for name, other in zip(names, want, strict=True):
        ours, theirs = cell.tensors[name].float(), other.float()
        ratios.append(float((ours - theirs).norm() / theirs.norm()))
    return max(math.inf if math.isnan(x) else x for x in ratios)


def main() -> None:
    """Runs the suite."""
    parser = command_line(__doc__, ["hopper", "portable", "cudnn"], ["cudnn"])
    arguments = parser.parse_args()
    arguments.sustained = False
    torch.manual_seed(20240711)
    named = {**machine(), "program": "bench/gpu_models.py"}
    write(arguments.output, named, Models(arguments).models())


if __name__ == "__main__":
    main()
