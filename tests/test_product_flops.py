"""FLOPs of products, counted in compiled modules."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.product_flops import product_flops

A, B = jnp.ones((8, 16)), jnp.ones((16, 32))
ONE = 2 * 8 * 16 * 32


def counted(function, *args):
    return product_flops(jax.jit(function).lower(*args).compile().as_text())


def test_products_and_batches():
    assert counted(jnp.matmul, A, B) == ONE
    assert counted(lambda a, b: a.T @ (a @ b), A, B) == 2 * ONE
    assert counted(jnp.matmul, jnp.ones((5, 8, 16)), jnp.ones((5, 16, 32))) == 5 * ONE
    assert counted(jnp.add, A, A) == 0


def test_a_product_counts_as_often_as_its_loops_turn():
    def turn(a, b):
        return lax.fori_loop(0, 3, lambda i, a: lax.fori_loop(0, 7, lambda j, a: jnp.tanh(a @ b @ b.T), a), a)

    assert counted(turn, A, B) == 3 * 7 * 2 * ONE


def test_of_a_conditional_the_busiest_branch_counts():
    def branch(times):
        return lambda a, b: lax.fori_loop(0, times, lambda i, a: jnp.tanh(a @ b @ b.T), a)

    assert counted(lambda i, a, b: lax.switch(i, [branch(n) for n in (2, 5, 3)], a, b), 1, A, B) == 5 * 2 * ONE


def test_a_loop_that_does_not_tell_its_turns_raises():
    def until(a, b):
        return lax.while_loop(lambda a: a.sum() < 1e6, lambda a: a @ b @ b.T, a)

    with pytest.raises(ValueError, match="how often the loop while.* turns"):
        counted(until, A, B)
