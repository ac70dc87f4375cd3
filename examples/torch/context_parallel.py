"""A sequence whose rows several processes share: torchrun --nproc-per-node 2 this file, on the CPU.

Each rank trains one attention layer on its own rows, and checks output and gradients against the
whole sequence on one device. Without torchrun it runs as one rank.
"""

import os

import torch
import torch.distributed as dist

from te_attention.torch import attention, context_parallel_attention
from te_attention.torch import context_parallel as cp

ROWS, HEADS, DIM = 1000, 8, 64  # a length that no number of ranks divides


def main() -> None:
    """Runs as one of the ranks of torchrun."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29417")
    rank, world = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.group.WORLD
    torch.manual_seed(1)
    whole = [torch.randn(1, ROWS, HEADS, DIM, requires_grad=True) for _ in range(3)]
    options = {"format": "bshd", "mask": "causal", "window": (255, None)}

    # Each rank has its rows, and calls as it would call attention().
    q, k, v = (cp.shard(t.detach(), group).requires_grad_() for t in whole)
    o = context_parallel_attention(q, k, v, group=group, seqlens=ROWS, **options)
    o.square().sum().backward()

    wanted = attention(*whole, **options)
    wanted.square().sum().backward()
    pairs = [(o, wanted), *((a.grad, b.grad) for a, b in zip((q, k, v), whole, strict=True))]
    worst = max((cp.unshard(a, group, seqlen=ROWS) - b).abs().max().item() for a, b in pairs)
    if dist.get_rank() == 0:
        print(cp.explain(q, k, v, group=group, seqlens=ROWS, **options))
        print(f"{dist.get_world_size()} ranks differ from one device by at most {worst:.1e}")
    assert worst < 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
