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


# The places of the tensors, and of some arguments.
TENSORS = tuple(
    i for i, kind in enumerate(Arguments.__annotations__.values()) if "Tensor" in str(kind)
)
TRAINING, RNG_STATE, BIAS, SINK, CU_SEQLENS_Q, CU_SEQLENS_KV, PAGE_TABLE, SLOPES, ORIGIN = map(
    Arguments._fields.index,
    (
        *("training", "rng_state", "bias", "sink", "cu_seqlens_q", "cu_seqlens_kv"),
        *("page_table", "slopes", "origin"),
    ),
)

_DEFAULTS = (None,) * 3 + tuple(Arguments._field_defaults.values())
_RARE = _DEFAULTS[FEW:]


def _is_plain(a: tuple) -> bool:
    """Whether no tensor is given but q, k, v and what needs one of these beside it."""
    bias, sink, cu_q, cu_kv = a[BIAS], a[SINK], a[CU_SEQLENS_Q], a[CU_SEQLENS_KV]
    rng, table, slopes, origin = a[RNG_STATE], a[PAGE_TABLE], a[SLOPES], a[ORIGIN]
    return bias is sink is cu_q is cu_kv is rng is table is slopes is origin is None


def trimmed(arguments: tuple) -> tuple:
    """Without the trailing defaults: each argument passed costs 0.2 microseconds."""
    # Compared at once, because one after the other takes a microsecond; but never a tensor, whose
    # comparison with None takes 20.
    n = FEW if _is_plain(arguments) and arguments[FEW:] == _RARE else len(arguments)
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
