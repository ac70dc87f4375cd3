#!/usr/bin/env python3
"""The host time of a call of DotProductAttention and of attention(): JSON lines.

usage: dot_product_attention.py [--device cuda | --instructions]

PYTHONPATH has BUILD/python and BUILD/python/te_attention_transformer_engine.

Small tensors, so that the GPU waits for the host. The two take turns, and the least of all rounds
counts, for each of them. What is called "both" ends when the GPU has done the backward pass too, so
it is no time of the host alone; "checkpoint" is the forward pass under PyTorch's checkpoint, for
both. With a KV cache a call is a step of decoding; attention() has the operator that appends in
front of it, as the module has. --instructions counts instead, on the CPU, where times say little.
"""

import argparse
import gc
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import torch
from instructions import run_counted
from torch.utils.checkpoint import checkpoint

import te_attention.torch as tea
from transformer_engine.pytorch import DotProductAttention, InferenceParams

DIM, ROWS, COUNT, ROUNDS = 64, 32, 100, 9
CASES = (("bshd", "causal"), ("sbhd", "no_mask"), ("thd", "padding_causal"))
NAMES = {"causal": "causal", "no_mask": "bottom_right", "padding_causal": "causal"}
SEQUENCES, PAGE = 2, 16
Measure: TypeAlias = Callable[[list[Callable]], tuple]  # the unit, then a figure for each


def microseconds(calls: list[Callable], device: str) -> tuple[str, float, ...]:
    """Of one call of each."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            for _ in range(10):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(COUNT):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / COUNT)
    return "us", *(round(seconds * 1e6, 1) for seconds in best)


def report(what: dict, module: Callable, function: Callable, measure: Measure) -> None:
    """Prints a row."""
    unit, of_module, of_function = measure([module, function])
    row = what | {f"module_{unit}": of_module, f"attention_{unit}": of_function}
    print(json.dumps(row | {f"over_{unit}": round(of_module - of_function, 1)}), flush=True)


def without_cache(form: str, mask: str, device: str, measure: Measure) -> None:
    """The rows of one format."""
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

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return tea.attention(*tensors, **ours)

    rows = {
        "no grad": (lambda: module(*plain, **lengths), lambda: tea.attention(*plain, **ours)),
        "grad": (lambda: module(*leaves, **lengths), lambda: tea.attention(*leaves, **ours)),
        "checkpoint": (
            lambda: module(*leaves, checkpoint_core_attention=True, **lengths),
            lambda: checkpoint(function, *leaves, use_reentrant=False),
        ),
        "both": (
            lambda: torch.autograd.grad(module(*leaves, **lengths), leaves, dout),
            lambda: torch.autograd.grad(tea.attention(*leaves, **ours), leaves, dout.view(shape)),
        ),
    }
    for what, calls in rows.items():
        report({"format": form, "mask": mask, "what": what}, *calls, measure)


def with_cache(form: str, paged: bool, device: str, measure: Measure) -> None:
    """The row of one format and kind of cache."""
    options = {"device": device, "dtype": torch.bfloat16}
    shape = {"thd": (SEQUENCES, 1, DIM), "bshd": (SEQUENCES, 1, 1, DIM)}[form]
    q, k, v = (torch.randn(shape, **options) for _ in range(3))
    caches = InferenceParams(
        *(SEQUENCES, 4 * PAGE, 1, DIM, torch.bfloat16),
        **{"is_paged": paged, "page_size": PAGE if paged else None, "max_ctx_len": 1},
        **{"qkv_format": form, "device": device},
    )
    caches.allocate_memory(1)
    for _ in range(3):  # the first step of a sequence moves rows
        caches.pre_step(OrderedDict((i, 1) for i in range(SEQUENCES)))
    module = DotProductAttention(1, DIM, qkv_format=form, attn_mask_type="padding_causal").eval()
    manager = caches.cache_manager
    pools, rows = manager.cache[1], (manager.page_table if paged else manager.batch_indices)
    lengths = {"cu_seqlens_q": caches.cu_seqlens_q, "cu_seqlens_kv": caches.cu_seqlens_kv}
    ours = {"mask": "causal_bottom_right", "scale": DIM**-0.5, **lengths}
    ours["format"] = form if form == "bshd" else "thd_bshd"
    if form == "thd":
        ours["max_seqlen_q"] = 1
    if paged:
        ours |= {"page_table": rows, "max_seqlen_kv": 4 * PAGE}
    append = torch.ops.te_attention.kv_cache_append.default

    def function() -> torch.Tensor:
        append(k, v, *pools, rows, *lengths.values(), False)
        return tea.attention(q, *pools, **ours)

    most = {"max_seqlen_q": 1, "max_seqlen_kv": 4 * PAGE}
    what = {"format": form, "cache": "pages" if paged else "rows", "what": "no grad"}
    with torch.no_grad():
        step = lambda: module(q, k, v, inference_params=caches, **most)  # noqa: E731
        assert torch.equal(step(), function().flatten(-2))
        report(what, step, function, measure)


def every_row(device: str, measure: Measure) -> None:
    """All formats, then all caches."""
    for form, mask in CASES:
        without_cache(form, mask, device, measure)
    for form in ("bshd", "thd"):
        for paged in (False, True):
            with_cache(form, paged, device, measure)


def count_instructions() -> int:
    """Every row on the CPU; the exit code."""
    os.environ["TE_ATTENTION_THREADS"] = "1"

    def program(count: Callable[[Callable], int]) -> None:
        torch.set_num_threads(1)
        gc.disable()
        every_row("cpu", lambda calls: ("instructions", *map(count, calls)))

    return run_counted(program)


def main() -> int:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--instructions", action="store_true")
    options = parser.parse_args()
    if options.instructions:
        return count_instructions()
    every_row(options.device, lambda calls: microseconds(calls, options.device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
