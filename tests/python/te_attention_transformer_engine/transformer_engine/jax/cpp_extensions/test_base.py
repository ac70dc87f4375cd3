"""Primitives that register_primitive() makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_engine.jax.cpp_extensions.base import BasePrimitive, register_primitive


class ScaledSum(BasePrimitive):
    """The sum of a row and of a number, times the config."""

    name = "te_attention_test_scaled_sum"
    impl_static_args = (2,)

    @staticmethod
    def outer_abstract(row: Any, number: Any, config: int) -> tuple:
        del number, config
        return (jax.core.ShapedArray((), row.dtype),)

    @staticmethod
    def impl(row: Any, number: Any, config: int) -> tuple:
        return (config * (row.sum() + number),)


register_primitive(ScaledSum)


def scaled_sum(row: Any, number: Any) -> Any:
    return ScaledSum.outer_primitive.bind(row, number, config=3)[0]


def test_calls_and_jit() -> None:
    row = jnp.arange(4.0)
    assert scaled_sum(row, jnp.float32(1)) == jax.jit(scaled_sum)(row, jnp.float32(1)) == 21
    assert "te_attention_test_scaled_sum_wrapper" in str(jax.make_jaxpr(scaled_sum)(row, 1.0))


def test_vmap_maps_each_operand_along_its_own_axis() -> None:
    rows, numbers = jnp.arange(12.0).reshape(4, 3), jnp.arange(3.0)
    both = jax.vmap(scaled_sum, (1, 0))(rows, numbers)
    np.testing.assert_array_equal(both, 3 * (rows.sum(0) + numbers))
    one = jax.vmap(scaled_sum, (0, None))(rows, numbers[1])
    np.testing.assert_array_equal(one, 3 * (rows.sum(1) + 1))
