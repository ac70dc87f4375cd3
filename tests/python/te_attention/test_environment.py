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
