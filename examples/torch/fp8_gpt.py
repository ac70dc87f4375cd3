"""A small GPT whose attention trains in bf16, and in FP8 with delayed and with current scaling.

usage: fp8_gpt.py [--device cuda] [--steps 300] [--text FILE] [--output FILE.jsonl]

The three models begin with the same weights and see the same batches. For both FP8 recipes the
program prints what explain() says of the problem, and how many of the passes ran in FP8. The mean
loss of the last tenth of the steps must be within 1 % of that in bf16, and the losses must not be
bitwise equal to those in bf16.
"""

import argparse
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
from gpt import DIM, GPT, HEADS, LAYERS, TEXT, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from te_attention.torch import Fp8, explain
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import DotProductAttention, autocast

RECIPES = {
    "bf16": None,
    "delayed": DelayedScaling(fp8_dpa=True, amax_history_len=16),
    "current": Float8CurrentScaling(fp8_dpa=True),
}
PASSES = ("forward", "forward_minimal", "inference", "backward", "backward_minimal")
IN_FP8 = ("fp8_attention_forward_minimal", "fp8_attention_backward_minimal")
BAR = 0.01


class Watch(TorchDispatchMode):
    """Counts the passes of attention, and asks explain() about every FP8 problem."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()
        self.passes: Counter = Counter()
        self.problems: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operator."""
        space, _, name = func._schema.name.partition("::")
        name = name.removesuffix("_out") if name not in IN_FP8 else name
        if space == "te_attention" and name in (*PASSES, *IN_FP8):
            self.passes[name] += 1
        if space == "te_attention" and name == IN_FP8[0]:
            place_of_o, dtype, _, _, *qkv, form, mask = args[6:15]
            dtype = getattr(torch, dtype)
            fp8 = Fp8(o_dtype=qkv[0].dtype if place_of_o < 0 else dtype)
            codes = [torch.empty_like(t, dtype=dtype) for t in qkv]
            text = explain(*codes, format=form, mask=None if mask == "none" else mask, fp8=fp8)
            problem, *engines = text.splitlines()
            engine = next(line for line in engines if line.endswith("accepts"))
            self.problems[f"{problem}\n  {engine}"] += 1
        return func(*args, **(kwargs or {}))


class Attend(nn.Module):
    """DotProductAttention of [b, heads, s, d], one module for each layer, under a recipe."""

    def __init__(self, recipe: object) -> None:
        """recipe: None for bf16."""
        super().__init__()
        self.recipe, self.calls = recipe, 0
        options = {"qkv_format": "bshd", "attn_mask_type": "causal"}
        self.cores = nn.ModuleList(
            DotProductAttention(HEADS, DIM, **options) for _ in range(LAYERS)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The layers call in turn."""
        core = self.cores[self.calls % LAYERS]
        self.calls += 1
        # Casting the fused projection as one tensor keeps q, k and v parts of one.
        q, k, v = (t.transpose(1, 2).to(torch.bfloat16) for t in (q, k, v))
        with nullcontext() if self.recipe is None else autocast(recipe=self.recipe):
            o = core(q, k, v)
        return o.unflatten(-1, (HEADS, DIM)).transpose(1, 2).float()


def run(name: str, letters: int, data: Tensor, steps: int) -> list[float]:
    """The losses of one model."""
    torch.manual_seed(0)
    model = GPT(letters).to(data.device)
    attend = Attend(RECIPES[name])
    with Watch() as watch:
        losses = train(model, attend, data, steps)
    for problem, count in watch.problems.items():
        print(f"{name}: {count} calls of {problem}")
    in_fp8 = sum(watch.passes[n] for n in IN_FP8)
    print(f"{name}: {in_fp8} of {watch.passes.total()} passes in FP8")
    if in_fp8 != (0 if name == "bf16" else 2 * LAYERS * steps):
        raise SystemExit(f"{name}: not every pass ran in the type that was asked for")
    return losses


def main(arguments: list[str] | None = None) -> int:
    """0 if the losses are within the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--output", type=Path, help="a JSON line for each model, with its losses")
    options = parser.parse_args(arguments)
    text = options.text.read_text()
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text[:100_000]], device=options.device)
    losses = {name: run(name, len(letters), data, options.steps) for name in RECIPES}
    if options.output:
        rows = ({"case": "fp8-gpt", "recipe": n, "loss": loss} for n, loss in losses.items())
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = max(options.steps // 10, 1)
    means = {name: sum(loss[-last:]) / last for name, loss in losses.items()}
    wrong = False
    for name in ("delayed", "current"):
        change = means[name] / means["bf16"] - 1
        furthest = max(abs(a / b - 1) for a, b in zip(losses[name], losses["bf16"], strict=True))
        equal = sum(a == b for a, b in zip(losses[name], losses["bf16"], strict=True))
        print(f"{name}: the mean loss of the last {last} steps is {means[name]:.4f}")
        print(f"  {change:+.2%} of that in bf16, {means['bf16']:.4f}; of a step {furthest:.2%}")
        print(f"  {equal} of {options.steps} losses are equal to those in bf16")
        wrong |= abs(change) > BAR or equal == options.steps
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
