"""Primitives of JAX that are lowered to the custom calls of TransformerEngine."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


class BasePrimitive:
    """A primitive: its name is that of the custom call, the last argument is its static config."""

    name: str
    multiple_results = True
    impl_static_args: tuple[int, ...]
    outer_primitive: Any = None  # of register_primitive(): bind(*operands, config=config)

    @staticmethod
    def outer_abstract(*operands: Any, config: Any) -> tuple:
        """Shapes and types of the results."""
        raise NotImplementedError

    @staticmethod
    def impl(*operands: Any, config: Any) -> tuple:
        """The results, by operations of JAX."""
        raise NotImplementedError


def _loop(primitive: Any) -> Any:
    """A rule for vmap: one call for each index of the mapped axis, of any operands."""

    def batcher(operands: tuple, axes: tuple, config: Any) -> tuple:
        mapped = {
            i: jnp.moveaxis(operands[i], axis, 0) for i, axis in enumerate(axes) if axis is not None
        }

        def one(some: dict) -> list:
            return primitive.bind(*(some.get(i, x) for i, x in enumerate(operands)), config=config)

        out = jax.lax.map(one, mapped)
        return out, (0,) * len(out)

    return batcher


def register_primitive(cls: type[BasePrimitive]) -> None:
    """Makes the primitive of a class."""
    primitive = Primitive(f"{cls.name}_wrapper")
    primitive.multiple_results = cls.multiple_results
    primitive.def_impl(jax.jit(cls.impl, static_argnames="config"))
    primitive.def_abstract_eval(cls.outer_abstract)
    batching.primitive_batchers[primitive] = _loop(primitive)
    mlir.register_lowering(
        primitive, mlir.lower_fun(cls.impl, multiple_results=cls.multiple_results)
    )
    cls.outer_primitive = primitive
