"""The interface that programs use to query and switch FP8 around attention: always off."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformer_engine.pytorch._refusal import NOT_YET, require


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 can be used: not yet."""
    return (False, NOT_YET) if return_reason else False


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: object = None,
    amax_reduction_group: object = None,
    _graph: bool = False,
) -> Iterator[None]:
    """A context without quantisation: enabled must be False."""
    del recipe, amax_reduction_group, _graph  # arguments of FP8
    require(not enabled, "enabled", enabled, f"False: {NOT_YET}")
    require(not calibrating, "calibrating", calibrating, f"False: {NOT_YET}")
    yield


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: object = None,
    fp8_group: object = None,
    _graph: bool = False,
) -> object:
    """The older name of autocast()."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class FP8GlobalStateManager:
    """The state of FP8 that programs query: off."""

    @classmethod
    def reset(cls) -> None:
        """Has no effect, because there is no state."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether an enabled autocast() is open."""
        return False

    is_fp8_calibration = with_fp8_parameters = fp8_graph_capturing = is_fp8_enabled
