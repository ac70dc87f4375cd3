"""Error texts in the caller's terms, computed only after something has failed."""

import difflib
import inspect
import itertools
import re
from collections.abc import Callable

import torch
from torch import Tensor

from te_attention.torch._types import check_types

# Other libraries' names of options, and the text to write here.
SYNONYMS = {
    **dict.fromkeys(("is_causal", "causal"), "mask='causal', or mask='causal_bottom_right'"),
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "attn_bias"),
        "bias=, a boolean mask as torch.where(mask, 0.0, -torch.inf), or mask= by name",
    ),
    **dict.fromkeys(("key_padding_mask", "seqlens_k", "cache_seqlens"), "cu_seqlens_kv="),
    **dict.fromkeys(("dropout_p", "p", "attention_dropout"), "dropout="),
    **dict.fromkeys(("softmax_scale", "scaling", "sm_scale", "scale_factor"), "scale="),
    **dict.fromkeys(("window_size", "sliding_window"), "window=(left, right)"),
    **dict.fromkeys(("logits_soft_cap", "soft_cap"), "softcap="),
    **dict.fromkeys(("alibi_slopes", "slopes"), "alibi="),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), "sink="),
    **dict.fromkeys(("enable_gqa", "num_kv_heads"), "nothing: k and v may have fewer heads than q"),
    **dict.fromkeys(("training", "is_training"), "nothing: it follows from requires_grad"),
    **dict.fromkeys(("block_table", "block_tables"), "page_table="),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse", "return_aux"), "return_lse=True"),
    "cu_seqlens": "cu_seqlens_q= and cu_seqlens_kv=",
    "cu_seqlens_k": "cu_seqlens_kv=",
    "max_seqlen": "max_seqlen_q= and max_seqlen_kv=",
    "max_seqlen_k": "max_seqlen_kv=",
    **dict.fromkeys(("layout", "qkv_format", "tensor_layout", "input_layout"), "format="),
    "seed": "rng_state= or generator=",
    "backend": "engine=",
}
BAD_LENGTHS = "cu_seqlens_q, cu_seqlens_kv or their offsets"  # how the operators begin that error
UNNAMED = "of another kind"  # how the operators call a dtype that they have no name for
MAX_ORIGIN = 2**40
OUT_OF_MEMORY = re.compile(r"out of memory: (\d+) bytes on (\S+)")


class HostOutOfMemoryError(MemoryError, RuntimeError):
    """No memory on the CPU. Also a RuntimeError, as what PyTorch raises there is."""


def raise_if_out_of_memory(error: RuntimeError) -> None:
    """Raises torch.OutOfMemoryError for an operator that could not allocate on a GPU.

    PyTorch itself is asked for the same memory, because the operators' interface to its allocator
    passes on no exceptions: its own error says what is allocated, or why the device is unusable.
    """
    found = OUT_OF_MEMORY.search(str(error))
    if found is None:
        return
    size, device = int(found[1]), found[2]
    text = f"{device} is out of memory: {size} bytes ({size / 2**20:.1f} MiB) could not be "
    text += "allocated for attention"
    if device == "cpu":
        raise HostOutOfMemoryError(text) from None
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as own:
        raise torch.OutOfMemoryError(f"{text}. {own}") from None
    raise torch.OutOfMemoryError(text) from None


def guarded(operator: Callable) -> Callable:
    """The operator; where it has no memory, torch.OutOfMemoryError is raised."""

    def call(*arguments: object) -> object:
        try:
            return operator(*arguments)
        except RuntimeError as error:
            raise_if_out_of_memory(error)
            raise

    return call


def refuse_unknown(names: dict[str, object], function: object) -> None:
    """Raises TypeError for the first of these keyword arguments, with the right name if known."""
    name = next(iter(names))
    known = [p for p in inspect.signature(function).parameters if not p.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1)
    hint = SYNONYMS.get(name) or (f"{close[0]}=" if close else "one of " + ", ".join(known[3:]))
    raise TypeError(f"{name} is not an argument of attention(); needs {hint}")


def _check_layout(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.is_nested and not (tensor.layout == torch.jagged and q.is_nested):
        raise TypeError(
            f"{name} is a nested tensor of layout {tensor.layout}; needs torch.jagged for q, k and "
            "v alike (torch.nested.nested_tensor(..., layout=torch.jagged)), or dense tensors"
        )
    if tensor.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{name} is of layout {tensor.layout}; needs a dense tensor (.to_dense())")
    if tensor.dim() == 0 and name in ("q", "k", "v"):
        raise RuntimeError(f"{name} is of shape []; needs a dimension for each of the format")
    if tensor.dtype.is_complex:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"{name}.dtype is {dtype}; needs float16, bfloat16, float32 or float64")


