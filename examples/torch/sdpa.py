"""A layer written for PyTorch's scaled_dot_product_attention, as it is, on our kernels.

usage: sdpa.py [--device cuda]
"""

import argparse
import contextlib

import torch
from torch import nn

import te_attention.torch.sdpa


@contextlib.contextmanager
def behind_pytorchs_flash_backend():
    """On CUDA: replaces PyTorch's FlashAttention, which some GPUs select only on request."""
    torch.nn.attention.activate_flash_attention_impl("TE_ATTENTION")
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def both(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output of the layer for x, and the gradients of its parameters."""
    y = layer(x)
    return [y, *torch.autograd.grad(y, list(layer.parameters()), dy)]


def main() -> int:
    """0 if both ways agree and ours was ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    layer = nn.TransformerEncoderLayer(256, 4, dropout=0.0, batch_first=True, **options)
    x, dy = (torch.randn(2, 100, 256, **options) for _ in range(2))
    want = both(layer, x, dy)
    on_cpu = te_attention.torch.sdpa.enabled
    replaced = behind_pytorchs_flash_backend if device == "cuda" else on_cpu
    with replaced(), torch.profiler.profile() as profile:
        got = both(layer, x, dy)
    ran = sorted(e.key for e in profile.key_averages() if e.key.startswith("te_attention::"))
    print("operators:", *ran)
    pairs = list(zip(got, want, strict=True))
    furthest = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    print(f"outputs and gradients differ by at most {furthest:.1e} of their largest element")
    return int(not ran or furthest > (0.05 if device == "cuda" else 1e-4))


if __name__ == "__main__":
    raise SystemExit(main())
