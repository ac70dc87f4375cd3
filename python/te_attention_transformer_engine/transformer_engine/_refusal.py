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


def check_dropout(name: str, probability: object) -> None:
    """Refuses what is no probability of dropping."""
    needed = "a number from 0 to below 1"
    try:
        number = float(probability)
    except (TypeError, ValueError):
        return refuse(name, repr(probability), needed)
    return require(0 <= number < 1, name, probability, needed)
