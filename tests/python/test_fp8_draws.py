"""Random cases of FP8 through attention(): fp8_draws.py runs more of them (make large)."""

import pytest
import torch

from fp8_draws import SATURATION, run, tally, unsayable
from te_attention import torch as tea


@pytest.mark.parametrize("block", range(6))
def test_random_cases_agree_with_the_oracle(block: int) -> None:
    ran, _, wrong = tally(25, 4_000_000 + 10_000 * block)
    assert ran == 25
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
def test_random_cases_on_the_device_agree_with_the_oracle() -> None:
    _, _, wrong = tally(100, 5_000_000, "cuda")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("scale", "dropout", "saturates"),
    [(448.0, 0.0, False), (449.0, 0.0, True), (224.0, 0.5, False), (225.0, 0.5, True)],
)
def test_a_scale_of_s_above_the_largest_sets_the_status(
    scale: float, dropout: float, saturates: bool
) -> None:
    """448 * (1 - dropout) is the largest that fits: above it O would be wrong without a word."""
    torch.manual_seed(0)
    q = torch.randn(1, 64, 2, 16).to(torch.float8_e4m3fn)
    s = torch.full((1,), scale)
    words = {"format": "bshd", "dropout": dropout, "rng_state": torch.tensor([1, 0])}
    words["fp8"] = tea.Fp8(s_scale=s, s_scale_inv=1 / s)
    if not saturates:
        tea.attention(q, q, q, **words)
        return
    with pytest.raises(RuntimeError, match=SATURATION):
        tea.attention(q, q, q, **words)


def test_what_attention_cannot_be_asked() -> None:
    assert unsayable("dtype=bf16 training=1") == "not FP8"
    assert unsayable("dtype=e4m3 o_dtype=bf16 training=1").startswith("a dO that stays in 16 bits")
    assert unsayable("dtype=e4m3 dout_dtype=e5m2 training=1").startswith("O and dO in two FP8")
    assert not unsayable("dtype=e4m3 o_dtype=bf16 dout_dtype=e5m2 training=1")


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tea.attention

    def wrong(*tensors: torch.Tensor, **options: object) -> tuple:
        o, *rest = whole(*tensors, **options)
        return (-o.float()).to(o.dtype), *rest

    monkeypatch.setattr(tea, "attention", wrong)
    line = "dtype=e4m3 o_dtype=bf16 heads_q=2 heads_kv=2 dim_qk=16 dim_v=16 batch=1 "
    line += "seqlen_q=8 seqlen_kv=8 | seed=7"
    assert "O at batch 0" in run(line, 0, large=False)
