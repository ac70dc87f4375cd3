"""A call on which all ranks agree: its two passes, and its repetition without Python."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_attention.torch._cp_exchange import Program
from te_attention.torch._cp_parts import Operands, Problem, has_no_other
from te_attention.torch._cp_record import Recorder
from te_attention.torch._cp_recording import Recording
from te_attention.torch._cp_run import Inputs, Saved, backward, forward
from te_attention.torch._cp_transport import GroupTransport, drive

_active_modes = torch._C._len_torch_dispatch_stack


class _Pass:
    """One pass of a call: its program, or from the third time on a recording of the second time.

    The first time makes what is kept for later ones, as plans of rows that travel.
    """

    def __init__(self, transport: GroupTransport) -> None:
        self.transport = transport
        self.recording: Recording | None = None
        self.has_tried_recording = False
        self.has_run = False
        self.same: tuple | None = None

    def repeat(
        self, inputs: tuple[Tensor, ...], same: tuple | None = None
    ) -> list[Tensor | None] | None:
        """The results of a recording that fits; None: there is none.

        same: equal where the tensors of the program repeat in the same way.
        """
        recording = self.recording
        if recording is None or _active_modes() or same != self.same:
            return None
        table = self.transport.direct()
        return None if table is None else recording.replay(inputs, table)

    def run(
        self,
        program: Program,
        inputs: tuple[Tensor, ...],
        results_of: Callable[[object], list | None],
        same: tuple | None = None,
    ) -> object:
        """The output of the program. results_of: its tensors, or None where there are more."""
        recorder = None
        if (
            self.has_run
            and not self.has_tried_recording
            and not _active_modes()
            and self.transport.direct() is not None
        ):
            self.same, recorder = same, Recorder(inputs)
        output = drive(program, self.transport, recorder)
        self.has_run = True
        self.has_tried_recording |= recorder is not None  # not if the program has failed
        if recorder is not None and (results := results_of(output)) is not None:
            self.recording = recorder.finish(results)
        return output


class Call:
    """A problem on which all ranks agree, for calls that differ in the values of tensors alone."""

    def __init__(self, problem: Problem, transport: GroupTransport) -> None:
        self.problem, self.transport = problem, transport
        self.passes = (_Pass(transport), _Pass(transport))
        if problem.world == 1:
            for one in self.passes:
                one.has_tried_recording = True  # there is nothing to gain

    def forward(self, x: Inputs) -> tuple[tuple, Saved | None]:
        """O, LSE and row maxima, and what backward needs, if there is one."""
        inputs = (x.q, x.k, x.v)
        found = self.passes[0].repeat(inputs)
        if found is None:
            return self.passes[0].run(forward(self.problem, x), inputs, self._results)
        return self.of_repetition(found)

    def of_repetition(self, found: list[Tensor | None]) -> tuple[tuple, Saved | None]:
        """The results of forward(), from those of its recording."""
        if not self.problem.training:
            return found, None
        o, lse, most, saved_o, saved_lse, k, v, *halo, q = found
        return (o, lse, most), Saved(Operands(q), (k, v), saved_o, saved_lse, tuple(halo))

    def _results(self, output: tuple[tuple, Saved]) -> list | None:
        results, saved = output
        if not has_no_other(saved.operands):
            return None
        if not self.problem.training:
            return [*results]
        return [*results, saved.o, saved.lse, *saved.keys, *saved.halo, saved.operands.q]

    def backward(self, x: Inputs, saved: Saved, dout: Tensor, dlse: Tensor | None) -> tuple:
        """Gradients of q, k, v, bias and sink."""
        if dlse is not None or not has_no_other(saved.operands):
            return drive(backward(self.problem, x, saved, dout, dlse), self.transport)
        of_forward = (*saved.keys, saved.o, saved.lse, *saved.halo, saved.operands.q)
        given = (dout, x.q, x.k, x.v, *of_forward)
        inputs = tuple({id(t): t for t in given if t is not None}.values())
        one, numbers = self.passes[1], {id(t): i for i, t in enumerate(inputs)}
        same = tuple(numbers.get(id(t)) for t in given)
        found = one.repeat(inputs, same)
        if found is None:
            return one.run(backward(self.problem, x, saved, dout, dlse), inputs, list, same)
        return tuple(found)


class ContextParallel(torch.autograd.Function):
    """Gradients for q, k, v, bias and sink; the transfers of both directions."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, x, call, found):
        """found: the results of a recording that has been repeated, or None."""
        if found is None:
            inputs = Inputs(q, k, v, bias, sink, x.slopes, x.rng_state)
            (o, lse, most), saved = call.forward(inputs)
        else:
            (o, lse, most), saved = call.of_repetition(found)
        operands = saved.operands
        ctx.call, ctx.head, ctx.scales = call, operands.head, operands.scales
        ctx.save_for_backward(
            *(q, k, v, bias, sink, saved.o, saved.lse, *saved.keys, *saved.halo),
            *(operands.q, operands.bias, operands.sink, operands.slopes, operands.rng_state),
        )
        ctx.set_materialize_grads(False)
        if most is None:
            return o, lse
        ctx.mark_non_differentiable(most)
        return o, lse, most

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse=None, _dmax=None):
        q, k, v, bias, sink, o, lse, held_k, held_v, *rest = ctx.saved_tensors
        halo, rest = tuple(rest[:2]), rest[2:]
        saved = Saved(Operands(*rest, ctx.head, ctx.scales), (held_k, held_v), o, lse, halo)
        x = Inputs(q, k, v, bias, sink)
        if dout is None:  # every rank takes part in the transfers
            dout = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        return *ctx.call.backward(x, saved, dout, dlse), None, None, None
