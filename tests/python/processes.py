"""Starts processes that are the ranks of a gloo group."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import multiprocessing


def join(rank: int, world: int, port: int) -> None:
    """Makes this process a rank of the world that start() has begun."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def start(body: Callable, world: int, *arguments: object) -> None:
    """Runs body(rank, *arguments, port) in so many processes, and waits for all of them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.start_processes(body, (*arguments, store.port), world, start_method="spawn")
