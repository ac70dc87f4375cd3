"""A rank that ends while others wait for it, over a transport that does not notice."""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import processes
from te_attention.torch import _cp_transport as transport
from te_attention.torch import _cp_watch as watch
from te_attention.torch import context_parallel_attention

LIMIT = 15.0  # seconds until a failure is an error


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Seen:
    """The ranks that a watch reports."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.ranks: list[int] = []
        self.event = threading.Event()
        self.watch = watch.Watch(store, rank, world, self.add)

    def add(self, rank: int) -> None:
        self.ranks.append(rank)
        self.event.set()

    def wait_until_connected(self) -> None:
        end = time.monotonic() + LIMIT
        while len(self.watch.ends) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)


def all_ranks(store: dist.Store, world: int) -> list[Seen]:
    """The watches of all ranks, connected."""
    ranks = [Seen(store, rank, world) for rank in range(world)]
    for rank in ranks:
        rank.wait_until_connected()
    return ranks


def end(rank: Seen) -> None:
    """Closes connections as the operating system does for a process that ends."""
    rank.watch._tell = lambda *_, **__: None  # such a process sends nothing
    for connection in rank.watch.ends:
        connection.shutdown(2)


@pytest.mark.parametrize("world", [2, 5])
def test_every_rank_learns_which_one_has_ended(store, world) -> None:
    ranks = all_ranks(store, world)
    end(ranks[1])
    for rank in ranks[:1] + ranks[2:]:
        assert rank.event.wait(LIMIT)
        assert rank.ranks == [1]


def test_a_rank_that_leaves_is_not_lost(store) -> None:
    ranks = all_ranks(store, 3)
    ranks[1].watch.leave()
    end(ranks[1])
    assert not ranks[0].event.wait(0.3)
    end(ranks[2])  # which rank 0 still watches
    assert ranks[0].event.wait(LIMIT)
    assert ranks[0].ranks == [2]


def test_a_stranger_does_not_become_a_rank_next_to_another(store) -> None:
    first = Seen(store, 0, 2)
    address, port, _ = json.loads(store.get("te_attention_cp/watch/0"))
    with socket.create_connection((address, port)) as stranger:
        stranger.sendall(b"hello\n")
    second = Seen(store, 1, 2)
    first.wait_until_connected(), second.wait_until_connected()
    assert not first.event.is_set()


class Waiting:
    """A transfer that only an abort ends, as one of NCCL's whose peer has ended."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def is_completed(self) -> bool:
        return self.aborted.is_set()

    def wait(self) -> None:
        self.aborted.wait(60)


class Group:
    """A gloo group that takes part in a call as one of NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.work = group, Waiting()

    def abort(self) -> None:
        self.work.aborted.set()


def wait_in_a_call(rank: int, folder: str, port: int) -> None:
    """Rank 1 ends in a call. The others write what they raise, and after how many seconds."""
    processes.join(rank, 3, port)
    group = Group(dist.group.WORLD)

    def begin(self) -> list:
        if rank == 1:
            time.sleep(0.5)  # the others have connected
            os._exit(9)
        guard = watch.Guard.__new__(watch.Guard)
        guard.group, guard.driver, guard.error = group, lambda: self.driver, ""
        guard.works, guard.lasting = [group.work], []
        watch.Watch(store, rank, 3, guard._lost)
        return [group.work]

    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        watch.Watch(store, rank, 3, lambda _: None)
    transport.GroupTransport._post_gloo = lambda self, _: transport._Works(begin(self))
    q = torch.zeros(1, 16, 2, 64)
    start = time.monotonic()
    try:
        context_parallel_attention(q, q, q, group=dist.group.WORLD, strategy="ring", format="bshd")
        text = "no error"
    except watch.RankLostError as error:
        text = str(error)
    Path(folder, str(rank)).write_text(f"{time.monotonic() - start} {text}")
    os._exit(0)


def test_ranks_that_wait_raise_when_one_is_killed(tmp_path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=wait_in_a_call, args=(rank, str(tmp_path), store.port))
             for rank in range(3)]  # fmt: skip
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 9, 0]
    for rank in (0, 2):
        seconds, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert text.startswith("rank 1 has ended; needs all ranks"), text
        assert float(seconds) < LIMIT
