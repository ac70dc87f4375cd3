"""autocast(), what it sets, what its end updates, and the reduction over ranks."""

import gc

import pytest
import torch

import processes
from te_attention.torch import fp8
from te_attention.torch.fp8 import DType, RecipeState
from te_attention.torch.fp8 import FP8GlobalStateManager as Manager


@pytest.fixture(autouse=True)
def _reset() -> None:
    Manager.reset()
    yield
    Manager.reset()


def registered(recipe: fp8.DelayedScaling, group: object = None) -> dict:
    meta = {"recipe": recipe, "fp8_group": group}
    for name, mode in (("scaling_fwd", "forward"), ("scaling_bwd", "backward")):
        meta[name] = RecipeState.create(recipe, mode=mode, num_quantizers=2, device="cpu")
        meta[name].amax_history[0] = torch.tensor([7.0, 14.0])
    Manager.add_fp8_tensors_to_global_buffer(meta)
    Manager.add_fp8_tensors_to_global_buffer(meta)  # once is enough, twice is the same
    return meta


def test_what_it_sets() -> None:
    recipe, outer = fp8.DelayedScaling(fp8_dpa=True), Manager.get_autocast_state()
    assert not Manager.is_fp8_enabled()
    with fp8.autocast(recipe=recipe, amax_reduction_group="group"):
        assert Manager.is_fp8_enabled()
        assert Manager.get_fp8_recipe() is recipe
        assert Manager.get_fp8_group() == "group"
        assert Manager.is_first_fp8_module()
        assert not Manager.is_first_fp8_module()
        key = Manager.get_unique_autocast_key(recipe, "group")
        assert Manager.autocast_arguments[key] == (recipe, "group")
        with fp8.fp8_autocast(False, fp8_recipe=None, _graph=True):
            assert not Manager.is_fp8_enabled()
            assert Manager.fp8_graph_capturing()
        assert Manager.is_fp8_enabled()
        assert Manager.get_fp8_recipe() is recipe
    assert Manager.get_autocast_state()[:4] == outer[:4]
    assert isinstance(Manager.get_fp8_recipe(), fp8.DelayedScaling)
    assert not (Manager.is_fp8_calibration() or Manager.with_fp8_parameters())
    Manager.set_autocast_state((True, False, recipe, None, False, False))
    assert Manager.is_fp8_enabled()


def test_the_outermost_end_updates_the_forward_scales() -> None:
    recipe = fp8.DelayedScaling(fp8_dpa=True, amax_history_len=1)
    meta = registered(recipe)
    with fp8.autocast(recipe=recipe):
        with fp8.autocast(recipe=recipe):
            pass
        assert meta["scaling_fwd"].scale.tolist() == [1, 1]
    assert meta["scaling_fwd"].scale.tolist() == [64, 32]
    assert meta["scaling_bwd"].scale.tolist() == [1, 1]


def test_the_end_updates_the_scales_of_gradients_after_a_backward_pass() -> None:
    recipe = fp8.DelayedScaling(fp8_dpa=True, amax_history_len=1)
    meta = registered(recipe)
    Manager.note_backward()
    with fp8.autocast(recipe=recipe):
        pass
    assert meta["scaling_bwd"].scale.tolist() == [8192, 4096]
    meta["scaling_bwd"].amax_history[0] = 1
    with fp8.autocast(recipe=recipe):
        pass
    assert meta["scaling_bwd"].scale.tolist() == [8192, 4096]  # no other one has run


@pytest.mark.parametrize("options", [{"enabled": False}, {"_graph": True}, {"grad": False}])
def test_ends_that_update_nothing(options: dict) -> None:
    recipe, options = fp8.DelayedScaling(amax_history_len=1), dict(options)
    meta = registered(recipe)
    with torch.set_grad_enabled(options.pop("grad", True)), fp8.autocast(recipe=recipe, **options):
        pass
    assert meta["scaling_fwd"].scale.tolist() == [1, 1]


def test_an_error_leaves_the_context() -> None:
    with pytest.raises(RuntimeError, match="of the body"), fp8.autocast():
        raise RuntimeError("of the body")
    assert not Manager.is_fp8_enabled()
    assert Manager.AUTOCAST_DEPTH == 0


def test_no_module_is_kept_alive() -> None:
    registered(fp8.DelayedScaling())
    gc.collect()
    for forward in (True, False):
        Manager.reduce_and_update_fp8_tensors(forward=forward)
    assert not any(Manager._states.values())


def test_refusals_and_availability() -> None:
    with pytest.raises(ValueError, match="calibrating is True; needs False"):
        fp8.autocast(calibrating=True).__enter__()
    assert fp8.is_fp8_available() is True
    assert fp8.is_fp8_available(return_reason=True) == (True, "")
    assert isinstance(fp8.get_default_recipe(), fp8.DelayedScaling)


def _reduce(rank: int, port: int) -> None:
    processes.join(rank, 2, port)
    group = torch.distributed.group.WORLD
    for reduces, wanted in ((True, [32.0, 32.0]), (False, [[64.0, 32.0], [32.0, 64.0]][rank])):
        recipe = fp8.DelayedScaling(amax_history_len=1, reduce_amax=reduces)
        meta = registered(recipe, group)
        amax = torch.tensor([7.0, 14.0])
        meta["scaling_fwd"].amax_history[0] = amax if rank == 0 else amax.flip(0)
        with fp8.autocast(recipe=recipe, amax_reduction_group=group):
            pass
        assert meta["scaling_fwd"].scale.tolist() == wanted
    quantizer = fp8.Float8CurrentScalingQuantizer(
        DType.kFloat8E4M3, "cpu", with_amax_reduction=True, amax_reduction_group=group
    )
    assert quantizer(torch.tensor([7.0 + 7.0 * rank]))._scale_inv.item() == 1 / 32
    torch.distributed.barrier()  # neither rank closes its connections while the other one reads
    torch.distributed.destroy_process_group()


def test_reduction_over_ranks() -> None:
    processes.start(_reduce, 2)
