"""The operator that repeats a recorded call, by instructions that are written here by hand."""

import struct

import pytest
import torch

from te_attention.torch._cp_nccl import EVENTS, FUNCTIONS
from te_attention.torch._cp_recording import DTYPES, Kind
from te_attention.torch._library import OPS

FP32 = DTYPES.index(torch.float32)
MATRIX = [FP32, 2, 2, 3, 3, 1]  # a dense one of 2 x 3
NOTHING = torch.zeros(0, dtype=torch.int64)


def bits(x: float) -> int:
    """Those of a double, as code has them."""
    return struct.unpack("q", struct.pack("d", x))[0]


def replay(code: list[int], inputs: list, transport: torch.Tensor | None = None) -> list:
    """The results of code, whose first number is that of the slots."""
    if transport is None:
        transport = torch.zeros(len(FUNCTIONS) + 5 + EVENTS, dtype=torch.int64)
    return OPS.replay(torch.tensor(code), NOTHING, transport, inputs)


def test_fills_adds_copies_and_views():
    x = torch.arange(6.0).reshape(2, 3)
    code = [3, Kind.ALLOCATE, 1, *MATRIX, Kind.ALLOCATE, 2, *MATRIX]
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
        replay([1, len(Kind)], [x])
    with pytest.raises(RuntimeError, match="transport"):
        replay([1, Kind.RESULT, 0], [x], torch.zeros(3, dtype=torch.int64))
