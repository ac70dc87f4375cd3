"""Errors with the name of an argument, the value seen and the value needed."""


class RefusedError(ValueError, AssertionError):
    """An unsupported argument. TransformerEngine raises one of the two base classes."""


def refuse(name: str, seen: object, needed: str) -> None:
    """Raises a RefusedError."""
    raise RefusedError(f"{name} is {seen}; needs {needed}")


def require(holds: bool, name: str, seen: object, needed: str) -> None:
    """Refuses unless `holds`."""
    if not holds:
        refuse(name, seen, needed)
