"""prepare_for_saving() and restore_from_saved()."""

import torch

from te_attention.torch import fp8
from te_attention.torch.fp8 import DType


def test_tensors_stay_and_storages_are_taken_apart() -> None:
    quantizer = fp8.Float8Quantizer(
        torch.ones(1), torch.zeros(1), DType.kFloat8E4M3, columnwise=False
    )
    whole, plain = quantizer(torch.ones(3)), torch.ones(2)
    quantizer.internal = True
    storage = quantizer(torch.ones(4))
    data = storage._data
    saved, objects = fp8.prepare_for_saving(plain, None, storage, whole)
    assert saved[:2] == [plain, None]
    assert saved[2] is data
    assert saved[5] is whole
    assert objects == [None, None, storage, None]
    assert storage._data is None
    restored, rest = fp8.restore_from_saved(objects, [*saved, plain], return_saved_tensors=True)
    assert restored[0] is plain
    assert restored[1] is None
    assert restored[2]._data is data
    assert restored[3] is whole
    assert rest[0] is plain
    assert len(fp8.restore_from_saved([None], [plain])) == 1
