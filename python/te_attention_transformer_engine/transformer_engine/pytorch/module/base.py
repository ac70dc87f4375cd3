"""The base class of the modules: their FP8 state, and the attributes that other code reads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from te_attention.torch.fp8 import FP8GlobalStateManager, Recipe, RecipeState


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class with the FP8 state of a module: its recipe, states of scales and quantizers."""

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
        self._fp8_device: torch.device | None = None

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

        In an enabled autocast() fp8 is True then, and there are 3 * num_gemms quantizers of the
        forward pass and 2 * num_gemms of gradients.
        """
        if not allow_different_data_and_param_types:
            for name, parameter in self.named_parameters():
                if parameter.dtype != inp.dtype:
                    raise ValueError(f"{name} is {parameter.dtype}; needs {inp.dtype} as the input")
        self.activation_dtype, self._fp8_device = inp.dtype, inp.device
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if self.fp8:
            self.init_fp8_metadata(num_gemms)
        yield inp if allow_non_contiguous else inp.contiguous()

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Makes quantizers and states of scales for the recipe of the innermost autocast()."""
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        meta = self.fp8_meta
        found = (repr(recipe), num_gemms)
        if not self.fp8_initialized or meta.get("found") != found:
            meta |= {"recipe": recipe, "num_gemms": num_gemms, "found": found}
            meta |= {"fp8_group": FP8GlobalStateManager.get_fp8_group()}
            self.set_meta_tensor(True, recipe)
            self.set_meta_tensor(False, recipe)
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta)
        self.fp8_initialized = self.fp8_meta_tensors_initialized = True

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Makes the state of scales of a direction, and its quantizers."""
        name, mode, each = ("scaling_fwd", "forward", 3) if fwd else ("scaling_bwd", "backward", 2)
        count = each * self.fp8_meta["num_gemms"]
        options = {"mode": mode, "num_quantizers": count, "device": self._fp8_device}
        self.fp8_meta[name] = RecipeState.create(recipe, **options)
        self.quantizers[name] = self.fp8_meta[name].make_quantizers()
