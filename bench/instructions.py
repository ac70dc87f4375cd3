"""Counts the instructions of a call, which stay the same however busy the host is.

A child process runs the program and stops at two signals around the call; between them its parent
lets one instruction pass at a time. Of threads only the one that calls is counted.
"""

import ctypes
import os
import signal
from collections.abc import Callable

TRACEME, CONTINUE, STEP = 0, 7, 9  # of ptrace
BEGIN, END = signal.SIGUSR1, signal.SIGUSR2
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace


def _count(child: int, counts: int) -> int:
    """Follows the child to its end, and writes each count to it. Its exit code."""
    steps, counting = 0, False
    while True:
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        stopped, passed_on = os.WSTOPSIG(status), 0
        if stopped == BEGIN:
            steps, counting = 0, True
        elif stopped == END:
            counting = False
            os.write(counts, steps.to_bytes(8, "little"))
        elif counting and stopped == signal.SIGTRAP:
            steps += 1
        elif stopped != signal.SIGTRAP:
            passed_on = stopped
        _ptrace(STEP if counting else CONTINUE, child, None, passed_on)


def run_counted(program: Callable[[Callable[[Callable], int]], None]) -> int:
    """Runs program(count) in a child, where count(call) is the instructions of call()."""
    ends = os.pipe()
    child = os.fork()
    if child:
        return _count(child, ends[1])
    _ptrace(TRACEME, 0, None, None)

    def between_signals(call: Callable) -> int:
        os.kill(os.getpid(), BEGIN)
        call()
        os.kill(os.getpid(), END)
        return int.from_bytes(os.read(ends[0], 8), "little")

    def count(call: Callable) -> int:
        for _ in range(60):  # Python adapts its code to what it has seen
            call()
        return between_signals(call) - between_signals(lambda: None)

    program(count)
    os._exit(0)
