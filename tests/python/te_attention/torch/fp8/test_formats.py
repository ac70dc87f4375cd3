"""The objects that count as FP8 tensors and as formats, of any class."""

import pytest
import torch

import fp8_decoy
from te_attention.torch.fp8 import DType
from te_attention.torch.fp8.formats import codes_of, format_of, is_current, is_fp8_tensor


def test_foreign_objects_count() -> None:
    data, quantizer = torch.zeros(3, dtype=torch.uint8), fp8_decoy.CurrentQuantizer(fp8_decoy.E5M2)
    tensor = fp8_decoy.Storage(data, torch.ones(1), fp8_decoy.E5M2, quantizer)
    assert is_fp8_tensor(tensor)
    assert not is_fp8_tensor(data)
    assert codes_of(tensor).dtype == torch.float8_e5m2
    assert is_current(quantizer)
    assert format_of(fp8_decoy.E4M3) is format_of(DType.kFloat8E4M3)
    with pytest.raises(ValueError, match=r"fp8_dtype is .*kInt32"):
        format_of(DType.kInt32)
