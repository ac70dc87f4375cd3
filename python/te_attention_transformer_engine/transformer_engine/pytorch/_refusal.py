"""How this package refuses: the argument, the value seen, the value needed."""

NOT_YET = "FP8 attention is not there yet"


class RefusedError(ValueError, AssertionError):
    """An argument that cannot be served. TransformerEngine raises one or the other."""


def refuse(name: str, seen: object, needed: str) -> None:
    """Raises a RefusedError."""
    raise RefusedError(f"{name} is {seen}; needs {needed}")


def require(holds: bool, name: str, seen: object, needed: str) -> None:
    """Refuses unless it holds."""
    if not holds:
        refuse(name, seen, needed)


def refuse_later(fp8: bool, cp_group: object) -> None:
    """Refuses what is accepted in signatures and not there yet."""
    require(not fp8, "fp8", fp8, f"False: {NOT_YET}")
    require(cp_group is None, "cp_group", "a group", "None: context parallelism is not there yet")
