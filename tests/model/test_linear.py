"""A product with a gradient of its own, and the logits, which are one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_flax.model.layers import to_logits
from transformer_flax.model.linear import product, product_of_few_rows, wide_einsum

TOKENS = 64
LAST_BY_FIRST = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 32), (32, 8)])
def test_the_gradient_of_a_matrix_is_exact_and_transposes_the_narrower_side_alone(inputs, outputs):
    rng = np.random.default_rng(0)
    x, dy, matrix = (
        rng.integers(-9, 9, shape).astype(np.float32)  # whole numbers, whose sums are exact in any order
        for shape in ((TOKENS, inputs), (TOKENS, outputs), (inputs, outputs))
    )

    def gradient(matrix, x, dy):
        return jax.grad(lambda matrix: jnp.sum(product(x, matrix, LAST_BY_FIRST) * dy))(matrix)

    compiled = jax.jit(gradient).lower(matrix, x, dy).compile()
    np.testing.assert_array_equal(compiled(matrix, x, dy), x.T @ dy)
    program = compiled.as_text()
    assert f"f32[{min(inputs, outputs)},{TOKENS}]" in program
    assert f"f32[{max(inputs, outputs)},{TOKENS}]" not in program


def test_the_gradient_of_the_embedding_is_exact_and_transposes_the_narrow_side_of_the_logits():
    vocab_size, d_model = 32, 8
    rng = np.random.default_rng(0)
    y, gradient, embedding = (
        rng.integers(-9, 9, shape).astype(np.float32)
        for shape in ((TOKENS, d_model), (TOKENS, vocab_size), (vocab_size, d_model))
    )

    def of_embedding(embedding, y, gradient):
        return jax.grad(lambda embedding: jnp.sum(to_logits(y, embedding) * gradient))(embedding)

    compiled = jax.jit(of_embedding).lower(embedding, y, gradient).compile()
    np.testing.assert_array_equal(compiled(embedding, y, gradient), gradient.T @ y)
    program = compiled.as_text()
    assert f"f32[{d_model},{TOKENS}]" in program
    assert f"f32[{vocab_size},{TOKENS}]" not in program


def test_products_of_low_precision_are_summed_in_high():
    # In bfloat16, 256 + 1 is 256.
    ones, matrix = jnp.ones((1, 2), jnp.bfloat16), jnp.array([[256, 1]], jnp.bfloat16)
    assert wide_einsum("bd,vd->bv", ones, matrix) == 257
    assert to_logits(ones, matrix.astype(jnp.float32)) == 257
    for rows in (1, 2):
        products = product_of_few_rows(jnp.ones((1, 1, rows, 2), jnp.bfloat16), matrix.T[None, None])
        np.testing.assert_array_equal(products, np.full((1, 1, rows, 1), 257))
