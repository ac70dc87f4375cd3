"""A cache with a limit."""

from collections.abc import Hashable
from typing import TypeVar

Value = TypeVar("Value")


def keep(cache: dict, key: Hashable, value: Value, most: int = 1024) -> Value:
    """Adds a value and returns it. A cache that has `most` entries is emptied first."""
    if len(cache) >= most:
        cache.clear()
    cache[key] = value
    return value
