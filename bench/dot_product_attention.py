#!/usr/bin/env python3
"""What the host spends on a call of DotProductAttention and of attention(): JSON lines.

usage: PYTHONPATH=BUILD/python dot_product_attention.py [--device cuda]

Small tensors, so that the GPU waits for the host; the least of five rounds. What is called "both"
ends when the GPU has done the backward pass too, so it is no time of the host alone.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

import te_attention.torch as tea
from transformer_engine.pytorch import DotProductAttention

DIM, ROWS, COUNT, ROUNDS = 64, 32, 200, 5
CASES = (("bshd", "causal"), ("sbhd", "no_mask"), ("thd", "padding_causal"))
NAMES = {"causal": "causal", "no_mask": "bottom_right", "padding_causal": "causal"}


def microseconds(call: Callable, device: str) -> float:
    """Of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        for _ in range(10):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(COUNT):
            call()
        best = min(best, (time.perf_counter() - start) / COUNT)
    return best * 1e6


def measure(form: str, mask: str, device: str) -> None:
    """Prints the rows of one format."""
    shape = {"thd": (ROWS, 1, DIM), "bshd": (1, ROWS, 1, DIM), "sbhd": (ROWS, 1, 1, DIM)}[form]
    options = {"device": device, "dtype": torch.bfloat16}
    plain = [torch.randn(shape, **options) for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in plain]
    dout = torch.randn((*shape[:-2], DIM), **options)
    lengths = {}
    if form == "thd":
        cu = torch.tensor([0, ROWS // 2, ROWS], device=device, dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        lengths |= {"max_seqlen_q": ROWS // 2, "max_seqlen_kv": ROWS // 2}
    module = DotProductAttention(1, DIM, qkv_format=form, attn_mask_type=mask)
    ours = {"format": form, "mask": NAMES[mask], "scale": DIM**-0.5, **lengths}
    rows = {
        "no grad": (lambda: module(*plain, **lengths), lambda: tea.attention(*plain, **ours)),
        "grad": (lambda: module(*leaves, **lengths), lambda: tea.attention(*leaves, **ours)),
        "both": (
            lambda: torch.autograd.grad(module(*leaves, **lengths), leaves, dout),
            lambda: torch.autograd.grad(tea.attention(*leaves, **ours), leaves, dout.view(shape)),
        ),
    }
    for what, calls in rows.items():
        of_module, of_function = (round(microseconds(call, device), 1) for call in calls)
        row = {"format": form, "mask": mask, "what": what, "module_us": of_module}
        row |= {"attention_us": of_function, "over_us": round(of_module - of_function, 1)}
        print(json.dumps(row), flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    for form, mask in CASES:
        measure(form, mask, device)


if __name__ == "__main__":
    main()
