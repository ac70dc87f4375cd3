"""KV caches: every step of a serving loop against full attention, and the managers' bookkeeping."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from te_attention import torch as tea
from transformer_engine.pytorch.attention.inference import (
    InferenceParams,
    NonPagedKVCacheManager,
    PagedKVCacheManager,
)
from transformer_engine.pytorch.cpp_extensions import fused_attn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
F16 = fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
FORMATS = ("bshd", "sbhd", "thd")
PAGES = (None, 1, 16, 64, 256)  # None: not paged
BATCH, LONGEST, CONTEXT, HEADS, HEADS_KV, DIM, DIM_V = 3, 256, 16, 4, 2, 64, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@dataclass
class Request:
    """A sequence that is served: all its tokens, and what full attention gives for them."""

    context: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    full: torch.Tensor


def requests(dtype: torch.dtype, device: str, count: int = 7) -> list[Request]:
    torch.manual_seed(count)
    out = []
    for i in range(count):
        context = 1 + (5 * i + 3) % CONTEXT
        length = context + (1, 4, 0, 9, 2)[i % 5]
        options = {"dtype": dtype, "device": device}
        q, k, v = (
            torch.randn(length, heads, dim, **options)
            for heads, dim in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
        )
        full = tea.attention(q[None], k[None], v[None], format="bshd", mask="causal")[0]
        out.append(Request(context, q, k, v, full))
    return out


def schedule(served: list[Request]) -> Iterator[OrderedDict[int, int]]:
    """Steps of a loop that takes in a new request as soon as one is finished."""
    done: dict[int, int] = {}
    running: list[int] = []
    waiting = list(range(len(served)))
    while waiting or running:
        step = OrderedDict((i, 1) for i in running)
        while waiting and len(step) < BATCH:
            first = waiting.pop(0)
            step[first] = served[first].context
        yield step
        for i, new in step.items():
            done[i] = done.get(i, 0) + new
        running = [i for i in step if done[i] < len(served[i].q)]


def params(page_size: int | None, form: str, dtype: torch.dtype, device: str) -> InferenceParams:
    pages = {} if page_size is None else {"is_paged": True, "page_size": page_size}
    sizes = (BATCH, LONGEST, HEADS_KV, DIM, dtype, DIM_V)
    out = InferenceParams(*sizes, **pages, max_ctx_len=CONTEXT, qkv_format=form, device=device)
    out.allocate_memory(1)
    return out


def rows_of(tensor: torch.Tensor, step: dict[int, int], form: str) -> Iterator[tuple]:
    """The sequences of a step and the place of their new tokens in a tensor of that format."""
    start = 0
    for row, (i, new) in enumerate(step.items()):
        if form == "thd":
            yield i, tensor[start : start + new]
        else:
            yield i, (tensor[row] if form == "bshd" else tensor[:, row])[:new]
        start += new


def gather(
    inputs: list, served: list[Request], ours: InferenceParams, step: dict, form: str
) -> None:
    """The new tokens of a step into buffers of that format, which hold NaN elsewhere."""
    for name, tensor in zip(("q", "k", "v"), inputs, strict=True):
        tensor.fill_(torch.nan)
        for i, place in rows_of(tensor, step, form):
            first = ours.sequences_pre_step[i]
            place.copy_(getattr(served[i], name)[first : first + step[i]])


def buffers(form: str, batch: int, length: int, like: Request) -> list[torch.Tensor]:
    shapes = {"thd": (batch * length,), "bshd": (batch, length), "sbhd": (length, batch)}
    return [t.new_empty(*shapes[form], *t.shape[1:]) for t in (like.q, like.k, like.v)]


def attend(ours: InferenceParams, q, k, v, form: str) -> torch.Tensor:
    """A layer's work: append, then attention on the caches."""
    k, v, cu_q, cu_kv, longest, _ = ours.step(1, k, v, form)
    batch, length = {"thd": (BATCH, CONTEXT), "bshd": q.shape[:2], "sbhd": q.shape[1::-1]}[form]
    table = ours.cache_manager.page_table if ours.is_paged else None
    o, _ = fused_attn.fused_attn_fwd(
        *(False, length, longest, cu_q[: batch + 1], cu_kv[: batch + 1], q, k, v, q.dtype, F16),
        page_table_k=table,
        page_table_v=table,
        qkv_layout=("paged_kv_" if ours.is_paged else "") + f"{form}_bshd_bshd",
        attn_mask_type="padding_causal_bottom_right",
        window_size=(-1, 0),
    )
    return o


