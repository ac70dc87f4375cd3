"""Calls that are repeated without Python: their results, and what is not repeated."""

import ctypes
import threading
from contextlib import nullcontext
from queue import Queue

import pytest
import torch

from te_attention.torch import _cp_accumulate, context_parallel
from te_attention.torch._cp_call import Call
from te_attention.torch._cp_exchange import Exchange
from te_attention.torch._cp_explain import why_not_repeated
from te_attention.torch._cp_nccl import EVENTS, FUNCTIONS
from te_attention.torch._cp_problem import Distribution, make_problem
from te_attention.torch._cp_record import Recorder
from te_attention.torch._cp_recording import Kind
from te_attention.torch._cp_run import Inputs, backward, forward
from te_attention.torch._cp_transport import LockStep
from te_attention.torch.context_parallel import _key
from te_attention.torch.functional import describe

SECONDS = 20.0
MESSAGE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                           ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)  # fmt: skip
GROUP = ctypes.CFUNCTYPE(ctypes.c_int)


class Mailbox:
    """Messages between threads that are ranks; its functions have the form of NCCL's."""

    def __init__(self, world: int) -> None:
        self.queues = {(a, b): Queue() for a in range(world) for b in range(world)}
        self.kept = [[GROUP(lambda: 0), MESSAGE(self._sender(rank)), MESSAGE(self._receiver(rank)),
                      GROUP(lambda: 0)] for rank in range(world)]  # fmt: skip

    def _sender(self, rank: int):
        def send(data, count, _type, peer, _communicator, _stream) -> int:
            self.queues[rank, peer].put(ctypes.string_at(data, count))
            return 0

        return send

    def _receiver(self, rank: int):
        def receive(data, count, _type, peer, _communicator, _stream) -> int:
            message = self.queues[peer, rank].get(timeout=SECONDS)
            if len(message) != count:
                return 5
            ctypes.memmove(data, message, count)
            return 0

        return receive

    def table(self, rank: int) -> torch.Tensor:
        addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in self.kept[rank]]
        return torch.tensor([*addresses, *[0] * 11])


