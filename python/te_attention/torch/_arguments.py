"""The arguments of the operators of attention as a tuple, and the orders of dimensions."""

from collections import namedtuple
from collections.abc import Callable

from te_attention.torch._options import MINIMAL, NAMES, OPTIONS

NUM_INPUTS = 3  # q, k and v precede the options
NONE = 0.0  # of softcap and dropout: one object, so that trimmed() recognises it

# The arguments of forward, backward and explain, with the defaults of their schema. A window of -1
# is unbounded; a length of -1 follows from the tensors.
_DEFAULTS = tuple(NONE if option.type == "float" else option.default for option in OPTIONS)
Arguments = namedtuple("Arguments", NAMES, defaults=_DEFAULTS[NUM_INPUTS:])

# The positions of the tensors among the first n arguments, by n.
_TENSORS = [i for i, option in enumerate(OPTIONS) if option.is_tensor]
TENSORS = [[i for i in _TENSORS if i < n] for n in range(len(NAMES) + 1)]
TRAINING, BIAS, SINK = map(NAMES.index, ("training", "bias", "sink"))


def _default_test(first: int, last: int) -> Callable[[tuple], bool]:
    """A function that tells whether arguments [first, last) have their defaults.

    Its source is generated, because a loop over the arguments takes a microsecond. Tensors are
    compared by identity: `tensor == None` takes 20 microseconds.
    """
    tensors = " is ".join(f"a[{i}]" for i in _TENSORS if first <= i < last)
    source = f"lambda a: {tensors} is None and a[{first}:{last}] == defaults"
    return eval(source, {"defaults": _DEFAULTS[first:last]})


# Two groups: most calls with options beyond the minimal signature use the first group alone.
_PAGE_TABLE = NAMES.index("page_table")
_first_is_default = _default_test(MINIMAL, _PAGE_TABLE)
_second_is_default = _default_test(_PAGE_TABLE, len(NAMES))


def trimmed(arguments: tuple) -> tuple:
    """Without the trailing defaults: each argument passed costs 0.2 microseconds."""
    n = len(arguments)
    if _second_is_default(arguments):
        n = MINIMAL if _first_is_default(arguments) else _PAGE_TABLE
    while arguments[n - 1] is _DEFAULTS[n - 1]:
        n -= 1
    return arguments[:n]


# The positions of batch, row and head in a tensor of a format; None: the format has none. The head
# dimension is last.
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