def check(
    o: torch.Tensor, served: list[Request], ours: InferenceParams, step: dict, form: str
) -> int:
    """Compares every new token of a step; returns how many there were."""
    for i, got in rows_of(o, step, form):
        first = ours.sequences_pre_step[i]
        want = served[i].full[first : first + step[i]]
        tolerance = TOLERANCE[o.dtype]
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    return sum(step.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("page_size", PAGES)
def test_each_step_is_full_attention(page_size, form: str, dtype: torch.dtype, device: str) -> None:
    served = requests(dtype, device)
    ours = params(page_size, form, dtype, device)
    tokens = 0
    for step in schedule(served):
        ours.pre_step(step)
        inputs = buffers(form, BATCH if form == "thd" else len(step), max(step.values()), served[0])
        gather(inputs, served, ours, step, form)
        o = attend(ours, *inputs, form)
        tokens += check(o, served, ours, step, form)
    assert tokens == sum(len(request.q) for request in served)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("page_size", PAGES)
def test_each_replay_is_full_attention(page_size, form: str, dtype: torch.dtype) -> None:
    served = requests(dtype, "cuda")
    ours = params(page_size, form, dtype, "cuda")
    inputs = buffers(form, BATCH, CONTEXT, served[0])
    first = next(schedule(served))
    ours.pre_step(first)
    gather(inputs, served, ours, first, form)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # appending the same tokens again changes nothing
            attend(ours, *inputs, form)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(ours, *inputs, form)
    ours.reset()
    for step in schedule(served):
        ours.pre_step(step)
        gather(inputs, served, ours, step, form)
        graph.replay()
        check(o, served, ours, step, form)


@pytest.mark.parametrize("page_size", [None, 4])
def test_a_context_may_come_in_chunks(page_size: int | None) -> None:
    served = requests(torch.float32, "cpu", count=1)
    ours = params(page_size, "bshd", torch.float32, "cpu")
    for start in range(0, len(served[0].q), 3):
        step = OrderedDict({0: min(3, len(served[0].q) - start)})
        ours.pre_step(step)
        inputs = buffers("bshd", 1, step[0], served[0])
        gather(inputs, served, ours, step, "bshd")
        check(attend(ours, *inputs, "bshd"), served, ours, step, "bshd")


def test_buffers_keep_their_addresses_and_repeat_the_last_length() -> None:
    ours = params(16, "thd", torch.float32, "cpu")
    addresses = [t.data_ptr() for t in (ours.cu_seqlens_q, ours.cu_seqlens_kv)]
    ours.pre_step(OrderedDict({7: 5, 8: 2}))
    ours.pre_step(OrderedDict({8: 1}))
    assert ours.cu_seqlens_q.tolist() == [0, 1, 1, 1]
    assert ours.cu_seqlens_kv.tolist() == [0, 3, 3, 3]
    assert ours.get_seqlens_pre_step().tolist() == [2, 0, 0]
    assert addresses == [t.data_ptr() for t in (ours.cu_seqlens_q, ours.cu_seqlens_kv)]
    assert (ours.sequences, ours.batch_size) == ({8: 3}, 1)
    assert (ours.input_qkv_format, ours.output_qkv_format) == ("thd", "thd_2bshd")


def test_rows_that_go_on_move_to_the_front() -> None:
    manager = NonPagedKVCacheManager(4, 8, 1, 8, torch.float32, device=torch.device("cpu"))
    manager.pre_step(OrderedDict({1: 2, 2: 2, 3: 2}))
    manager.pre_step(OrderedDict({1: 1, 2: 1, 3: 1}))
    assert (manager.batch_indices.tolist(), manager.need_reindex) == ([0, 1, 2, 3], False)
    assert manager.pre_step(OrderedDict({3: 1, 4: 6})) == {3: 4, 4: 6}
    assert (manager.batch_indices.tolist(), manager.need_reindex) == ([2, 0, 1, 3], True)
    manager.reset()
    assert manager.batch_indices.tolist() == [0, 1, 2, 3]
    assert not manager.sequences


def test_pages_are_given_and_taken_back() -> None:
    limits = {"max_batch_size": 2, "max_seqlen": 8, "device": torch.device("cpu")}
    manager = PagedKVCacheManager(4, 2, 1, 8, torch.float32, **limits)
    manager.pre_step(OrderedDict({5: 2, 6: 3}))
    assert manager.page_table.tolist() == [[0, 0, 0, 0], [1, 2, 0, 0]]
    manager.pre_step(OrderedDict({5: 1, 6: 1}))
    assert (manager.get_page_list(5), manager.get_page_count(6)) == ([0, 3], 2)
    assert (manager.get_sequence_count(), manager.get_sequence_lengths()) == (2, [3, 4])
    assert not manager.has_free_page()
    with pytest.raises(RuntimeError, match="free pages are 0 of 4; needs 1"):
        manager.pre_step(OrderedDict({5: 1, 6: 1}))
    with pytest.raises(RuntimeError, match="free pages are 2 of 4; needs 3"):
        manager.pre_step(OrderedDict({6: 2, 7: 3}))
    assert manager.pre_step(OrderedDict({6: 2})) == {6: 6}  # nothing had changed
    assert manager.page_table.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]
    manager.reset()
    assert len(manager.free_pages) == 4


