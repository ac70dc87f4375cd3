#!/usr/bin/env python3
"""Times the GPU engines on FP8 attention: delayed scaling, and current scaling with bf16 results.

usage: gpu_fp8.py --library build/libte_attention.so [--output FILE.jsonl]
PyTorch's cuDNN back end knows no FP8: the peer is cuDNN through our engine `cudnn`. Contenders take
turns on the same tensors in one process; results that differ from those of the same numbers in bf16
by more than FP8 explains are not timed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu_vs_torch import Bench, Cell, Task, command_line, difference, machine, write
from library import Attention, Library
from torch.nn.functional import scaled_dot_product_attention

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {"S_SCALE": 256.0, "S_SCALE_INV": 1 / 256, "DP_SCALE": 2048.0, "DP_SCALE_INV": 1 / 2048}


@dataclass(frozen=True)
class Layer:
    """One attention layer."""

    name: str
    heads: int
    heads_kv: int
    dim: int
    batch: int
    rows: int
    causal: bool
    current: bool = False  # scaling: results of bf16


LAYERS = (
    *(
        Layer("mha d128", 16, 16, 128, 16384 // rows, rows, causal)
        for rows in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ),
    Layer("llama-3 64/8 d128", 64, 8, 128, 4, 2048, causal=True),
    Layer("llama-3 64/8 d128", 64, 8, 128, 1, 8192, causal=True),
    Layer("mha d64", 32, 32, 64, 4, 4096, causal=True),
    Layer("mha d256", 8, 8, 256, 4, 4096, causal=True),
    Layer("mha d128 current scaling", 16, 16, 128, 4, 4096, causal=True, current=True),
)


class Fp8Cell(Cell):
    """A layer and its tensors."""

    suite = "fp8"

    def __init__(self, layer: Layer) -> None:
        """Allocates; nothing is planned yet."""
        self.layer, self.causal, self.dim = layer, layer.causal, layer.dim
        self.batch, self.heads, self.rows = layer.batch, layer.heads, layer.rows
        results, gradients = (torch.bfloat16,) * 2 if layer.current else (E4M3, E5M2)

        def make(heads: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (layer.batch, layer.rows, heads, layer.dim)
            return torch.randn(shape, device="cuda").to(dtype).transpose(1, 2)

        self.tensors = {"Q": make(layer.heads, E4M3), "DOUT": make(layer.heads, E5M2)}
        self.tensors |= {"O": make(layer.heads, results), "DQ": make(layer.heads, gradients)}
        for name in ("K", "V"):
            self.tensors[name] = make(layer.heads_kv, E4M3)
            self.tensors[f"D{name}"] = make(layer.heads_kv, gradients)
        self.tensors["LSE"] = torch.empty(layer.batch, layer.heads, layer.rows, device="cuda")
        ones = ("Q", "K", "V", "DOUT") if layer.current else ("Q", "K", "V", "O", "DOUT")
        scales = SCALES | {f"{name}_SCALE_INV": 1.0 for name in ones}
        if not layer.current:
            scales |= {f"{name}_SCALE": 1.0 for name in ("DQ", "DK", "DV")}
            scales |= {"O_SCALE": 16.0, "O_SCALE_INV": 1 / 16}
        scales |= {f"{name}_AMAX": 0.0 for name in ("S", "O", "DP", "DQ", "DK", "DV")}
        self.tensors |= {k: torch.tensor([v], device="cuda") for k, v in scales.items()}
        mask = "causal" if layer.causal else "full"
        self.what = f"{layer.name} b={layer.batch} s={layer.rows} {mask}"

    def ours(self, library: Library, engine: str) -> dict[str, Task]:
        """Our two passes by an engine's name, or only one where it is not for training."""
        types = "dout_dtype=e5m2 dqkv_dtype=" + ("bf16" if self.layer.current else "e5m2")
        options = f"causal={int(self.causal)}" + (" o_dtype=bf16" if self.layer.current else "")
        forward = {k: v for k, v in self.tensors.items() if k[0] != "D" and k != "O_SCALE_INV"}
        ahead = Attention(library, f"outputs=lse {options}", forward, engine)
        passes = {"forward": ahead.forward}
        try:
            both = Attention(library, f"training=1 {options} {types}", self.tensors, engine)
        except RuntimeError as error:
            print(f"{self.what:<28} {engine}: {error}", flush=True)
            return passes
        return passes | {"backward": both.backward}

    def wanted(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """The result for the same numbers in bf16."""
        inputs = [self.tensors[n].to(torch.bfloat16).requires_grad_() for n in ("Q", "K", "V")]
        out = scaled_dot_product_attention(
            *inputs, is_causal=self.causal, enable_gqa=self.layer.heads != self.layer.heads_kv
        )
        out.backward(self.tensors["DOUT"].to(torch.bfloat16))
        return {"forward": (out.detach(),), "backward": tuple(x.grad for x in inputs)}


class Fp8(Bench):
    """The suite over its layers."""

    tolerance = 0.12  # what casting P, dS and the results to FP8 comes to

    def compare(
        self, cell: Cell, found: dict[str, dict[str, Task]]
    ) -> dict[tuple[str, str], float]:
        """How far results are from those of bf16, by (name, pass); too far counts as wrong."""
        want = cell.wanted()
        differs = {}
        for name, passes in found.items():
            for part, task in passes.items():
                task()
                mine = ("O",) if part == "forward" else ("DQ", "DK", "DV")
                pairs = zip(mine, want[part], strict=True)
                # O is stored times its scale, the gradients as they are.
                scale = cell.tensors.get("O_SCALE_INV", 1) if part == "forward" else 1
                apart = [difference(cell.tensors[n].float() * scale, w) for n, w in pairs]
                differs[name, part] = max(math.inf if math.isnan(x) else x for x in apart)
        return differs

    def layers(self) -> Iterator[dict]:
        """Every layer."""
        for layer in LAYERS:
            yield from self.cell(Fp8Cell(layer))
            torch.cuda.empty_cache()


def main() -> None:
    """Runs the suite."""
    arguments = command_line(__doc__, ["portable", "cudnn"], []).parse_args()
    arguments.sustained = False
    torch.manual_seed(20240711)
    write(arguments.output, {**machine(), "program": "bench/gpu_fp8.py"}, Fp8(arguments).layers())


if __name__ == "__main__":
    main()
