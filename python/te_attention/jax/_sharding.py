"""Attention over a mesh: batch and heads stay split, all other dimensions are whole on each device.

One plan serves both kinds of axes: automatic ones through a rule of the partitioner (Shardy),
explicit ones through `shard_map`. Inside a region with manual axes the call is a plain one.

The partitioner may offer any sharding, a split sequence too: the plan states that of every operand
and result. Heads of query and of key are two factors: as one that is a multiple of the other,
Shardy could cut an axis of the mesh in two, which no PartitionSpec can say.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_attention._alibi import published_slopes
from te_attention.jax._arguments import RANK
from te_attention.jax._call import Options, statistics_dtype

# The last dimensions of each tensor: b batch, s and t rows, h and g heads of query and of key. A
# gradient has those of its tensor. The other tensors are small, and whole everywhere.
DENSE = {
    **{"q": "bshd", "k": "btgd", "v": "btge", "o": "bshe", "dout": "bshe", "lse": "bhs"},
    **{"max": "bhs", "dlse": "bhs", "bias": "bhst", "sink": "h", "slopes": "bh"},
}
RAGGED = {
    **{"q": "shd", "k": "tgd", "v": "tge", "o": "she", "dout": "she", "lse": "sh"},
    **{"max": "sh", "dlse": "sh", "bias": "nhij", "sink": "h", "slopes": "nh"},
}
SPLIT = "bhg"  # the dimensions that may be split
Function = Callable[[Options, dict], dict]


def _letters(ragged: bool, name: str, ndim: int) -> str:
    table = RAGGED if ragged else DENSE
    return table.get(name, table.get(name[1:], "-" * ndim))[-ndim:]


def _dimensions(ragged: bool, arrays: dict, name: str) -> str:
    """A letter for each dimension of a tensor; "-" for one that is none of q, k and v."""
    of = arrays.get(name, arrays.get(name[1:]))
    letters = _letters(ragged, name, RANK if of is None else of.ndim)
    if name not in ("bias", "dbias"):
        return letters
    return "".join("-" if n == 1 else x for x, n in zip(letters, of.shape, strict=True))


def _rule(ragged: bool, arrays: dict, results: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule, and the factors that must be whole, in the order of their first use."""
    count, whole, sides = 0, {}, []
    for names in (arrays, results):
        side = []
        for name in names:
            factors = []
            for letter in _dimensions(ragged, arrays, name):
                count += letter == "-"
                factor = f"u{count}" if letter == "-" else letter
                if factor not in SPLIT:
                    whole[factor] = None
                factors.append(factor)
            side.append(" ".join(factors))
        sides.append(", ".join(side))
    return " -> ".join(sides), tuple(whole)


