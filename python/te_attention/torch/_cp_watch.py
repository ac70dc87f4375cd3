"""Whether the other ranks of a group are alive, for transports that do not notice.

A kernel of NCCL waits for data in memory and never looks at the process that should write them, and
the timeout of a group is ten minutes by default. Here every rank has a connection to the next one,
on which nothing is sent: the operating system closes it when a process ends, however it ends. The
rank that sees this tells the rank on its other side, which tells the next.
"""

import atexit
import contextlib
import ctypes
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

PATIENCE = 60.0  # seconds that a rank waits for adjacent ones to connect
GRACE = 2.0  # seconds for transfers to complete that do not need the rank that has ended
ADJACENT = 2  # ranks to which one is connected
LEFT = "left"  # the message of a rank that ends without an error


class RankLostError(RuntimeError):
    """A rank has ended before the transfers of a call were complete."""


def _own_address(store: dist.Store) -> str:
    """The address by which this host reaches that of the store, so that others reach it."""
    base = getattr(store, "_underlying_non_prefix_store", store)
    if not isinstance(base, dist.TCPStore):
        return socket.gethostbyname(socket.gethostname())
    found = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def _keep_alive(connection: socket.socket) -> None:
    """Closes the connection within about ten seconds where the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Watch:
    """The connections of one rank of a group. `lost` is called once, in a thread, with a rank."""

    def __init__(
        self, store: dist.Store, rank: int, world: int, lost: Callable[[int], None]
    ) -> None:
        self.rank, self.world, self.lost = rank, world, lost
        self.store = store.clone()  # calls of one store wait for each other
        self.ends: dict[socket.socket, int] = {}  # the adjacent ranks, by their connections
        address = _own_address(store)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family)
        self.token = secrets.token_hex(16)
        place = [address, self.listener.getsockname()[1], self.token]
        self.store.set(self._key(rank), json.dumps(place))
        self.thread = threading.Thread(target=self._run, name="te_attention ranks", daemon=True)
        self.thread.start()
        _watches.add(self)

    @staticmethod
    def _key(rank: int) -> str:
        return f"te_attention_cp/watch/{rank}"

    def _connect(self) -> socket.socket:
        key = self._key((self.rank + 1) % self.world)
        self.store.wait([key], timedelta(seconds=PATIENCE))
        address, port, token = json.loads(self.store.get(key))
        connection = socket.create_connection((address, port), PATIENCE)
        connection.sendall(f"{token}\n".encode())
        return connection

    def _accept(self) -> socket.socket:
        end = time.monotonic() + PATIENCE
        while True:
            self.listener.settimeout(max(end - time.monotonic(), 0.01))
            connection, _ = self.listener.accept()
            connection.settimeout(5.0)
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if connection.recv(64).decode().strip() == self.token:
                    return connection
            connection.close()

    def _run(self) -> None:
        try:
            found = [self._connect(), self._accept()]
        except (OSError, RuntimeError, ValueError, dist.DistError):
            return  # the group's own timeout remains
        adjacent = ((self.rank + 1) % self.world, (self.rank - 1) % self.world)
        with selectors.DefaultSelector() as selector:
            for connection, rank in zip(found, adjacent, strict=True):
                connection.settimeout(None)
                _keep_alive(connection)
                self.ends[connection] = rank
                selector.register(connection, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    message = self._read(key.fileobj)
                    selector.unregister(key.fileobj)
                    if message == LEFT:
                        continue
                    lost = self.ends[key.fileobj] if message is None else int(message)
                    self._tell(str(lost), but=key.fileobj)
                    self.lost(lost)
                    return

    @staticmethod
    def _read(connection: socket.socket) -> str | None:
        """A message; None where the connection ends without one."""
        try:
            text = connection.recv(64).decode()
        except OSError:
            return None
        return next(iter(text.split()), None)

    def _tell(self, message: str, but: socket.socket | None = None) -> None:
        for connection in self.ends:
            if connection is not but:
                with contextlib.suppress(OSError):
                    connection.sendall(f"{message}\n".encode())

    def leave(self) -> None:
        """Tells adjacent ranks that this one ends, and did not fail."""
        self._tell(LEFT)

    def forget(self) -> None:
        """Closes this process's copies of the connections, which are those of its parent."""
        for connection in (*self.ends, self.listener):
            connection.close()


_watches: set[Watch] = set()


@atexit.register
def _leave() -> None:
    if getattr(sys, "last_value", None) is None:  # no exception ends the process
        for watch in list(_watches):
            watch.leave()


def _forget() -> None:
    for watch in list(_watches):
        watch.forget()
    _watches.clear()


os.register_at_fork(after_in_child=_forget)


def _raise_in(thread: int, text: str) -> None:
    """Raises RankLostError in a thread, as soon as it runs Python again."""
    error = type("RankLostError", (RankLostError,), {
        "__module__": RankLostError.__module__,
        "__init__": lambda self: RankLostError.__init__(self, text),
    })  # fmt: skip
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class Guard:
    """Ends the transfers of a group when one of its ranks has ended.

    The device gives up transfers then, and leaves memory that was not received. The thread that
    waits for them must not go on with it: RankLostError is raised there. `driver`: the thread that
    drives a program, or None, which stands for the main thread.
    """

    def __init__(self, group: dist.ProcessGroup, driver: Callable[[], int | None]) -> None:
        self.group, self.driver, self.error = group, driver, ""
        self.works: deque[dist.Work] = deque(maxlen=8)  # those begun last
        self.lasting: list = []  # objects that are complete as works are, each for many transfers
        self.watch: Watch | None = None
        store = dist.distributed_c10d._get_process_group_store(group)
        with contextlib.suppress(OSError, RuntimeError):  # the group's own timeout remains
            self.watch = Watch(store, dist.get_rank(group), dist.get_world_size(group), self._lost)

    @property
    def is_connected(self) -> bool:
        """Whether it would notice."""
        return self.watch is not None and len(self.watch.ends) == ADJACENT

    def check(self) -> None:
        """Raises RankLostError if a rank has ended."""
        if self.error:
            raise RankLostError(self.error)

    def _unfinished(self) -> bool:
        try:
            return not all(work.is_completed() for work in (*self.works, *self.lasting))
        except RuntimeError:  # a work that failed
            return True

    def _lost(self, rank: int) -> None:
        self.error = f"rank {rank} has ended; needs all ranks of the group until transfers are done"
        end = time.monotonic() + GRACE
        while self._unfinished():
            if time.monotonic() > end:
                _raise_in(self.driver() or threading.main_thread().ident, self.error)
                self.group.abort()
                return
            time.sleep(0.05)