class Transport:
    """A rank of a Mailbox. posts: the exchanges that a program has asked for."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.mailbox, self.rank, self.posts = mailbox, rank, 0

    def direct(self) -> torch.Tensor:
        return self.mailbox.table(self.rank)

    def driven(self):
        return nullcontext()

    def mark(self) -> None:
        pass

    def post(self, exchange: Exchange):
        self.posts += 1
        for peer, tensor in exchange.sends:
            assert tensor.is_contiguous()
            message = tensor.clone().view(torch.uint8).numpy().tobytes()
            self.mailbox.queues[self.rank, peer].put(message)
        # The order of messages between two ranks is that of the transfers.
        return Handle([(self.mailbox.queues[r, self.rank], t) for r, t in exchange.receives])


class Handle:
    """Messages to receive."""

    def __init__(self, receives: list[tuple[Queue, torch.Tensor]]) -> None:
        self.receives = receives

    def wait(self) -> None:
        for queue, tensor in self.receives:
            message = queue.get(timeout=SECONDS)
            assert len(message) == tensor.nbytes
            ctypes.memmove(tensor.data_ptr(), message, len(message))
        self.receives = []  # a program may wait again


class Ranks:
    """Calls of all ranks of a world, each in a thread of its own."""

    def __init__(
        self, world: int, strategy: str, training: bool, zigzag: bool = True, **options
    ) -> None:
        self.mailbox = Mailbox(world)
        self.transports = [Transport(self.mailbox, rank) for rank in range(world)]
        self.problems, self.options = [], {"format": "bshd", "mask": "causal"} | options
        for rank, inputs in enumerate(self.inputs(0)):
            a = describe(*inputs, **self.options)._replace(training=training)
            how = Distribution(world, rank, strategy, 1, zigzag, None)
            self.problems.append(make_problem(a, how)[0])
        self.calls = [Call(p, t) for p, t in zip(self.problems, self.transports, strict=True)]

    def inputs(self, seed: int) -> list[list[torch.Tensor]]:
        """q, k and v of each rank."""
        generator = torch.Generator().manual_seed(seed)
        shape = {"bshd": (2, 32, 2, 16), "bhsd": (2, 2, 32, 16), "sbhd": (32, 2, 2, 16)}
        return [
            [torch.randn(shape[self.options["format"]], generator=generator).bfloat16()
             for _ in range(3)] for _ in self.transports
        ]  # fmt: skip

    def run(self, seed: int) -> list:
        found: list = [None] * len(self.calls)

        def work(rank: int, inputs: list) -> None:
            found[rank] = self.calls[rank].forward(Inputs(*inputs))

        return self.in_threads(work, found, self.inputs(seed))

    def differentiate(self, results: list, seed: int) -> list:
        found: list = [None] * len(self.calls)

        def work(rank: int, inputs: list) -> None:
            (_, saved), dout = results[rank], self.gradient(rank, seed)
            found[rank] = self.calls[rank].backward(Inputs(*inputs), saved, dout, None)

        return self.in_threads(work, found, self.inputs(seed))

    def gradient(self, rank: int, seed: int) -> torch.Tensor:
        return self.inputs(seed + 100)[rank][0]

    @staticmethod
    def in_threads(work, found: list, inputs: list) -> list:
        threads = [threading.Thread(target=work, args=x) for x in enumerate(inputs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result is not None for result in found)
        return found

    def expected(self, seed: int) -> list:
        inputs = [Inputs(*one) for one in self.inputs(seed)]
        return LockStep([forward(*x) for x in zip(self.problems, inputs, strict=True)]).run()

    def expected_gradients(self, results: list, seed: int) -> list:
        programs = [
            backward(p, Inputs(*x), saved, self.gradient(p.rank, seed), None)
            for p, x, (_, saved) in zip(self.problems, self.inputs(seed), results, strict=True)
        ]
        return LockStep(programs).run()


def tensors(result: tuple) -> list:
    """All tensors of the result of a program, where a later pass needs them."""
    (output, saved) = result
    if saved is None:
        return [*output]
    return [*output, saved.o, saved.lse, *saved.keys, *saved.halo, saved.operands.q]


CASES = {
    "ring": ("ring", {}),
    "full": ("ring", {"mask": None}),
    "contiguous": ("ring", {"zigzag": False}),
    "bhsd": ("ring", {"format": "bhsd"}),
    "sbhd": ("ring", {"format": "sbhd", "softcap": 3.0}),
    "window": ("halo", {"window": (7, None)}),
    "window of bhsd": ("halo", {"window": (7, None), "format": "bhsd"}),
    "window of a ring": ("ring", {"window": (40, None)}),
}
RUN_EACH_TIME = {
    "all of K and V": ("all_gather", {}),
    "heads for rows": ("a2a", {}),
    "queries": ("gather_q", {}),
    "later keys": ("halo", {"mask": None, "window": (7, 3)}),
    "no earlier keys": ("halo", {"window": (0, None)}),
    "ALiBi of a window": ("halo", {"window": (7, None), "alibi": True}),
    "row maxima": ("ring", {"return_max_logit": True}),
    "off by one": ("ring", {"sink": "off_by_one"}),
}
REPEATED = CASES | {
    "ALiBi": ("ring", {"alibi": True}),
    "off by one of a window": ("halo", {"window": (7, None), "sink": "off_by_one"}),
    "later keys of a ring": ("ring", {"mask": None, "window": (7, 3)}),
}


def check(ranks: Ranks, found: list, seed: int) -> None:
    for got, wanted in zip(found, ranks.expected(seed), strict=True):
        for a, b in zip(tensors(got), tensors(wanted), strict=False):
            assert (a is None and b is None) or torch.equal(a, b)
    assert not any(queue.qsize() for queue in ranks.mailbox.queues.values())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_has_the_bits_of_the_program(name: str, world: int, training: bool) -> None:
    strategy, options = CASES[name]
    ranks = Ranks(world, strategy, training, **options)
    for seed in (1, 2):
        check(ranks, ranks.run(seed), seed)
    assert all(call.passes[0].recording is not None for call in ranks.calls)
    posts = [t.posts for t in ranks.transports]
    check(ranks, ranks.run(3), 3)
    assert [t.posts for t in ranks.transports] == posts  # no program has run


@pytest.mark.parametrize("name", ["ring", "bhsd", "sbhd"])
def test_o_that_the_operator_rounds_is_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, options = CASES[name]
    wanted = Ranks(2, strategy, True, **options).expected(3)
    monkeypatch.setattr(_cp_accumulate, "ROUNDED", ("cpu",))
    ranks = Ranks(2, strategy, True, **options)
    for seed in (1, 2, 3):
        found = ranks.run(seed)
    assert all(call.passes[0].recording is not None for call in ranks.calls)
    for got, of_program in zip(found, wanted, strict=True):
        assert all(map(torch.equal, tensors(got)[:2], tensors(of_program)[:2]))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_backward_pass_has_the_bits_of_the_program(name: str, world: int) -> None:
    strategy, options = CASES[name]
    ranks = Ranks(world, strategy, True, **options)
    for seed in (1, 2, 3):
        results = ranks.run(seed)
        posts = [t.posts for t in ranks.transports]
        found = ranks.differentiate(results, seed)
        repeated = [t.posts for t in ranks.transports] == posts
        assert repeated == (seed > 2)
        for got, wanted in zip(found, ranks.expected_gradients(results, seed), strict=True):
            assert all(map(torch.equal, got[:3], wanted[:3]))


def test_a_call_that_does_more_runs_its_program_each_time() -> None:
    ranks = Ranks(2, "ring", True, return_max_logit=True)
    for seed in (1, 2, 3):
        check(ranks, ranks.run(seed), seed)
        assert all(call.passes[0].recording is None for call in ranks.calls)


@pytest.mark.parametrize("name", [*REPEATED, *RUN_EACH_TIME])
def test_explain_knows_which_calls_are_repeated(name: str) -> None:
    strategy, options = (REPEATED | RUN_EACH_TIME)[name]
    ranks = Ranks(2, strategy, False, **options)
    inputs = ranks.inputs(1)
    for seed in (1, 2):
        ranks.run(seed)
    for call, problem, tensors_of_rank in zip(ranks.calls, ranks.problems, inputs, strict=True):
        assert (call.passes[0].recording is None) == (name in RUN_EACH_TIME)
        assert bool(why_not_repeated(problem, Inputs(*tensors_of_rank))) == (name in RUN_EACH_TIME)


def packed(rows: int) -> list[torch.Tensor]:
    """q, k and v in one memory."""
    return list(torch.randn(2, rows, 2, 48).bfloat16().split(16, -1))


def test_a_recording_of_packed_tensors_fits_no_others() -> None:
    ranks = Ranks(2, "ring", False)
    inputs = [packed(32) for _ in range(2)]
    ranks.inputs = lambda _: inputs
    for _ in range(2):
        check(ranks, ranks.run(1), 1)
    recording = ranks.calls[0].passes[0].recording
    table = torch.zeros(15, dtype=torch.int64)
    assert recording.replay([packed(32)[i] for i in range(3)], table) is None
    check(ranks, ranks.run(1), 1)


def test_packed_tensors_elsewhere_repeat_the_backward_pass() -> None:
    ranks = Ranks(2, "ring", True)
    for seed in (1, 2, 3):
        inputs = [packed(32) for _ in range(2)]
        ranks.inputs = lambda _, inputs=inputs: inputs
        gradients = [torch.randn(2, 32, 2, 16).bfloat16() for _ in range(2)]
        ranks.gradient = lambda rank, _, gradients=gradients: gradients[rank]
        results = ranks.run(seed)
        posts = [t.posts for t in ranks.transports]
        found = ranks.differentiate(results, seed)
        assert ([t.posts for t in ranks.transports] == posts) == (seed > 2)
        for got, wanted in zip(found, ranks.expected_gradients(results, seed), strict=True):
            assert all(map(torch.equal, got[:3], wanted[:3]))


def test_a_gradient_that_is_another_input_runs_the_program() -> None:
    """The inputs without repetitions are as many, and of the same shapes."""
    ranks = Ranks(2, "ring", True)
    inputs = ranks.inputs(1)
    ranks.inputs = lambda _: inputs
    for which in (0, 0, 0, 2):
        ranks.gradient = lambda rank, _, which=which: inputs[rank][which]
        results = ranks.run(1)
        found = ranks.differentiate(results, 1)
        for got, wanted in zip(found, ranks.expected_gradients(results, 1), strict=True):
            assert all(map(torch.equal, got[:3], wanted[:3]))


def test_equal_calls_are_repeated_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, "ring", False)
    groups, made = [object(), object()], []

    def new_call(q, k, v, how, *_) -> tuple:
        made.append(how[0])
        return ranks.calls[groups.index(how[0])], Inputs(q, k, v), False

    monkeypatch.setattr(context_parallel, "_new_call", new_call)

    def call(inputs: list, group: object, **more) -> torch.Tensor:
        words = {"group": group, "strategy": "ring"} | ranks.options | more
        return context_parallel.context_parallel_attention(*inputs, **words)

    for seed in (1, 2, 3):
        posts, found = [t.posts for t in ranks.transports], [None, None]

        def work(rank: int, inputs: list, found: list = found) -> None:
            found[rank] = call(inputs, groups[rank])

        ranks.in_threads(work, found, ranks.inputs(seed))
        for o, (wanted, _) in zip(found, ranks.expected(seed), strict=True):
            assert torch.equal(o, wanted[0])
    assert sorted(made, key=groups.index) == groups
    assert [t.posts for t in ranks.transports] == posts  # the last one ran no program

    class NewCallError(Exception):
        """Raised where other ranks would have to take part."""

    def refuse(*_: object) -> None:
        raise NewCallError

    monkeypatch.setattr(context_parallel, "_new_call", refuse)
    inputs = ranks.inputs(4)[0]
    elsewhere = torch.empty(inputs[0].numel() + 1, dtype=torch.bfloat16)[1:].view_as(inputs[0])
    for others, more in (
        ([elsewhere.copy_(inputs[0]), *inputs[1:]], {}),
        ([t.float() for t in inputs], {}),
        ([inputs[0].transpose(0, 1).contiguous().transpose(0, 1), *inputs[1:]], {}),
        ([inputs[0].clone().requires_grad_(), *inputs[1:]], {}),
        (inputs, {"softcap": 1.0}),
        (inputs, {"mask": None}),
    ):
        with pytest.raises(NewCallError):
            call(others, groups[0], **more)


@pytest.mark.parametrize("name", ["ring", "window"])
def test_equal_calls_with_gradients_are_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, options = CASES[name]
    ranks = Ranks(2, strategy, True, **options)
    groups, made = [object(), object()], []

    def new_call(q, k, v, how, *_) -> tuple:
        made.append(how[0])
        return ranks.calls[groups.index(how[0])], Inputs(q, k, v), False

    monkeypatch.setattr(context_parallel, "_new_call", new_call)
    for seed in (1, 2, 3):
        posts, found = [t.posts for t in ranks.transports], [None, None]

        def work(rank: int, inputs: list, found: list = found, seed: int = seed) -> None:
            leaves = [t.requires_grad_() for t in inputs]
            o, lse = context_parallel.context_parallel_attention(
                *leaves, group=groups[rank], strategy=strategy, return_lse=True, **ranks.options
            )
            assert lse.grad_fn is o.grad_fn
            found[rank] = o, torch.autograd.grad(o, leaves, ranks.gradient(rank, seed))

        ranks.in_threads(work, found, ranks.inputs(seed))
        results = ranks.expected(seed)
        wanted = ranks.expected_gradients(results, seed)
        for (o, gradients), ((of_program, *_), _), exact in zip(
            found, results, wanted, strict=True
        ):
            assert torch.equal(o, of_program)
            assert all(map(torch.equal, gradients, exact[:3]))
    assert sorted(made, key=groups.index) == groups
    assert [t.posts for t in ranks.transports] == posts  # the last one ran no program


def test_each_address_counts_for_the_key_of_a_call() -> None:
    """A part reads q and keys of another rank: it does not see the alignment of this rank's k."""
    memory = torch.empty(3, 1024, dtype=torch.bfloat16)
    aligned, moved = memory[0, :512].view(1, 16, 2, 16), memory[1, 4:516].view(1, 16, 2, 16)
    assert _key(aligned, moved, aligned, ()) != _key(moved, aligned, aligned, ())