def axes_of(entry: object) -> tuple[str, ...]:
    """The axes of the mesh that one entry of a PartitionSpec has."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


class Plan(NamedTuple):
    """The axes of a mesh that split the batch, and those that split the heads."""

    ragged: bool
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    splits_keys: bool  # heads of key are split as those of query; else they are whole

    def spec(self, letters: str) -> P:
        """The PartitionSpec of a tensor with these dimensions."""
        keys = self.heads if self.splits_keys else ()
        at = {"b": self.batch, "h": self.heads, "g": keys}
        return P(*(at.get(letter) or None for letter in letters))

    def specs(self, arrays: dict, names: tuple[str, ...]) -> tuple[P, ...]:
        """The PartitionSpecs of tensors by name."""
        return tuple(self.spec(_dimensions(self.ragged, arrays, name)) for name in names)


def _plan(ragged: bool, sizes: dict[str, int], shapes: dict, spec: P) -> Plan:
    """The plan that keeps the sharding of query; a dimension that does not divide stays whole."""
    spec = (*spec, *(None,) * (len(shapes["q"].shape) - len(spec)))
    batch, heads = () if ragged else axes_of(spec[0]), axes_of(spec[-2])

    def parts(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[a] for a in axes)

    if shapes["q"].shape[0] % parts(batch):
        batch = ()
    if shapes["q"].shape[-2] % parts(heads):
        heads = ()
    return Plan(ragged, batch, heads, shapes["k"].shape[-2] % parts(heads) == 0)


def moved(origin: jax.Array | None, *more: object) -> jax.Array:
    """An origin, int64 in pairs of words, moved by batch, head, row and column to a shard.

    Of arrays `more` an origin for each element.
    """
    origin = jnp.zeros(8, jnp.uint32) if origin is None else origin
    pairs = origin.reshape(4, 2)
    more = jnp.stack([jnp.asarray(x) for x in more], axis=-1).astype(jnp.uint32)
    low = pairs[:, 0] + more
    high = pairs[:, 1] + (low < more).astype(jnp.uint32)
    return jnp.stack([low, high], axis=-1).reshape(*more.shape[:-1], 8)


class _Shard:
    """The call of one device: the operands it runs with, and the results that it returns."""

    def __init__(self, plan: Plan, options: Options, whole: dict, arrays: dict) -> None:
        self.plan, self.options, self.whole, self.arrays = plan, options, whole, dict(arrays)
        q = self.arrays["q"]
        zero = jnp.zeros((), jnp.int32)
        index = jax.lax.axis_index
        self.first = index(plan.batch) * q.shape[0] if plan.batch else zero
        self.head = index(plan.heads) * q.shape[-2] if plan.heads else zero
        self.keys = None  # heads of key that this device reads, where each device holds all

    def prepare(self) -> dict:
        plan, arrays = self.plan, self.arrays
        rows, heads = arrays["q"].shape[0], arrays["q"].shape[-2]
        if plan.batch:
            for name in ("cu_seqlens_q", "cu_seqlens_kv"):
                if name in arrays:
                    some = jax.lax.dynamic_slice_in_dim(arrays[name], self.first, rows + 1)
                    arrays[name] = some - some[0]
        if plan.heads and self.options.alibi:
            dtype = statistics_dtype(arrays["q"].dtype)
            slopes = jnp.array(published_slopes(self.whole["q"].shape[-2]), dtype)
            arrays["slopes"] = jax.lax.dynamic_slice_in_dim(slopes, self.head, heads)
            self.options = self.options._replace(alibi=False)
        if self.options.dropout:
            arrays["origin"] = moved(arrays.get("origin"), self.first, self.head, 0, 0)
        if not plan.splits_keys:
            # Each key head serves a run of query heads; a run that a shard's edge cuts is read in
            # pieces of equal length.
            run = self.whole["q"].shape[-2] // self.whole["k"].shape[-2]
            piece = math.gcd(run, heads)
            self.keys = (self.head + piece * jnp.arange(heads // piece)) // run
            arrays |= {name: jnp.take(arrays[name], self.keys, axis=-2) for name in "kv"}
        return arrays

    def restore(self, out: dict) -> dict:
        """Sums over devices that share an operand, in at least float32."""
        plan, results = self.plan, {}
        for name, x in out.items():
            of, result = self.whole.get(name[1:]), x
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            if name in ("dk", "dv") and self.keys is not None:
                heads = jnp.arange(self.whole["k"].shape[-2])[:, None]
                own = [jnp.where(heads == self.keys[i], wide[..., i : i + 1, :], 0)
                       for i in range(x.shape[-2])]  # fmt: skip
                result = jax.lax.psum(sum(own), plan.heads).astype(x.dtype)
            elif name in ("dbias", "dsink") and of is not None:
                letters = _dimensions(plan.ragged, self.whole, name)
                lacking = plan.batch * ("b" not in letters) + plan.heads * ("h" not in letters)
                if lacking:
                    result = jax.lax.psum(wide, lacking).astype(x.dtype)
            results[name] = result
        return results


def _local(
    plan: Plan, function: Function, options: Options, whole: dict, results: tuple[str, ...]
) -> Callable:
    """The function of one device, of arrays in order."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = dict(zip(whole, arrays, strict=True))
        if not plan.batch and not plan.heads:
            out = function(options, given)
        else:
            shard = _Shard(plan, options, whole, given)
            given = shard.prepare()
            out = shard.restore(function(shard.options, given))
        return tuple(out[name] for name in results)

    return run


