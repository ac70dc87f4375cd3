"""Errors with the name of an argument, the value seen and the value needed."""

NOT_YET = "FP8 attention is not there yet"


class RefusedError(ValueError, AssertionError):
    """An unsupported argument. TransformerEngine raises one of the two base classes."""


def refuse(name: str, seen: object, needed: str) -> None:
    """Raises a RefusedError."""
    raise RefusedError(f"{name} is {seen}; needs {needed}")


def require(holds: bool, name: str, seen: object, needed: str) -> None:
    """Refuses unless `holds`."""
    if not holds:
        refuse(name, seen, needed)


def refuse_later(fp8: bool, cp_group: object) -> None:
    """Refuses arguments that the signatures accept and that are not implemented."""
    require(not fp8, "fp8", fp8, f"False: {NOT_YET}")
    require(cp_group is None, "cp_group", "a group", "None: context parallelism is not there yet")