def test_print_cache(capsys: pytest.CaptureFixture) -> None:
    limits = {"max_batch_size": 2, "max_seqlen": 8, "device": torch.device("cpu")}
    manager = PagedKVCacheManager(4, 2, 1, 8, torch.float32, **limits)
    manager.pre_step(OrderedDict({5: 3}))
    manager.print_cache()
    assert "sequence 5: 3 tokens in pages [0, 1]" in capsys.readouterr().out


@pytest.mark.parametrize("page_size", [None, 16])
def test_dense_caches_of_the_sequences_in_use(page_size: int | None) -> None:
    served = requests(torch.float32, "cpu", count=2)
    ours = params(page_size, "thd", torch.float32, "cpu")
    step = OrderedDict({0: served[0].context, 1: served[1].context})
    ours.pre_step(step)
    inputs = buffers("thd", BATCH, CONTEXT, served[0])
    gather(inputs, served, ours, step, "thd")
    attend(ours, *inputs, "thd")
    k, v = ours.convert_paged_to_nonpaged(1)
    assert (k.shape, v.shape) == ((2, LONGEST, HEADS_KV, DIM), (2, LONGEST, HEADS_KV, DIM_V))
    for i, request in enumerate(served):
        assert torch.equal(k[i, : request.context], request.k[: request.context])
        assert torch.equal(v[i, : request.context], request.v[: request.context])


def test_a_manager_of_ones_own() -> None:
    class Mine(NonPagedKVCacheManager):
        pass

    ours = InferenceParams(2, 8, 1, 8, torch.float32, custom_cache_manager=Mine)
    assert isinstance(ours.cache_manager, Mine)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_heads_kv": None}, "num_heads_kv is None; needs that of the keys"),
        ({"is_paged": True}, "page_size is None; needs a divisor of max_sequence_length, 8"),
        ({"is_paged": True, "page_size": 3}, "page_size is 3; needs a divisor of"),
        ({"qkv_format": "thd"}, "max_ctx_len is None; needs the most new tokens"),
        ({"qkv_format": "bhsd"}, "qkv_format is 'bhsd'; needs bshd, sbhd or thd"),
        ({"num_heads_kv": 0}, "num_heads_kv is 0; needs a positive integer"),
        ({"head_dim_k": 8.0}, "head_dim_k is 8.0; needs a positive integer"),
        ({"head_dim_v": -8}, "head_dim_v is -8; needs a positive integer"),
        ({"head_dim_v": 0}, "head_dim_v is 0; needs a positive integer"),
        (
            {"is_paged": True, "page_size": 4, "total_num_pages": 0},
            "total_num_pages is 0; needs a positive integer",
        ),
        ({"dtype": torch.int32}, "dtype is torch.int32; needs a floating-point type"),
    ],
)
def test_what_the_constructor_refuses(changes: dict, text: str) -> None:
    sizes = {"num_heads_kv": 1, "head_dim_k": 8, "dtype": torch.float32}
    with pytest.raises(ValueError, match=text):
        InferenceParams(2, 8, **{**sizes, **changes})


@pytest.mark.parametrize("sizes", [(0, 8), (2, -1)])
def test_a_cache_for_nothing_is_refused_by_name(sizes: tuple[int, int]) -> None:
    name, value = ("max_batch_size", 0) if sizes[0] == 0 else ("max_sequence_length", -1)
    with pytest.raises(ValueError, match=f"{name} is {value}; needs a positive integer"):
        InferenceParams(*sizes, num_heads_kv=1, head_dim_k=8, dtype=torch.float32)


def test_a_list_as_a_step_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="step_dict is of type list; needs a dictionary"):
        params(None, "bshd", torch.float32, "cpu").pre_step([1, 1])


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({2: 1, 1: 1}, r"step_dict lists sequences \[2, 1\]; needs .* in their order: \[1, 2\]"),
        ({3: 1, 1: 1}, r"step_dict lists sequences \[3, 1\]; needs .* in their order: \[1\]"),
        ({1: 1, 2: 1, 3: 1, 4: 1}, "step_dict has 4 sequences; needs at most 3"),
        ({1: -1}, r"step_dict\[1\] is -1; needs 0 or more new tokens"),
        ({1: 255}, "sequence 1 has 257 tokens with this step; needs at most 256"),
    ],
)
def test_what_pre_step_refuses(step: dict, text: str) -> None:
    ours = params(None, "bshd", torch.float32, "cpu")
    ours.pre_step(OrderedDict({1: 2, 2: 2}))
    with pytest.raises(ValueError, match=text):
        ours.pre_step(OrderedDict(step))


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_step_without_pre_step_is_refused(page_size: int | None) -> None:
    ours = params(page_size, "bshd", torch.float32, "cpu")
    k, v = (torch.ones(1, 1, HEADS_KV, dim) for dim in (DIM, DIM_V))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"pre_step\(\) has not been called; needs a call"):
            ours.step(1, k, v, "bshd")
        ours.pre_step(OrderedDict({1: 1}))
        assert ours.step(1, k, v, "bshd")[0].count_nonzero() == k.numel()
        ours.reset()
        ours.allocate_memory(1)
