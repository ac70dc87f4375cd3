"""The base class of the modules: the attributes that other code reads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class with the attributes of FP8, which is always off here."""

    def __init__(self, name: str | None = None) -> None:
        """Sets the attributes to their values before the first forward pass."""
        super().__init__()
        self.name = name
        self.fp8 = self.fp8_calibration = False
        self.fp8_initialized = self.fp8_meta_tensors_initialized = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, dict] = {"scaling_fwd": {}, "scaling_bwd": {}}
        self.tp_group, self.tp_size, self.sequence_parallel = None, 1, False
        self.activation_dtype: torch.dtype | None = None

    def fast_setattr(self, name: str, value: object) -> None:
        """Sets an attribute that is not a parameter, buffer or module."""
        self.__dict__[name] = value

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Sets the tensor-parallel group, which shares the heads."""
        self.tp_group = tp_group

    @contextmanager
    def prepare_forward_ctx(
        self,
        inp: Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> Iterator[Tensor]:
        """Yields the input after checking that it and the parameters have one dtype.

        num_gemms is the number of quantizers, which do not exist while fp8 is False.
        """
        del num_gemms
        if not allow_different_data_and_param_types:
            for name, parameter in self.named_parameters():
                if parameter.dtype != inp.dtype:
                    raise ValueError(f"{name} is {parameter.dtype}; needs {inp.dtype} as the input")
        self.activation_dtype = inp.dtype
        yield inp if allow_non_contiguous else inp.contiguous()