class _Side:
    """The queries, or the keys and values, of a call whose lengths are invalid."""

    def __init__(self, side: str, arguments: dict[str, object]) -> None:
        a, form = arguments, arguments["format"].split("_")[0 if side == "q" else -1]
        self.tensor, self.cu_name = "q" if side == "q" else "k", f"cu_seqlens_{side}"
        self.bound_name, self.bound = f"max_seqlen_{side}", a[f"max_seqlen_{side}"]
        table = a["page_table"] if side == "kv" else None
        shape = a[self.tensor].shape
        row = {"bshd": 1, "sbhd": 0, "thd": 0 if table is None else 1}.get(form, 2)
        self.rows, self.unit = shape[row], f"rows of {self.tensor}"
        self.is_ragged = form == "thd" and table is None
        if table is not None:
            self.rows, self.unit = table.shape[1] * shape[row], "slots of page_table"
        self.values = a[self.cu_name].tolist()
        self.offsets_name, offsets = f"offsets_{side}", a[f"offsets_{side}"]
        self.offsets = None if offsets is None else offsets.tolist()

    def check(self) -> None:
        """Raises for the first invalid length, with its tensor, index and value."""
        for i, (begin, end) in enumerate(itertools.pairwise(self.values)):
            place, length = f"{self.cu_name}[{i + 1}] is {end}", end - begin
            if length < 0:
                raise RuntimeError(f"{place}; needs at least {self.cu_name}[{i}], which is {begin}")
            if self.bound is not None and length > self.bound:
                raise RuntimeError(
                    f"{self.bound_name} is {self.bound}; needs at least {length}, the length of "
                    f"sequence {i} in {self.cu_name}"
                )
            self._check_place(i, begin, length, place)

    def _check_place(self, i: int, begin: int, length: int, place: str) -> None:
        if not self.is_ragged:
            if length > self.rows:
                raise RuntimeError(
                    f"{place}, a length of {length}; needs at most the {self.rows} {self.unit}"
                )
            return
        name, first = f"{self.cu_name}[{i}]", begin
        if self.offsets is not None:
            name, first = f"{self.offsets_name}[{i}]", self.offsets[i]
        if first < 0:
            raise RuntimeError(f"{name} is {first}; needs 0 or more")
        if first + length > self.rows:
            seen = place if self.offsets is None else f"{name} is {first}, for {length} tokens"
            raise RuntimeError(f"{seen}; needs at most the {self.rows} tokens of {self.tensor}")


def _check_pages(arguments: dict[str, object]) -> None:
    """Raises for the first page that a sequence reads and that the pool does not have."""
    for name, pool in (("page_table", "k"), ("page_table_v", "v")):
        table = arguments[name]
        if table is None:
            continue
        pages = arguments[pool].shape[0]
        for index in ((table < 0) | (table >= pages)).nonzero().tolist():
            value = table[tuple(index)].item()
            raise RuntimeError(
                f"{name}{index} is {value}; needs a page of {pool}, 0 to {pages - 1}"
            )


def _check_values(text: str, arguments: dict[str, object]) -> None:
    """Raises for the invalid value in lengths, pages or the origin that an operator found."""
    if text.startswith(BAD_LENGTHS):
        for side in ("q", "kv"):
            if arguments[f"cu_seqlens_{side}"] is not None:
                _Side(side, arguments).check()
    if text.startswith("page_table is out of range"):
        _check_pages(arguments)
    if text.startswith("origin is out of range"):
        for i, value in enumerate(arguments["origin"].tolist()):
            if not 0 <= value <= MAX_ORIGIN:
                raise RuntimeError(f"origin[{i}] is {value}; needs from 0 to 2^40")


def _check_dtype(text: str, arguments: dict[str, object]) -> None:
    """Raises with the name of a dtype that the operators have none for."""
    name, found, rest = text.partition(f".dtype is {UNNAMED}")
    if found and isinstance(arguments.get(name), Tensor):
        dtype = str(arguments[name].dtype).removeprefix("torch.")
        raise RuntimeError(f"{name}.dtype is {dtype}{rest}")


def _raise_clearer(error: Exception, arguments: dict[str, object]) -> None:
    text = str(error)
    if isinstance(error, RuntimeError):
        raise_if_out_of_memory(error)
        _check_values(text, arguments)
        _check_dtype(text, arguments)
    for name in ("q", "k", "v", "bias", "sink"):
        if isinstance(arguments[name], Tensor):
            _check_layout(name, arguments[name], arguments["q"])
    if not isinstance(error, RuntimeError) or "Expected a value of type" in text:
        check_types(arguments)


def raise_clearer(error: Exception, arguments: dict[str, object]) -> None:
    """Raises the error that names the caller's mistake, if there is a clearer one than `error`.

    `arguments`: the local variables of attention().
    """
    try:
        _raise_clearer(error, arguments)
    except Exception as clearer:
        raise clearer from None
