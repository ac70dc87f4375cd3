"""Shares of the tests: every test is in one of them."""

import pytest

import share


def test_every_item_is_in_one_share():
    items = list(range(11))
    assert share.part(items, "2/4") == [1, 5, 9]
    assert sorted(i for n in (1, 2, 3, 4) for i in share.part(items, f"{n}/4")) == items
    assert share.part(items, "1/1") == items


@pytest.mark.parametrize("wrong", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b"])
def test_names_a_share_that_is_none(wrong: str):
    with pytest.raises(pytest.UsageError, match=f"--share is {wrong}; needs N/OF"):
        share.part([], wrong)
