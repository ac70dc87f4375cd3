"""The program of one rank: a generator that yields its transfers and computes between them."""

from dataclasses import dataclass, replace

from torch import Tensor

from te_attention.torch import _cp_window as window
from te_attention.torch._cp_accumulate import gradient_of_sink
from te_attention.torch._cp_columns import gather, of_gathered, of_window, scatter
from te_attention.torch._cp_exchange import Program, shared_state, sum_over_ranks
from te_attention.torch._cp_fp8 import cast_gradient, cast_inputs, gradient_in_fp32
from te_attention.torch._cp_halo import halo_plan
from te_attention.torch._cp_heads import Heads
from te_attention.torch._cp_parts import Descales, Operands, Problem
from te_attention.torch._cp_queries import Queries
from te_attention.torch._cp_ring import Keys, Ring, forward_ring
from te_attention.torch._cp_ring_backward import backward_ring

Halo = tuple[Tensor | None, Tensor | None]  # K and V of other ranks' rows
RINGS = ("ring", "a2a")  # a2a: a ring of one member


@dataclass(eq=False)
class Inputs:
    """The local tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
    slopes: Tensor | None = None
    rng_state: Tensor | None = None
    descales: Descales = (None, None)


@dataclass(eq=False)
class Saved:
    """The inputs of backward: the tensors of the program after an exchange of heads."""

    operands: Operands
    keys: Keys
    o: Tensor
    lse: Tensor
    halo: Halo = (None, None)


def forward(p: Problem, x: Inputs) -> Program:
    """O, LSE and row maxima of the local rows, and what backward needs."""
    rng = x.rng_state
    if p.dropout and p.world > 1:
        rng = yield from shared_state(p, rng, x.q.device)
    scales, (q, k, v) = None, (x.q, x.k, x.v)
    if p.fp8:
        (q, k, v), scales = yield from cast_inputs(p, q, k, v)
    operands = Operands(q, x.bias, x.sink, x.slopes, rng, scales=scales, descales=x.descales)
    keys: Keys = (k, v)
    halo: Halo = (None, None)
    heads = Heads(p) if p.group > 1 else None
    if heads is not None:
        operands, keys = yield from heads.to_heads(operands, keys)
    if heads is not None and heads.idle:
        result = heads.nothing(operands, keys)
    elif p.strategy in RINGS:
        result = yield from forward_ring(Ring(p, operands, keys))
    elif p.strategy == "gather_q":
        result = yield from Queries(p, operands, keys).forward()
    elif p.strategy == "all_gather":
        natural = yield from gather(p, keys)
        result = of_gathered(p, operands, natural).forward()
    else:
        plan = halo_plan(p, window.serves(p, operands))
        if plan.local:
            result, halo = yield from window.forward_window(p, operands, keys, plan)
        else:
            held = yield from plan.collect(keys)
            result = of_window(p, operands, plan, held, keys).forward()
    o, lse, most = result
    saved = Saved(operands, keys, o, lse, halo)
    if heads is not None:
        o, lse, most = yield from heads.to_rows(o, lse, most)
    return (o, lse, most), saved


def _gradient_of_sink(p: Problem, operands: Operands, incoming: tuple) -> Tensor | None:
    """Of the local rows, from their results."""
    if operands.sink is None:
        return None
    dout = gradient_in_fp32(incoming[0], operands.scales) if p.fp8 else incoming[0]
    return gradient_of_sink(p, operands.sink, (dout, *incoming[1:]))


def _gradients(p: Problem, operands: Operands, keys: Keys, incoming: tuple) -> Program:
    """Gradients of the operands, dK and dV, and whether dsink is among the former."""
    if p.strategy in RINGS:
        ring = Ring(p, operands, keys)
        grads, sums = yield from backward_ring(ring, incoming)
        return grads, sums, ring.direct
    if p.strategy == "gather_q":
        grads, sums = yield from Queries(p, operands, keys).backward(incoming)
        return grads, sums, False
    if p.strategy == "all_gather":
        natural = yield from gather(p, keys)
        columns = of_gathered(p, operands, natural)
        grads, (total,) = columns.backward(incoming, natural)
        sums = yield from scatter(p, keys, total)
        return grads, sums, columns.direct
    plan = halo_plan(p)
    held = yield from plan.collect(keys)
    columns = of_window(p, operands, plan, held, keys)
    wanted = (held, keys) if plan.splits else (held,)
    grads, (total, *own) = columns.backward(incoming, *wanted)
    sums = yield from plan.distribute(total, keys, grads.dtype, *own)
    return grads, sums, columns.direct


def backward(p: Problem, x: Inputs, saved: Saved, dout: Tensor, dlse: Tensor | None) -> Program:
    """Gradients of q, k, v, bias and sink."""
    operands, keys = saved.operands, saved.keys
    if p.fp8:
        dout, scales = yield from cast_gradient(p, operands.scales, x.q, x.v, dout, dlse)
        operands = replace(operands, scales=scales)
    heads = Heads(p) if p.group > 1 else None
    if heads is not None:
        dout, dlse = yield from heads.gradients_to_heads(dout, dlse)
    incoming = (dout, dlse, saved.o, saved.lse)
    if saved.halo[0] is not None:
        plan = halo_plan(p, local=True)
        dq, sums = yield from window.backward_window(p, operands, keys, plan, saved.halo, incoming)
        return dq, *sums, None, None
    if heads is not None and heads.idle:
        (grads, sums), direct = heads.no_gradients(operands, keys), False
    else:
        grads, sums, direct = yield from _gradients(p, operands, keys, incoming)
    dsink = grads.dsink if direct else _gradient_of_sink(p, operands, incoming)
    dq, dbias = grads.finish(), grads.dbias
    if heads is not None:
        dq, sums, dbias, dsink = yield from heads.gradients_to_rows(dq, sums, dbias, dsink, x)
    if x.sink is not None:
        dsink = yield from sum_over_ranks(p, dsink)
    if x.bias is not None:
        if p.bias_row:
            dbias = yield from sum_over_ranks(p, dbias)
        dbias = dbias.to(x.bias.dtype)
    return dq, *(t.to(x.k.dtype) for t in sums), dbias, dsink
