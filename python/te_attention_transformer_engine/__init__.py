"""Serves TransformerEngine's import names from this folder, where no other package has them.

Importing this module appends a finder to sys.meta_path. In an installation,
te_attention_transformer_engine.pth imports it when the interpreter starts, so it imports nothing
that is not loaded by then. The finder is last: a package of NVIDIA's is found before it is asked,
whichever of the two was installed first, and neither has files under the other's names.
"""

import os
import sys

TYPE_CHECKING = False  # type checkers take it as true; typing itself takes time to import
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# Top-level packages, each a folder next to this file. Together they are one interface: they are
# served only if no other package has any of the names, so that no program runs on a mixture.
NAMES = ("transformer_engine", "transformer_engine_torch", "transformer_engine_jax")

_FOLDER = __path__[0]
__path__ = []  # the folders are importable under their own names only, or they would exist twice


def _is_namespace(spec: "ModuleSpec") -> bool:
    """Whether this is a folder without __init__.py, as an uninstalled package may leave behind."""
    return spec.origin is None and spec.submodule_search_locations is not None


def _is_of_another(spec: "ModuleSpec | None") -> bool:
    """Whether this is a package, and not ours. A module made by hand has no spec."""
    if spec is None:
        return True
    return not _is_namespace(spec) and not str(spec.origin).startswith(_FOLDER + os.sep)


def _is_elsewhere(name: str) -> bool:
    """Whether another package of this name is imported or would be."""
    if sys.modules.get(name) is not None:
        return _is_of_another(getattr(sys.modules[name], "__spec__", None))
    # All finders, not only PathFinder: those of editable installations may come after this one.
    finders = (f for f in sys.meta_path if f is not Finder and hasattr(f, "find_spec"))
    specs = (finder.find_spec(name, None) for finder in finders)
    return any(spec is not None and _is_of_another(spec) for spec in specs)


def _own_spec(name: str) -> "ModuleSpec | None":
    from importlib.machinery import PathFinder  # only here: see above

    return PathFinder.find_spec(name, [_FOLDER])


def _refuse_namespace(name: str, package: "ModuleType | None") -> None:
    """Raises where a submodule is missing because a folder without __init__.py is in the way."""
    spec = getattr(package, "__spec__", None)
    if spec is not None and _is_namespace(spec):
        folders = ", ".join(spec.submodule_search_locations)
        raise ModuleNotFoundError(
            f"{spec.name} is {folders}, without __init__.py; needs that folder removed, so that "
            "te-attention-transformer-engine is found",
            name=name,
        )


class Finder:
    """The last finder of sys.meta_path. PathFinder serves the submodules of what it finds."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> "ModuleSpec | None":
        """The package of this name in this folder, or None."""
        if name in NAMES:
            return None if any(map(_is_elsewhere, NAMES)) else _own_spec(name)
        top = name.partition(".")[0]
        if top in NAMES:
            _refuse_namespace(name, sys.modules.get(top))
        return None


sys.meta_path.append(Finder)
