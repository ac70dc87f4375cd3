"""attention(), in the convention of jax.nn.dot_product_attention, and its ragged form."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_attention.jax import _autodiff
from te_attention.jax._arguments import (
    RANK,
    bias_of,
    cumulative,
    flag,
    integers,
    options_of,
    refuse,
    tensor,
)
from te_attention.jax._call import Options
from te_attention.jax._segments import spans_of

UNBATCHED = 3  # dimensions
CHECKPOINT_NAME = "context"
OF_JAX = ("xla", "cudnn")


class Prepared(NamedTuple):
    """A call of attention(), its arguments checked: what explain() and cost() read."""

    options: Options
    arrays: dict
    restore: Callable[[str, jax.Array], jax.Array]  # a result, in the shape of the caller


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    bottom_right: bool = False,
    alibi: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    dropout: float = 0.0,
    dropout_key: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    max_segments: int | None = None,
    origin: Any = None,
    bias_type: str = "post_scale",
    return_max_logit: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    engine: str = "",
    checkpoint_name: str = CHECKPOINT_NAME,
) -> Any:
    """Attention of query over key and value, differentiable. Every option combines with others.

    The arguments up to `return_residual` are those of :func:`jax.nn.dot_product_attention`. Letters
    of shapes: B batch, T and S rows of query and of key, N heads of query, K heads of key (N is a
    multiple of K), H and D head dims of key and of value (multiples of 8, at most 1024, with
    gradients 512).

    Args:
        query: ``[B, T, N, H]`` or ``[T, N, H]``: float16, bfloat16, float32 or float64.
        key: ``[B, S, K, H]`` or ``[S, K, H]``, of the dtype of query.
        value: ``[B, S, K, D]`` or ``[S, K, D]``, of the dtype of query.
        bias: added to the scores, any broadcast of ``[B, N, T, S]``, in the dtype of query or
            float32. It has a gradient, of its own shape.
        mask: boolean, any broadcast of ``[B, N, T, S]``; False hides the key. It is read as a bias
            of 0 and -inf in its own shape: prefer the options below, which need no array.
        scale: of the scores. Default: 1 / sqrt(H).
        is_causal: a row attends to no later column.
        query_seq_lengths: ``[B]`` integers: rows of each query after its length are padding: O is
            0 there, and so are their gradients.
        key_value_seq_lengths: ``[B]`` integers, the same for key and value.
        local_window_size: (left, right), or one number for both: the columns before and after a
            row's own that it attends to, inclusive. None: no bound.
        implementation: None or "te_attention"; "xla" and "cudnn" call jax.nn, which takes none of
            the options below.
        return_residual: also return LSE, the natural log of the softmax's denominator
            ``[B, T, N]``, float32 (float64 for float64); -inf where a row attends to nothing. It
            has a gradient.
        bottom_right: the diagonal of is_causal and of windows ends at the last row and column (of
            each sequence) instead of beginning at the first.
        alibi: True: ALiBi with the published slopes; an array ``[N]`` or ``[B, N]``: these slopes,
            which have no gradient.
        softcap: c > 0: scores become ``c * tanh(score / c)``.
        sink: "off_by_one": one more term exp(0) in the denominator; an array ``[N]``: exp(sink[n]),
            with a gradient.
        dropout: probability of dropping, from 0 to below 1.
        dropout_key: the key of the dropout, as of ``jax.random.key()``. The pattern is a pure
            function of it: :func:`dropout_mask`.
        q_segment_ids: ``[B, T]`` integers: rows of one row of the batch that are several sequences:
            id 1 .. max_segments, rising, each id in one run; 0 is padding.
        kv_segment_ids: ``[B, S]``, the same for key and value. Default: q_segment_ids.
        max_segments: the largest id. Rows with a larger one are padding.
        origin: 4 integers: batch, head, row and column at which this shard of a larger problem
            begins: shifts masks, ALiBi and dropout.
        bias_type: "post_scale": scores are scaled, then the bias is added; "pre_scale": the
            reverse.
        return_max_logit: also return each row's largest score, as LSE; without a gradient.
        deterministic: bitwise equal results from equal inputs.
        batch_invariant: the bits of a sequence's O and LSE depend neither on the other sequences of
            the batch nor on how its rows are divided among calls. It costs speed.
        engine: name of the engine; "": the first that accepts. See :func:`explain`.
        checkpoint_name: name of O and LSE for checkpoint policies.

    Returns:
        O ``[B, T, N, D]`` (``[T, N, D]``); with return_residual or return_max_logit a tuple of O
        and these.

    Raises:
        ValueError, TypeError: an argument is wrong: which one, the value seen, the value needed.
            Raised when the function is traced.
        jax.errors.JaxRuntimeError: on the CPU, lengths that cannot be; a GPU clamps them.
    """
    if implementation in OF_JAX:
        ours = locals()
        return _by_jax(ours)
    if implementation not in (None, "te_attention"):
        raise refuse("implementation", repr(implementation), "None, te_attention, xla or cudnn")
    prepared = prepare(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        bottom_right=bottom_right,
        alibi=alibi,
        softcap=softcap,
        sink=sink,
        dropout=dropout,
        dropout_key=dropout_key,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        max_segments=max_segments,
        origin=origin,
        bias_type=bias_type,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        engine=engine,
    )
    return run(prepared, flag("return_residual", return_residual), checkpoint_name)


dot_product_attention = attention  # the name of jax.nn, so that one import changes
# Arguments of attention() that prepare() does not take, and the defaults of those that it does.
NOT_OF_PROBLEM = ("implementation", "return_residual", "checkpoint_name")
DEFAULTS = {n: x for n, x in attention.__kwdefaults__.items() if n not in NOT_OF_PROBLEM}


def run(prepared: Prepared, return_lse: bool, checkpoint_name: str = CHECKPOINT_NAME) -> Any:
    """O, or a tuple of it and the results that the caller wants."""
    options = prepared.options
    outputs = ("o", *("lse",) * return_lse, *("max",) * options.max_logit)
    config = _autodiff.Config(options, outputs, checkpoint_name)
    out = _autodiff.run(config, prepared.arrays)
    out = [prepared.restore(name, x) for name, x in zip(outputs, out, strict=True)]
    return out[0] if len(out) == 1 else tuple(out)


def _by_jax(given: dict) -> Any:
    names = ("query", "key", "value", "bias", "mask", "scale", "is_causal", "query_seq_lengths")
    names += ("key_value_seq_lengths", "local_window_size", "implementation", "return_residual")
    usual = attention.__kwdefaults__
    for name, value in given.items():
        if name not in names and value is not usual[name] and value != usual[name]:
            needed = f"{usual[name]!r} with implementation={given['implementation']!r}"
            raise refuse(name, "given", needed)
    passed = {name: given[name] for name in names if name != "return_residual"}
    if given["return_residual"]:  # which older versions do not have
        passed["return_residual"] = True
    return jax.nn.dot_product_attention(**passed)


def _with_batch(query: Any, key: Any, value: Any) -> tuple:
    """The three with four dimensions, and whether they came without a batch."""
    q, k, v = (tensor(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    is_single = q.ndim == UNBATCHED
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != (UNBATCHED if is_single else RANK):
            needed = "4 dimensions" if x is q or not is_single else "3 dimensions as query"
            raise refuse(name, f"of shape {list(x.shape)}", needed)
    return (q[None], k[None], v[None], True) if is_single else (q, k, v, False)


def prepare(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    max_segments: int | None = None,
    whole_bias: bool = True,
    **rest: Any,
) -> Prepared:
    """The arguments of attention(), checked, as the library takes them.

    whole_bias: bias and mask have the rows of query and of key; False: the caller checks them.
    """
    q, k, v, is_single = _with_batch(query, key, value)
    batch, rows, heads, _ = q.shape
    options, arrays = options_of(heads=heads, batch=batch, dtype=q.dtype, **rest)
    arrays |= {"q": q, "k": k, "v": v}
    given = {"query_seq_lengths": query_seq_lengths, "key_value_seq_lengths": key_value_seq_lengths}
    given |= {"bias": bias, "mask": mask}
    if q_segment_ids is None:
        for name, x in (("kv_segment_ids", kv_segment_ids), ("max_segments", max_segments)):
            if x is not None:
                raise refuse("q_segment_ids", None, f"an array: {name} is given")
        scores = (batch, heads, rows, k.shape[1]) if whole_bias else None
        arrays |= _added(**given, batch=batch, scores=scores, dtype=q.dtype)
    else:
        refuse_with_segments(given)
        options, arrays = _packed(options, arrays, q_segment_ids, kv_segment_ids, max_segments)

    def restore(name: str, x: jax.Array) -> jax.Array:
        if name == "o":
            x = x.reshape(batch, rows, heads, x.shape[-1])
        elif q_segment_ids is None:
            x = x.transpose(0, 2, 1)
        else:
            x = x.reshape(batch, rows, heads)
        if name == "max":
            x = jax.lax.stop_gradient(x)
        return x[0] if is_single else x

    return Prepared(options, arrays, restore)


def _added(
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    bias: Any,
    mask: Any,
    batch: int,
    scores: tuple[int, ...] | None,
    dtype: Any,
) -> dict:
    """Lengths and bias of batches without segments. `scores`: their shape, for the bias."""
    out = {}
    bias = bias_of(bias, mask, dtype, scores)
    if bias is not None:
        out["bias"] = bias
    if query_seq_lengths is not None:
        lengths = integers("query_seq_lengths", query_seq_lengths, (batch,))
        out["cu_seqlens_q"] = cumulative(lengths)
    if key_value_seq_lengths is not None:
        lengths = integers("key_value_seq_lengths", key_value_seq_lengths, (batch,))
        out["cu_seqlens_kv"] = cumulative(lengths)
    return out


def refuse_with_segments(given: dict) -> None:
    """Refuses the arguments by name that rows of several sequences cannot have."""
    for name in ("query_seq_lengths", "key_value_seq_lengths", "bias", "mask"):
        if given[name] is not None:
            raise refuse(name, "given", "None: q_segment_ids is given")


def ids_of(
    shape_q: tuple, shape_kv: tuple, q_ids: Any, kv_ids: Any, max_segments: int | None
) -> tuple[jax.Array, jax.Array]:
    """The ids of query and of key, checked; the same array if those of key are not given."""
    if not isinstance(max_segments, int) or max_segments < 1:
        raise refuse("max_segments", max_segments, "an integer from 1: the largest segment id")
    q_ids = integers("q_segment_ids", q_ids)
    if q_ids.shape != shape_q:
        raise refuse("q_segment_ids", f"of shape {list(q_ids.shape)}", f"{list(shape_q)}")
    if kv_ids is None and shape_kv != shape_q:
        raise refuse("kv_segment_ids", None, f"integers {list(shape_kv)}")
    kv_ids = q_ids if kv_ids is None else integers("kv_segment_ids", kv_ids)
    if kv_ids.shape != shape_kv:
        raise refuse("kv_segment_ids", f"of shape {list(kv_ids.shape)}", f"{list(shape_kv)}")
    return q_ids, kv_ids


def _packed(
    options: Options, arrays: dict, q_ids: Any, kv_ids: Any, max_segments: int | None
) -> tuple[Options, dict]:
    """Rows of several sequences each as ragged sequences with gaps, without a copy."""
    batch, rows_q = arrays["q"].shape[:2]
    rows_kv = arrays["k"].shape[1]
    q_ids, kv_ids = ids_of((batch, rows_q), (batch, rows_kv), q_ids, kv_ids, max_segments)
    if "slopes" in arrays and arrays["slopes"].ndim > 1:
        arrays["slopes"] = jnp.repeat(arrays["slopes"], max_segments, axis=0)
    arrays = dict(arrays)
    for name, ids in (("q", q_ids), ("kv", kv_ids)):
        arrays[f"offsets_{name}"], arrays[f"cu_seqlens_{name}"] = spans_of(ids, max_segments)
    for name in "qkv":
        x = arrays[name]
        arrays[name] = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return options._replace(format="thd", max_seqlen_q=rows_q, max_seqlen_kv=rows_kv), arrays


def ragged_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    offsets_q: Any = None,
    offsets_kv: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    return_residual: bool = False,
    bottom_right: bool = False,
    alibi: Any = None,
    softcap: float | None = None,
    sink: Any = None,
    dropout: float = 0.0,
    dropout_key: Any = None,
    origin: Any = None,
    bias_type: str = "post_scale",
    return_max_logit: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    engine: str = "",
    checkpoint_name: str = CHECKPOINT_NAME,
) -> Any:
    """attention() of sequences one after the other, without padding.

    Args:
        query: ``[tokens, N, H]``.
        key: ``[tokens_kv, K, H]``.
        value: ``[tokens_kv, K, D]``.
        bias: any broadcast of ``[sequences, N, max_seqlen_q, max_seqlen_kv]``.
        cu_seqlens_q: ``[sequences + 1]`` integers: sequence i has rows ``cu_seqlens_q[i]`` to
            ``cu_seqlens_q[i + 1]``.
        cu_seqlens_kv: the same for key and value.
        max_seqlen_q: a bound of the lengths of query, which grids are sized by. Default: tokens.
        max_seqlen_kv: the same for key and value.
        offsets_q: ``[sequences + 1]`` integers: sequence i starts at row ``offsets_q[i]``; then
            cu_seqlens_q only gives its length. Both sides have offsets, or none.
        offsets_kv: the same for key and value.
        scale, is_causal, local_window_size, return_residual, bottom_right, alibi, softcap, sink,
            dropout, dropout_key, origin, bias_type, return_max_logit, deterministic,
            batch_invariant, engine, checkpoint_name: as in :func:`attention`; a batch is a
            sequence there.

    Returns:
        O ``[tokens, N, D]``, 0 in rows of no sequence; LSE and largest scores are ``[tokens, N]``.

    Raises:
        ValueError, TypeError, jax.errors.JaxRuntimeError: as :func:`attention` does.
    """
    q, k, v = (tensor(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != UNBATCHED:
            raise refuse(name, f"of shape {list(x.shape)}", "3 dimensions")
    arrays = {"q": q, "k": k, "v": v}
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    given |= {"offsets_q": offsets_q, "offsets_kv": offsets_kv}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if given[name] is None:
            raise refuse(name, None, "integers [sequences + 1]")
    arrays |= {name: integers(name, x) for name, x in given.items() if x is not None}
    added = bias_of(bias, None, q.dtype)
    if added is not None:
        arrays["bias"] = added
    options, more = options_of(
        heads=q.shape[1],
        dtype=q.dtype,
        batch=max(arrays["cu_seqlens_q"].size - 1, 0),
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        bottom_right=bottom_right,
        alibi=alibi,
        softcap=softcap,
        sink=sink,
        dropout=dropout,
        dropout_key=dropout_key,
        origin=origin,
        bias_type=bias_type,
        return_max_logit=return_max_logit,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        engine=engine,
    )
    options = options._replace(
        format="thd",
        max_seqlen_q=q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_kv=k.shape[0] if max_seqlen_kv is None else max_seqlen_kv,
    )

    def restore(name: str, x: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(x) if name == "max" else x

    prepared = Prepared(options, {**arrays, **more}, restore)
    return run(prepared, flag("return_residual", return_residual), checkpoint_name)
