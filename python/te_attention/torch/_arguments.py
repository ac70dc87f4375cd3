"""The arguments of the operators of attention, by name, and the orders of dimensions."""

from typing import NamedTuple

from torch import Tensor

FEW = 7  # that many arguments take the operators with "few" in their names, and inference
OPTIONS = 3  # q, k and v come before them
NONE = 0.0  # of softcap and dropout: one object, so that trimmed() knows it


class Arguments(NamedTuple):
    """What forward, backward and explain take, with the defaults of their schema.

    What is seldom given comes last, because trailing defaults need not be passed. A window of -1
    has no bound; a length of -1 follows from the tensors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    format: str = "bhsd"
    mask: str = "none"
    training: bool = False
    scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    dropout: float = NONE
    rng_state: Tensor | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    max_seqlen_q: int = -1
    max_seqlen_kv: int = -1
    page_table: Tensor | None = None
    softcap: float = NONE
    slopes: Tensor | None = None
    alibi: bool = False
    offsets_q: Tensor | None = None
    offsets_kv: Tensor | None = None
    page_table_v: Tensor | None = None
    origin: Tensor | None = None
    pre_scale_bias: bool = False
    off_by_one: bool = False
    max_logit: bool = False
    deterministic: bool = False
    engine: str = ""


# The places of the tensors among the first arguments, by the number of these; and of some.
_TENSORS = [i for i, kind in enumerate(Arguments.__annotations__.values()) if "Tensor" in str(kind)]
TENSORS = [[i for i in _TENSORS if i < n] for n in range(len(Arguments._fields) + 1)]
TRAINING, DROPOUT, RNG_STATE, BIAS, SINK, CU_SEQLENS_Q, CU_SEQLENS_KV = map(
    Arguments._fields.index,
    ("training", "dropout", "rng_state", "bias", "sink", "cu_seqlens_q", "cu_seqlens_kv"),
)
PAGE_TABLE, SLOPES, OFFSETS_Q, OFFSETS_KV, PAGE_TABLE_V, ORIGIN = map(
    Arguments._fields.index,
    ("page_table", "slopes", "offsets_q", "offsets_kv", "page_table_v", "origin"),
)

_DEFAULTS = (None,) * OPTIONS + tuple(Arguments._field_defaults.values())
_SELDOM, _RARE = _DEFAULTS[DROPOUT:PAGE_TABLE], _DEFAULTS[PAGE_TABLE:]


def _is_rare_default(a: tuple) -> bool:
    table, slopes, rows_q, rows_kv = a[PAGE_TABLE], a[SLOPES], a[OFFSETS_Q], a[OFFSETS_KV]
    return (
        table is slopes is rows_q is rows_kv is a[PAGE_TABLE_V] is a[ORIGIN] is None
        and a[PAGE_TABLE:] == _RARE
    )


def _is_seldom_default(a: tuple) -> bool:
    return (
        a[RNG_STATE] is a[BIAS] is a[SINK] is a[CU_SEQLENS_Q] is a[CU_SEQLENS_KV] is None
        and a[DROPOUT:PAGE_TABLE] == _SELDOM
    )


def trimmed(arguments: tuple) -> tuple:
    """Without the trailing defaults: each argument passed costs 0.2 microseconds."""
    # Many compared at once, because one after the other takes a microsecond; but never a tensor,
    # whose comparison with None takes 20.
    n = len(arguments)
    if _is_rare_default(arguments):
        n = DROPOUT if _is_seldom_default(arguments) else PAGE_TABLE
    while arguments[n - 1] is _DEFAULTS[n - 1]:
        n -= 1
    return arguments[:n]


# Where batch, row and head are in a tensor of a format; None: not there. The element is last.
FORMATS: dict[str, tuple[int | None, int, int]] = {
    "bhsd": (0, 2, 1),
    "bshd": (0, 1, 2),
    "sbhd": (1, 0, 2),
    "thd": (None, 0, 1),
}


def formats_of(a: Arguments) -> tuple[str, str]:
    """The formats of q, and of k and v."""
    q, _, kv = a.format.partition("_")
    if not kv:
        kv = "bshd" if q == "thd" and a.page_table is not None else q
    return q, kv