def test_a_recorder_gives_up_where_an_operator_writes_to_a_list() -> None:
    given = torch.zeros(8)
    for work in (lambda: torch._foreach_add_([given], 1), lambda: torch.ones(8, out=given)):
        recorder = Recorder([given])
        with recorder:
            work()
        assert recorder.failed is not None


def test_two_views_of_new_memory_keep_their_shapes() -> None:
    given = torch.arange(6.0).reshape(2, 3)
    recorder = Recorder([given])
    with recorder:
        made = torch.empty(2, 3)
        made.copy_(given)
    recording = recorder.finish([made, made.t()])
    one, other = recording.replay([given], torch.zeros(15, dtype=torch.int64))
    assert torch.equal(one, given)
    assert torch.equal(other, given.t())


def test_memory_that_is_used_again_is_not_that_of_the_tensor_before() -> None:
    given = torch.zeros(1000)
    recorder = Recorder([given])
    with recorder:
        gone = torch.empty(1000)
        given.copy_(gone)
        assert recorder.failed is None
        del gone
        other = torch.full((1000,), 2.0)  # most likely in the same memory
        given.copy_(other)
    assert recorder.failed == "a tensor from outside the call"


def test_an_error_of_nccl_names_the_function() -> None:
    ranks = Ranks(2, "ring", False)
    for seed in (1, 2):
        ranks.run(seed)
    depth = [0]

    def count(change: int):
        def work() -> int:
            depth[0] += change
            return 0

        return GROUP(work)

    fails, start, end = MESSAGE(lambda *_: 3), count(1), count(-1)
    table = ranks.mailbox.table(0)
    for place, function in ((0, start), (1, fails), (3, end)):
        table[place] = ctypes.cast(function, ctypes.c_void_p).value
    recording, inputs = ranks.calls[0].passes[0].recording, ranks.inputs(3)[0]
    with pytest.raises(RuntimeError, match="ncclSend is returning 3; needs 0"):
        recording.replay(inputs, table)
    assert depth == [0]  # the thread has left the group
    with pytest.raises(RuntimeError, match="transport is 14 numbers; needs 15"):
        recording.replay(inputs, table[1:].clone())
    assert len(FUNCTIONS) + 5 + EVENTS == len(table)


@pytest.mark.parametrize(("left", "count"), [(7, 1), (0, 0)])
def test_what_follows_a_transfer_is_joined_with_it(left: int, count: int) -> None:
    ranks = Ranks(2, "halo", True, window=(left, None))
    ranks.expected(1)  # makes the plan of rows that travel
    inputs = ranks.inputs(1)[0]
    recorder, program = Recorder(inputs), forward(ranks.problems[0], Inputs(*inputs))
    answer = None
    try:
        while True:
            with recorder:
                request = program.send(answer)
            answer = object()
            recorder.record_request(request, answer)
    except StopIteration:
        pass
    assert recorder.failed is None or not left
    kinds = [step.kind for step in recorder.steps]
    assert [kinds.count(kind) for kind in (Kind.AFTER, Kind.JOIN)] == [count] * 2
    if count:  # memory that it uses is not freed before
        begin, end = kinds.index(Kind.AFTER), kinds.index(Kind.JOIN)
        used = {slot for step in recorder.steps[begin:end] for slot in step.slots}
        assert used and used <= set(recorder.steps[end].slots)
    assert not recorder.is_after
