"""The table of environment variables: defaults, current values, and unknown names."""

import pytest

from te_attention import environment


@pytest.mark.parametrize("name", environment.VARIABLES)
def test_an_unset_variable_has_its_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert environment.read(name) == environment.VARIABLES[name][0]


def test_a_variable_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "1", "two"):
        monkeypatch.setenv("NVTE_FLASH_ATTN", value)
        assert environment.read("NVTE_FLASH_ATTN") == value
        assert environment.variables_set()["NVTE_FLASH_ATTN"] == value


@pytest.mark.parametrize(("name", "default"), [("NVTE_FUSED_ATTN", True), ("NVTE_DEBUG", False)])
def test_a_switch_is_0_or_1_or_empty(
    name: str, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert environment.switch(name) is default
    for value, on in (("", default), ("0", False), ("1", True)):
        monkeypatch.setenv(name, value)
        assert environment.switch(name) is on
    for value in ("false", "no", "2", "-1", "01", " 0"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}'; needs 0 or 1"):
            environment.switch(name)


def test_a_number_is_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVTE_DPA_FP8DS_AMAX_HISTLEN"
    for value, number in (("", 1), ("7", 7), (" 16 ", 16)):
        monkeypatch.setenv(name, value)
        assert environment.number(name) == number
    for value in ("yes", "-1", "1.5"):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}'; needs a number"):
            environment.number(name)


def test_a_reader_notices_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    read = environment.reader("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
    seen = {read()}
    for value in ("0", "1", ""):
        monkeypatch.setenv("NVTE_FLASH_ATTN", value)
        seen.add(read())
    assert len(seen) == 4
    monkeypatch.delenv("NVTE_FLASH_ATTN")
    assert read() in seen


def test_a_name_outside_the_table_is_refused() -> None:
    with pytest.raises(KeyError):
        environment.read("NVTE_UNKNOWN")