def _automatic(
    function: Function, options: Options, ragged: bool, results: tuple[str, ...], arrays: dict
) -> tuple[jax.Array, ...]:
    whole = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}

    def partition(mesh: object, operands: tuple, _: tuple) -> tuple:
        query = operands[list(whole).index("q")].sharding
        spec = query.spec if isinstance(query, NamedSharding) else P()
        plan = _plan(ragged, dict(mesh.shape), whole, spec)
        of = [plan.specs(whole, names) for names in (results, tuple(whole))]
        out, given = (tuple(NamedSharding(mesh, spec) for spec in specs) for specs in of)
        return mesh, _local(plan, function, options, whole, results), out, given

    def plain(*given: jax.Array) -> tuple[jax.Array, ...]:
        out = function(options, dict(zip(whole, given, strict=True)))
        return tuple(out[name] for name in results)

    rule, factors = _rule(ragged, arrays, results)
    call = custom_partitioning(plain)
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=factors)
    return call(*arrays.values())


def _explicit(
    function: Function, options: Options, ragged: bool, results: tuple[str, ...], arrays: dict
) -> tuple[jax.Array, ...]:
    mesh = jax.typeof(arrays["q"]).sharding.mesh
    whole = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    plan = _plan(ragged, dict(mesh.shape), whole, jax.typeof(arrays["q"]).sharding.spec)
    specs = plan.specs(whole, tuple(whole))
    run = _local(plan, function, options, whole, results)
    outputs = plan.specs(whole, results)
    split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)
    given = [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays.values(), specs, strict=True)
    ]
    out = list(split(*given))
    for i, name in enumerate(results):  # a gradient has the sharding of its tensor
        if name[1:] in arrays:
            out[i] = jax.sharding.reshard(out[i], jax.typeof(arrays[name[1:]]).sharding)
    return tuple(out)


def _varying(x: object) -> frozenset:
    """The manual axes over which a value differs, where `shard_map` checks that."""
    kind = jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):
        return frozenset(kind.manual_axis_type.varying)
    return kind.vma  # jax before 0.10


def cast_to_varying(arrays: dict, like: dict) -> dict:
    """The arrays, cast to vary over every manual axis over which some array of `like` varies.

    The cast makes JAX add up, over those axes, the gradient of an array that all devices share.
    """
    every = frozenset().union(*(_varying(x) for x in like.values()))
    out = dict(arrays)
    for name, x in arrays.items():
        more = tuple(sorted(every - _varying(x)))
        if more and hasattr(jax.lax, "pcast"):
            out[name] = jax.lax.pcast(x, more, to="varying")
        elif more:  # jax 0.7
            out[name] = jax.lax.pvary(x, more)
    return out


def is_manual() -> bool:
    """Whether the caller is inside a `shard_map`."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def check_partitioner() -> None:
    """Raises where JAX would abort the process: the other partitioner has no rule of attention."""
    is_shardy = getattr(jax.config, "jax_use_shardy_partitioner", True)
    if not is_shardy and jax.device_count() > 1 and not is_manual():
        raise NotImplementedError(
            "jax_use_shardy_partitioner is False; needs True: attention over several devices has "
            "a rule for Shardy alone, or call it inside jax.shard_map"
        )


def _is_explicit(arrays: dict) -> bool:
    mesh = jax.typeof(arrays["q"]).sharding.mesh
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def sharded(
    function: Function, options: Options, results: tuple[str, ...]
) -> Callable[[dict], dict]:
    """`function` of options and arrays by name, whose results have these names, over any mesh."""
    ragged = options.format == "thd"

    def run(arrays: dict) -> dict:
        if is_manual() or jax.device_count() == 1:
            return function(options, arrays)
        over = _explicit if _is_explicit(arrays) else _automatic
        out = over(function, options, ragged, results, arrays)
        return dict(zip(results, out, strict=True))

    return run
