"""Properties of the machine, the initialisers, and tensors in parts."""

import pytest
import torch

from transformer_engine.pytorch import utils


def test_versions() -> None:
    assert utils.get_cudnn_version() >= (9, 18, 1)
    major, _ = utils.get_device_compute_capability()
    assert (major > 0) == torch.cuda.is_available()
    assert utils.is_bf16_available(return_reason=True) == (True, "")


def test_initialisers() -> None:
    t = utils.init_method_normal(0.5)(torch.empty(10000))
    assert abs(t.std() - 0.5) < 0.02
    t = utils.scaled_init_method_normal(0.5, 2)(torch.empty(10000))
    assert abs(t.std() - 0.25) < 0.01


def test_a_mask_hides() -> None:
    scores = torch.tensor([[1.0, -2e4]])
    hidden = utils.attention_mask_func(scores, torch.tensor([[True, False]]))
    assert hidden is scores
    assert hidden.softmax(-1).tolist() == [[0.0, 1.0]]


def test_equal_parts() -> None:
    t = torch.arange(24.0).view(2, 12)
    parts = utils.split_tensor_along_dim(t, -1, 3)
    assert [p.shape[-1] for p in parts] == [4, 4, 4]
    assert parts[1].data_ptr() == t[:, 4:].data_ptr()
    copies = utils.split_tensor_along_dim(t, -1, 3, contiguous_split_chunks=True)
    assert all(a.is_contiguous() and torch.equal(a, b) for a, b in zip(copies, parts, strict=True))
    with pytest.raises(ValueError, match="num_partitions is 5; needs a divisor of 12"):
        utils.split_tensor_along_dim(t, -1, 5)


@pytest.mark.parametrize("dim", [0, 2, 3, -1, -2])
def test_tensors_along_a_new_dimension(dim: int) -> None:
    shape = [2, 5, 4, 8]
    shape.insert(dim, 3)
    at = dim if dim >= 0 else dim - 1  # of list.insert, as a dimension of the result
    whole = torch.randn(shape)
    parts = whole.unbind(at)
    assert utils.combine_tensors(parts, dim).data_ptr() == whole.data_ptr()
    assert torch.equal(utils.combine_tensors(parts, dim), whole)
    assert torch.equal(utils.combine_tensors([p.clone() for p in parts], dim), whole)
    turned = utils.combine_tensors(parts[::-1], dim)
    assert torch.equal(turned, whole.flip(at))
    leaves = [p.clone().requires_grad_() for p in parts]
    utils.combine_tensors(leaves, dim).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("squeeze", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_parts(squeeze: bool, packed: bool) -> None:
    shape, dim = ((2, 5, 3, 8), -2)
    x = torch.randn(shape, requires_grad=True)
    parts = utils.SplitAlongDim.apply(x, dim, [1, 1, 1], squeeze)
    dx = torch.randn(shape)
    given = dx.split(1, dim)
    given = [g.squeeze(dim) for g in given] if squeeze else list(given)
    if not packed:
        given = [g.clone() for g in given]
    assert all(a.shape == b.shape for a, b in zip(parts, given, strict=True))
    (got,) = torch.autograd.grad(parts, x, given)
    assert torch.equal(got, dx)
    assert (got.data_ptr() == dx.data_ptr()) == packed
