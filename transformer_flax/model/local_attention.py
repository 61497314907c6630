"""Local (restricted) self-attention (section 4, table 1): position i sees j where |i - j| <= r // 2.

Letters of shapes: B batch, L length, H heads.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def local_mask(length: int, r: int) -> jax.Array:
    """Returns True where a key is at most r // 2 positions from the query: [1, 1, length, length]."""
    position = jnp.arange(length)
    return (jnp.abs(position[:, None] - position) <= r // 2)[None, None]


def attend_locally(
    attend: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    r: int,
) -> jax.Array:
    """Computes `attend(query, key, value, mask)` under `local_mask`, at a cost that grows with L r instead of L^2.

    query [B, L, H, d_k], key [B, L, H, d_k], value [B, L, H, d_v], mask [B | 1, 1, L | 1, L] -> [B, L, H, d_v]. The
    mask applies in addition to `local_mask`. The window reaches r // 2 positions to either side.

    The queries are split into blocks of r // 2. A block of queries sees only its own block of keys and the two beside
    it. So each block is computed like a separate sentence, with three blocks of keys: `attend` computes query
    [B', Q, H, d_k], key [B', M, H, d_k], value [B', M, H, d_v], mask broadcastable to [B', H, Q, M] -> [B', Q, H, d_v].
    """
    batch, length = query.shape[:2]
    block = max(r // 2, 1)
    if length <= 3 * block:  # a block would see nearly all keys
        return attend(query, key, value, mask & local_mask(length, r))
    blocks = -(-length // block)
    starts = block * jnp.arange(blocks)[:, None]
    rows = starts + jnp.arange(block)  # [blocks, block], the positions of a block's queries
    columns = starts + jnp.arange(-block, 2 * block)  # [blocks, 3 block], the positions of its keys
    near = jnp.abs(rows[:, :, None] - columns[:, None]) <= r // 2  # [blocks, block, 3 block]
    near &= ((columns >= 0) & (columns < length))[:, None]
    rows, columns = (jnp.clip(positions, 0, length - 1) for positions in (rows, columns))

    def around(x: jax.Array) -> jax.Array:
        """[B, L, ...] -> [B blocks, 3 block, ...]: each block with its two neighbours."""
        return x[:, columns].reshape(-1, 3 * block, *x.shape[2:])

    mask = jnp.asarray(mask)[:, 0, rows[:, :, None] if mask.shape[2] > 1 else 0, columns[:, None]] & near
    mask = jnp.broadcast_to(mask, (batch, *near.shape)).reshape(-1, 1, block, 3 * block)
    padding = (0, 0), (0, blocks * block - length), (0, 0), (0, 0)
    query = jnp.pad(query, padding).reshape(-1, block, *query.shape[2:])
    attended = attend(query, around(key), around(value), mask)
    return attended.reshape(batch, -1, *attended.shape[2:])[:, :length]
