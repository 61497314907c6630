"""A loop over a batch that sentences leave when they are done."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

SMALLEST = 16  # rows: with fewer, a step is hardly faster


class Rows(Protocol):
    """The state of a batch of sentences, a tree: the first axis of each leaf is theirs."""

    @property
    def done(self) -> jax.Array:
        """bool [B]"""

    @property
    def result(self) -> Any:
        """What is wanted of it in the end."""


R = TypeVar("R", bound=Rows)


def extend_until_done(extend: Callable[[jax.Array, R], R], rows: R, max_length: int) -> Any:
    """Extends the outputs of all sentences position by position until each is done -> the `result` of all.

    The outputs of a batch are of many lengths. Once half of its sentences are done, the others go on in a batch of
    half the size, and so on down to `SMALLEST`. Each size is a loop of its own, and all are one program, so that
    nothing waits for the host.

    Args:
      extend: `(position, rows) -> rows`; a sentence that is done must not change by it.
      rows: before the first position, 0.
      max_length: positions there are.
    """
    return _extend(extend, jnp.int32(0), rows, max_length)


def _extend(extend, position: jax.Array, rows: Any, max_length: int) -> Any:
    size = rows.done.shape[0]
    smaller = size // 2 if size >= 2 * SMALLEST else 0

    def go_on(carry):
        position, rows = carry
        return (position < max_length) & (jnp.sum(~rows.done) > smaller)

    def extend_all(carry):
        position, rows = carry
        return position + 1, extend(position, rows)

    position, rows = jax.lax.while_loop(go_on, extend_all, (position, rows))
    if not smaller:
        return rows.result
    left = jnp.argsort(rows.done)[:smaller]  # those that are not done come first
    results = _extend(extend, position, jax.tree.map(lambda leaf: leaf[left], rows), max_length)
    return jax.tree.map(lambda all_of_them, some: all_of_them.at[left].set(some), rows.result, results)
