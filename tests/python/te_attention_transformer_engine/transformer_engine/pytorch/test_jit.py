"""Hooks of torch.compile."""

import torch

from transformer_engine.pytorch.jit import jit_fuser, no_torch_dynamo


def test_nothing_is_fused() -> None:
    assert jit_fuser(test_nothing_is_fused) is test_nothing_is_fused


def test_dynamo_calls_instead_of_tracing() -> None:
    seen = []

    @no_torch_dynamo()
    def inner(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    out = torch.compile(lambda x: inner(x) * 2, backend="eager")(torch.ones(2))
    assert out.tolist() == [4.0, 4.0]
    assert seen == [False]
