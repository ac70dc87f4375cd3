"""The operator that repeats a recorded call, by instructions that are written here by hand."""

import struct

import pytest
import torch

from te_attention.torch._cp_nccl import EVENTS, FUNCTIONS
from te_attention.torch._cp_recording import DTYPES, Kind, Slot, head
from te_attention.torch._library import OPS

FP32 = DTYPES.index(torch.float32)
MATRIX = [FP32, 2, 2, 3, 3, 1]  # a dense one of 2 x 3
INPUT = [1, FP32, -1, 16, 0, *MATRIX[1:]]  # one input: on the host, aligned to 16 bytes
HEAD = [len(INPUT), *INPUT]
NOTHING = torch.zeros(0, dtype=torch.int64)


def bits(x: float) -> int:
    """Those of a double, as code has them."""
    return struct.unpack("q", struct.pack("d", x))[0]


def replay(code: list[int], inputs: list, transport: torch.Tensor | None = None) -> list:
    """The results of code, whose first number behind the head is that of the slots."""
    if transport is None:
        transport = torch.zeros(len(FUNCTIONS) + 5 + EVENTS, dtype=torch.int64)
    return OPS.replay(torch.tensor(code), NOTHING, transport, inputs)


def test_fills_adds_copies_and_views():
    x = torch.arange(6.0).reshape(2, 3)
    code = [*HEAD, 3, Kind.ALLOCATE, 1, *MATRIX, Kind.ALLOCATE, 2, *MATRIX]
    code += [Kind.FILL, 1, 0, *MATRIX, bits(1.5)]
    code += [Kind.ADD, 2, 0, *MATRIX, 0, 0, *MATRIX, 1, 0, *MATRIX]
    # The first row of slot 1 becomes the second row of x, by an offset in bytes.
    row = [FP32, 1, 3, 1]
    code += [Kind.COPY, 1, 0, *row, 0, 12, *row]
    code += [Kind.RESULT, 1, Kind.VIEW, 2, 1, FP32, 1, 2, 3]
    filled, column = replay(code, [x])
    assert filled.tolist() == [[3.0, 4.0, 5.0], [1.5, 1.5, 1.5]]
    assert column.tolist() == [x[0, 1] + 1.5, x[1, 1] + 1.5]


def test_refuses_other_code_and_transports():
    x = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=f"instruction {len(Kind)}"):
        replay([*HEAD, 1, len(Kind)], [x])
    with pytest.raises(RuntimeError, match="transport"):
        replay([*HEAD, 1, Kind.RESULT, 0], [x], torch.zeros(3, dtype=torch.int64))


def test_slots_in_one_memory():
    x = torch.arange(6.0).reshape(2, 3)
    code = [*HEAD, 4, Kind.ARENA, 512, Kind.PLACE, 1, 0, Kind.PLACE, 2, 256]
    code += [Kind.FILL, 1, 0, *MATRIX, bits(1.0), Kind.FILL, 2, 0, *MATRIX, bits(2.0)]
    code += [Kind.ADD, 1, 0, *MATRIX, 1, 0, *MATRIX, 0, 0, *MATRIX]
    code += [Kind.ALLOCATE, 3, *MATRIX, Kind.ADD, 3, 0, *MATRIX, 1, 0, *MATRIX, 2, 0, *MATRIX]
    (found,) = replay([*code, Kind.RESULT, 3], [x])
    assert torch.equal(found, x + 3)


def test_rounds_o():
    sums, lse = torch.randn(1, 3, 2, 8), torch.randn(1, 2, 3)
    lse[0, 1, 2] = -torch.inf  # a row without keys: its O is not read
    sums[0, 2, 1] = torch.nan
    (o,) = replay(
        [
            *head([Slot(sums), Slot(lse)]), 3,
            *(Kind.ALLOCATE, 2, DTYPES.index(torch.bfloat16), 4, 1, 3, 2, 8, 48, 16, 8, 1),
            *(Kind.ROUND, 2, 0, DTYPES.index(torch.bfloat16), 4, 1, 3, 2, 8, 48, 16, 8, 1),
            *(0, 0, FP32, 4, 1, 3, 2, 8, 48, 16, 8, 1, 1, 0, FP32, 3, 1, 2, 3, 6, 3, 1),
            *(Kind.RESULT, 2),
        ],
        [sums, lse],
    )  # fmt: skip
    sums[0, 2, 1] = 0
    assert torch.equal(o, sums.bfloat16())


def test_other_inputs_are_not_taken_for_those_that_were_recorded():
    x, packed = torch.zeros(2, 3), torch.zeros(4, 16)
    one, two, three = packed[:, 0], packed[:, 4], packed[:, 8]
    vector = [FP32, 1, 4, 1]
    code = [*head([Slot(t) for t in (x, one, two)]), 4]
    code += [Kind.ALLOCATE, 3, *vector, Kind.FILL, 3, 0, *vector, bits(1.0), Kind.RESULT, 3]
    for others in (
        [x, one],  # fewer
        [torch.zeros(3, 2), one, two],  # another shape
        [torch.zeros(3, 2).t(), one, two],  # other strides
        [x.double(), one, two],  # another type
        [torch.zeros(7)[1:].reshape(2, 3), one, two],  # another alignment
        [x, one, torch.zeros(4, 16)[:, 0]],  # not in one memory
        [x, one, three],  # elsewhere in it
    ):
        assert replay(code, others) == []
    packed = packed.clone()
    (found,) = replay(code, [x + 1, packed[:, 0], packed[:, 4]])
    assert torch.equal(found, torch.ones(4))
