"""The helpers for ragged batches under context parallelism, against plain indexing."""

import pytest
import torch

import transformer_engine_torch as tex

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CU = torch.tensor([0, 8, 12], dtype=torch.int32)
FIRST, SECOND = [0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11]
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("shape", [(12, 2, 8), (2, 12, 2, 8)])
def test_halves(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device)
    for half, rows in enumerate((FIRST, SECOND)):
        got = tex.thd_read_half_tensor(x, CU.to(device), half)
        assert torch.equal(got, x[..., rows, :, :])
    with pytest.raises(ValueError, match="half_idx is 2; needs 0 or 1"):
        tex.thd_read_half_tensor(x, CU.to(device), 2)


def test_lse_of_packed_second_halves(device: str) -> None:
    lse, step = torch.randn(3, 12, device=device), torch.randn(3, 7, device=device)
    half = tex.thd_read_second_half_lse(lse, CU.to(device), True, 7)
    assert torch.equal(half[:, :6], lse[:, SECOND])
    assert not half[:, 6:].any()
    want = lse.clone()
    want[:, SECOND] = torch.logaddexp(lse[:, SECOND], step[:, :6])
    tex.thd_second_half_lse_correction(lse, step, CU.to(device), True)
    torch.testing.assert_close(lse, want)


def test_lse_of_batches(device: str) -> None:
    lse, step = torch.randn(2, 3, 8, device=device), torch.randn(2, 3, 4, device=device)
    half = tex.thd_read_second_half_lse(lse, CU.to(device), False, 4)
    assert torch.equal(half[0], lse[0, :, 4:])
    assert torch.equal(half[1, :, :2], lse[1, :, 2:4])
    want = lse.clone()
    want[0, :, 4:] = torch.logaddexp(lse[0, :, 4:], step[0])
    want[1, :, 2:4] = torch.logaddexp(lse[1, :, 2:4], step[1, :, :2])
    tex.thd_second_half_lse_correction(lse, step, CU.to(device), False)
    torch.testing.assert_close(lse, want)


@pytest.mark.parametrize("only_second", [False, True])
def test_corrections_of_outputs(only_second: bool, device: str) -> None:
    rows = SECOND if only_second else list(range(12))
    out, step = (torch.randn(n, 2, 8, device=device) for n in (12, len(rows)))
    lse, step_lse = (torch.randn(2, n, device=device) for n in (12, len(rows)))
    want = out.clone()
    want[rows] += step * (step_lse - lse[:, rows]).exp().T[..., None]
    tex.thd_out_correction(out, step, lse, step_lse, CU.to(device), only_second, True)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("add", "none"),
        ("copy", "none"),
        ("none", "add"),
        ("none", "copy"),
        ("add", "copy"),
        ("copy", "add"),
    ],
)
@pytest.mark.parametrize("slabs", [(), (2,)])
def test_corrections_of_gradients(slabs: tuple, first: str, second: str, device: str) -> None:
    half = "none" in (first, second)
    grad = torch.randn(*slabs, 12, 2, 8, device=device)
    step = torch.randn(*slabs, 6 if half else 12, 2, 8, device=device)
    want = grad.clone()
    for action, rows in ((first, FIRST), (second, SECOND)):
        part = step if half else step[..., rows, :, :]
        if action == "add":
            want[..., rows, :, :] += part
        elif action == "copy":
            want[..., rows, :, :] = part
    tex.thd_grad_correction(grad, step, CU.to(device), first, second)
    torch.testing.assert_close(grad, want)


def test_partitions(device: str) -> None:
    parts = [tex.thd_get_partitioned_indices(CU.to(device), 12, 2, rank) for rank in range(2)]
    assert parts[0].tolist() == [0, 1, 6, 7, 8, 11]
    assert parts[1].tolist() == [2, 3, 4, 5, 9, 10]
    assert parts[0].dtype == torch.int32
