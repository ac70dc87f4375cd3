"""A call on which all ranks agree: its two passes, and its repetition without Python."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_attention.torch._cp_parts import Operands, Problem, has_no_other
from te_attention.torch._cp_record import Recorder, Recording
from te_attention.torch._cp_run import Inputs, Saved, backward, forward
from te_attention.torch._cp_transport import GroupTransport, drive

_active_modes = torch._C._len_torch_dispatch_stack


class ContextParallel(torch.autograd.Function):
    """Gradients for q, k, v, bias and sink; the transfers of both directions."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, x, call):
        inputs = Inputs(q, k, v, bias, sink, x.slopes, x.rng_state)
        (o, lse, most), saved = call.forward(inputs)
        ctx.problem, ctx.transport, ctx.head = call.problem, call.transport, saved.operands.head
        operands = saved.operands
        ctx.scales = operands.scales
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
        program = backward(ctx.problem, x, saved, dout, dlse)
        gradients = drive(program, ctx.transport)
        return *gradients, None, None


class Call:
    """A problem on which all ranks agree, for calls that differ in the values of tensors alone."""

    def __init__(self, problem: Problem, transport: GroupTransport) -> None:
        self.problem, self.transport = problem, transport
        self.recording: Recording | None = None
        self.may_record = False

    def forward(self, x: Inputs) -> tuple[tuple, Saved | None]:
        """O, LSE and row maxima, and what backward needs, if there is one."""
        inputs, table = (x.q, x.k, x.v), None
        if (self.recording is not None or self.may_record) and not _active_modes():
            table = self.transport.direct()
        if table is None:
            return drive(forward(self.problem, x), self.transport)
        if self.recording is None:
            return self._record(x, inputs)
        if not self.recording.fits(*inputs):
            return drive(forward(self.problem, x), self.transport)
        results = self.recording.replay(inputs, table)
        if not self.problem.training:
            return tuple(results), None
        o, lse, most, saved_o, saved_lse, k, v, *halo, q = results
        return (o, lse, most), Saved(Operands(q), (k, v), saved_o, saved_lse, tuple(halo))

    def _record(self, x: Inputs, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[tuple, Saved]:
        self.may_record = False
        recorder = Recorder(inputs)
        output, saved = drive(forward(self.problem, x), self.transport, recorder)
        results = [*output]
        if self.problem.training:
            results += [saved.o, saved.lse, *saved.keys, *saved.halo, saved.operands.q]
        if has_no_other(saved.operands):
            self.recording = recorder.finish(results)
        return output, saved
