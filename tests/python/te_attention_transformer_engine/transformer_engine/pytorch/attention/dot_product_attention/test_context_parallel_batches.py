"""pad_thd_sequences_for_cp, generate_positional_ids_for_cp and get_batch_on_this_cp_rank."""

import pytest
import torch

from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
)


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda **_: ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda **_: rank)


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_padding_goes_behind_each_sequence(shape: tuple[int, ...]) -> None:
    ids, cu = torch.tensor([1, 1, 1, 2, 3, 3, 3, 3, 3]), torch.tensor([0, 3, 4, 9])
    padded, labels, cu_padded = pad_thd_sequences_for_cp(
        ids.view(shape), (ids + 10).view(shape), cu, 4, padding_token_id=77, padding_label_id=-9
    )
    assert padded.tolist() == [1, 1, 1, 77, 2, 77, 77, 77, 3, 3, 3, 3, 3, 77, 77, 77]
    assert labels.tolist()[:5] == [11, 11, 11, -9, 12]
    assert cu_padded.tolist() == [0, 4, 8, 16]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_keeps_types_and_what_fits(dtype: torch.dtype) -> None:
    ids, cu = torch.arange(8, dtype=dtype), torch.tensor([0, 4, 8], dtype=dtype)
    padded, labels, cu_padded = pad_thd_sequences_for_cp(ids, ids, cu, 4)
    assert torch.equal(padded, ids) and torch.equal(labels, ids) and torch.equal(cu_padded, cu)
    assert cu_padded.dtype == dtype


def test_padding_of_empty_sequences() -> None:
    ids = torch.tensor([5, 6])
    padded, _, cu_padded = pad_thd_sequences_for_cp(ids, ids, torch.tensor([0, 0, 2, 2]), 4)
    assert padded.tolist() == [5, 6, 0, 0]
    assert cu_padded.tolist() == [0, 0, 4, 4]


def test_padding_refuses_other_numbers_of_tokens() -> None:
    with pytest.raises(ValueError, match="input_ids is of 3 tokens; needs 4"):
        pad_thd_sequences_for_cp(torch.zeros(3), torch.zeros(4), torch.tensor([0, 4]), 4)


def test_positions_start_anew_with_each_sequence() -> None:
    positions = generate_positional_ids_for_cp(torch.tensor([0, 3, 4]), 4, dtype=torch.int32)
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert positions.dtype == torch.int32


@pytest.mark.parametrize(
    ("rank", "ranks", "wanted"),
    [
        (0, 2, [0, 1, 6, 7, 8, 11]),
        (1, 2, [2, 3, 4, 5, 9, 10]),
        (0, 1, list(range(12))),
    ],
)
def test_a_rank_gets_two_chunks_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, wanted: list[int]
) -> None:
    as_rank(monkeypatch, rank, ranks)
    tokens, cu = torch.arange(12), torch.tensor([0, 8, 12])
    ids, labels, positions = get_batch_on_this_cp_rank(cu, tokens[None], tokens, None)
    assert ids.tolist() == [wanted]
    assert labels.tolist() == wanted
    assert positions is None


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_a_padded_batch(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    ids, cu = torch.arange(1, 24), torch.tensor([0, 5, 5, 23])
    padded, labels, cu_padded = pad_thd_sequences_for_cp(ids, ids, cu, 2 * ranks)
    positions = generate_positional_ids_for_cp(cu, 2 * ranks)
    shares = []
    for rank in range(ranks):
        as_rank(monkeypatch, rank, ranks)
        shares.append(get_batch_on_this_cp_rank(cu_padded, padded, labels, positions))
    assert sorted(torch.cat([s[0] for s in shares]).tolist()) == sorted(padded.tolist())
    assert len({s[0].numel() for s in shares}) == 1
    for share, _, at in shares:  # a token is where its position says
        for token, position in zip(share.tolist(), at.tolist(), strict=True):
            assert token in (0, 1 + position, 6 + position)


def test_refusals_of_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 2)
    cu = torch.tensor([0, 8])
    with pytest.raises(ValueError, match="qvk_format is 'bshd'; needs 'thd'"):
        get_batch_on_this_cp_rank(cu, torch.zeros(8), None, None, qvk_format="bshd")
    for wrong in (torch.tensor(3), torch.zeros(7), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"labels_padded is of shape .*; needs 8 along"):
            get_batch_on_this_cp_rank(cu, torch.zeros(8), wrong, None)
    with pytest.raises(ValueError, match=r"cu_seqlens_padded is of lengths \[6\]; needs multiples"):
        get_batch_on_this_cp_rank(torch.tensor([0, 6]), torch.zeros(6), None, None)
