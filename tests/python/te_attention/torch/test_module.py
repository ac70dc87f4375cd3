"""The module: options kept, dropout only in training, a sink that learns."""

import torch

from te_attention import torch as tea


def test_it_is_the_function_with_its_options() -> None:
    q, k, v = (torch.randn(2, 4, 6, 16) for _ in range(3))
    module = tea.Attention(mask="causal", window=(3, None), softcap=5.0)
    want = tea.attention(q, k, v, mask="causal", window=(3, None), softcap=5.0)
    assert torch.equal(module(q, k, v), want)
    assert torch.equal(module(q, k, v, mask=None, window=None, softcap=0.0), tea.attention(q, k, v))
    assert "mask='causal'" in repr(module)


def test_dropout_is_for_training_only() -> None:
    q = torch.randn(1, 1, 32, 16)
    module = tea.Attention(dropout=0.5)
    assert not torch.equal(module(q, q, q), module(q, q, q))
    module.eval()
    assert torch.equal(module(q, q, q), tea.attention(q, q, q))


def test_the_sink_is_a_parameter() -> None:
    module = tea.Attention(sink_heads=4)
    assert [name for name, _ in module.named_parameters()] == ["sink"]
    q = torch.randn(1, 4, 5, 16)
    module(q, q, q).sum().backward()
    assert module.sink.grad.abs().max() > 0
