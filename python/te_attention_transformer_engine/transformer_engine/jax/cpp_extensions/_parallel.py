"""The primitives whose rows an axis of the mesh shares: the functions of te_attention.jax."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from transformer_engine.jax import _context
from transformer_engine.jax._arrays import separate, sizes_of
from transformer_engine.jax._descriptor import SequenceDescriptor
from transformer_engine.jax._enums import AttnBiasType, AttnSoftmaxType, CPStrategy
from transformer_engine.jax.cpp_extensions._helper import FusedAttnHelper
from transformer_engine.jax.cpp_extensions._primitives import (
    DESCRIPTOR,
    FusedAttnBwdPrimitive,
    FusedAttnConfig,
    FusedAttnFwdPrimitive,
)
from transformer_engine.jax.cpp_extensions.base import register_primitive


def _problem(
    strategy: CPStrategy, operands: tuple, words: Any, config: FusedAttnConfig
) -> tuple[_context.Sharing, dict, dict]:
    """How rows are shared, the arrays and the options of a call; `words`: of the random key."""
    q, k, v, bias, offset, *_ = operands
    sizes = sizes_of(q, k, v, config.qkv_layout)
    shape = (math.prod(sizes.batch_shape), sizes.q_max_seqlen, sizes.kv_max_seqlen)
    how = (config.qkv_layout, config.context_parallel_load_balanced, config.stripe_size)
    sharing = _context.sharing_of(config.cp_axis, strategy, *how)
    leaves = operands[-DESCRIPTOR:]
    descriptor = SequenceDescriptor(*(tuple(leaves[i : i + 2]) for i in range(0, DESCRIPTOR, 2)))
    where = (config.attn_mask_type, config.qkv_layout, config.window_size)
    arrays, options = _context.sequence_options(
        descriptor, *where, config.max_segments_per_seq, shape
    )
    rows = [x.reshape(-1, *x.shape[-3:]) for x in separate((q, k, v), config.qkv_layout)]
    arrays |= dict(zip(("query", "key", "value"), rows, strict=True))
    options |= {
        "scale": config.scaling_factor,
        "is_causal": config.attn_mask_type.is_causal(),
        "bottom_right": config.bottom_right_diagonal,
        "local_window_size": tuple(None if x < 0 else x for x in config.window_size),
        "bias": None if config.attn_bias_type == AttnBiasType.NO_BIAS else bias,
        "deterministic": not FusedAttnHelper.is_non_deterministic_allowed(),
    }
    if config.softmax_type == AttnSoftmaxType.LEARNABLE_SOFTMAX:
        options["sink"] = offset.ravel()
    elif config.softmax_type == AttnSoftmaxType.OFF_BY_ONE_SOFTMAX:
        options["sink"] = "off_by_one"
    if config.is_training and config.dropout_probability:
        options |= {"dropout": config.dropout_probability, "dropout_key": words.ravel()[:2]}
    return sharing, arrays, options


def _forward(strategy: CPStrategy, operands: tuple, config: FusedAttnConfig) -> tuple:
    words = operands[5]
    out = _context.forward(*_problem(strategy, operands, words, config), return_lse=True)
    o, lse, state = FusedAttnFwdPrimitive.outer_abstract(*operands, config=config)
    rows = out["lse"] if config.qkv_layout.is_thd() else out["lse"].swapaxes(1, 2)
    seed = jnp.concatenate([words.ravel()[:2], jnp.zeros(2, jnp.uint32)])
    return out["o"].reshape(o.shape), rows.reshape(lse.shape), jnp.broadcast_to(seed, state.shape)


def _backward(strategy: CPStrategy, operands: tuple, config: FusedAttnConfig) -> tuple:
    q, k, _, bias, offset, lse, words, output, doutput, *_ = operands
    sharing, arrays, options = _problem(strategy, operands, words, config)
    for name, x in (("output", output), ("doutput", doutput)):
        arrays[name] = x.reshape(-1, *x.shape[-3:])
    arrays["lse"] = lse.reshape(-1, *lse.shape[-3:-1])
    if not config.qkv_layout.is_thd():
        arrays["lse"] = arrays["lse"].swapaxes(1, 2)
    out = _context.backward(sharing, arrays, options)
    dk, dv = out["key"], out["value"]
    if config.qkv_layout.is_kvpacked():
        dk, dv = jnp.stack([dk, dv], axis=-3).reshape(k.shape), jnp.zeros(0, k.dtype)
    else:
        dk, dv = dk.reshape(k.shape), dv.reshape(operands[2].shape)
    doffset = out["sink"].reshape(offset.shape) if "sink" in out else jnp.zeros_like(offset)
    return out["query"].reshape(q.shape), dk, dv, jnp.zeros_like(bias), doffset


def _of_devices(name: str, strategy: CPStrategy, text: str) -> type:
    """A primitive of this name and strategy."""
    is_forward = name.endswith("FwdPrimitive")
    base = FusedAttnFwdPrimitive if is_forward else FusedAttnBwdPrimitive

    def impl(*operands: Any, config: FusedAttnConfig) -> tuple:
        """The results, over the devices of config.cp_axis."""
        return (_forward if is_forward else _backward)(strategy, operands, config)

    members = {"impl": staticmethod(impl), "__doc__": text, "__module__": __name__}
    cls = type(name, (base,), members)
    register_primitive(cls)
    return cls


_GATHER, _RING = CPStrategy.ALL_GATHER, CPStrategy.RING
_TEXTS = {"Fwd": "Forward, as FusedAttnFwdPrimitive", "Bwd": "Backward, as FusedAttnBwdPrimitive"}
_KINDS = {  # by strategy, and whether rows are several sequences
    (_GATHER, False): ("FusedAttnCPWithAllGather", "rows of one sequence; keys are gathered"),
    (_GATHER, True): ("FusedAttnCPStripedWithAllGather", "several sequences; keys are gathered"),
    (_RING, False): ("FusedRingAttn", "rows of one sequence; keys go round"),
    (_RING, True): ("FusedRingAttnStriped", "rows of several sequences; keys go round"),
}
PRIMITIVES = {
    (verb, *kind): _of_devices(f"{name}{verb}Primitive", kind[0], f"{_TEXTS[verb]}: {text}.")
    for kind, (name, text) in _KINDS.items()
    for verb in _TEXTS
}
FusedAttnCPWithAllGatherFwdPrimitive = PRIMITIVES["Fwd", _GATHER, False]
FusedAttnCPWithAllGatherBwdPrimitive = PRIMITIVES["Bwd", _GATHER, False]
FusedAttnCPStripedWithAllGatherFwdPrimitive = PRIMITIVES["Fwd", _GATHER, True]
FusedAttnCPStripedWithAllGatherBwdPrimitive = PRIMITIVES["Bwd", _GATHER, True]
FusedRingAttnFwdPrimitive = PRIMITIVES["Fwd", _RING, False]
FusedRingAttnBwdPrimitive = PRIMITIVES["Bwd", _RING, False]
FusedRingAttnStripedFwdPrimitive = PRIMITIVES["Fwd", _RING, True]
FusedRingAttnStripedBwdPrimitive = PRIMITIVES["Bwd", _RING, True]


def call_of(verb: str, config: FusedAttnConfig, strategy: CPStrategy) -> Callable:
    """The function of operands and config of a call: verb "Fwd" or "Bwd"."""
    if not config.cp_axis:
        base = FusedAttnFwdPrimitive if verb == "Fwd" else FusedAttnBwdPrimitive
        return base.outer_primitive.bind
    how = _GATHER if strategy == CPStrategy.DEFAULT else strategy
    # Not bound as a primitive, within which jit would not see the devices of shard_map.
    return PRIMITIVES[verb, how, config.qkv_layout.is_thd()].impl
