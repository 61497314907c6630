"""Times ways to follow a beam's ancestors in the key-value cache: python benchmarks/ancestors.py [--batch_size=16].

The search reorders hypotheses: each continues from the past of its parent. Ways to find the keys and values of a past:
  gather   reorder the cache at every step, so that each hypothesis has its own past;
  indices  leave the cache as it was written, and gather each past through a table of ancestors;
  mask     leave it as it was written, and attend to all K hypotheses under a mask of the ancestors: with sums of
           products (the model's way on a CPU) or with matrix products (its way elsewhere).
Only the self-attention of the decoder's layers is timed, over all positions of an output, with random parents.
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.timing import interleaved
from transformer_flax import cli
from transformer_flax.decoding.search import follow
from transformer_flax.model.attention import ancestor_mask, attend_to_cache

BATCH = flags.DEFINE_integer("batch_size", 16, "B, sentences a batch")
BEAM = flags.DEFINE_integer("beam_size", 4, "K, hypotheses a sentence")
LENGTH = flags.DEFINE_integer("length", 64, "L, tokens of each output")
LAYERS = flags.DEFINE_integer("layers", 6, "layers of the decoder")
HEADS = flags.DEFINE_integer("heads", 8, "H, heads of each layer")
DEPTH = flags.DEFINE_integer("depth", 64, "D = d_k = d_v of each head")
REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls of each way")

put = jax.lax.dynamic_update_index_in_dim


def attend(query, key, value, position):
    """Attends from queries [B, K, H, D] to each hypothesis' own past [B, K, H, L, D]."""
    products = jnp.einsum("bkhd,bkhld->bkhl", query, key) / query.shape[-1] ** 0.5
    past = jnp.arange(key.shape[3]) <= position
    return jnp.einsum("bkhl,bkhld->bkhd", jax.nn.softmax(jnp.where(past, products, -jnp.inf)), value)


def gather(x, cache, parents, ancestors, position):
    del ancestors
    key, value = (put(follow(past, parents), x, position, 3) for past in cache)
    return attend(x, key, value, position), (key, value)


def indices(x, cache, parents, ancestors, position):
    del parents
    cache = tuple(put(past, x, position, 3) for past in cache)
    key, value = (jnp.take_along_axis(past, ancestors[:, :, None, :, None], axis=1) for past in cache)
    return attend(x, key, value, position), cache


def mask(x, cache, parents, ancestors, position, *, attend_to_cache=attend_to_cache):
    del parents
    new = x.swapaxes(1, 2)  # [B, H, K, D]
    key, value = put(cache[0], new.swapaxes(2, 3), position, 4), put(cache[1], new, position, 3)
    everything = key.reshape(*key.shape[:3], -1), value.reshape(*value.shape[:2], -1, value.shape[-1])
    return attend_to_cache(x, *everything, ancestor_mask(ancestors, position)), (key, value)


def look_up_by_matrix_products(query, key, value, mask):
    products = jnp.einsum("bkhd,bhdm->bhkm", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, products, -jnp.inf))
    return jnp.einsum("bhkm,bhmd->bhkd", weights, value).swapaxes(1, 2)


def make(way: Callable, shapes: tuple[str, str]) -> Callable[[], Any]:
    """Returns a compiled loop over all positions, for cached keys and values with the axes `shapes`."""
    sizes = {"B": BATCH.value, "K": BEAM.value, "L": LENGTH.value, "H": HEADS.value, "D": DEPTH.value}

    def room(axes: str):
        return jnp.zeros([sizes[axis] for axis in axes])

    def of(key, position, draw, *arguments):
        return draw(jax.random.fold_in(key, position), *arguments)

    @jax.jit
    def loop(parents_key, noise_key):
        def step(position, carry):
            x, ancestors, caches = carry
            parents = of(parents_key, position, jax.random.randint, (sizes["B"], sizes["K"]), 0, sizes["K"])
            ancestors = put(
                follow(ancestors, parents), jnp.broadcast_to(jnp.arange(sizes["K"]), parents.shape), position, 2
            )
            x = follow(x, parents) + 0.1 * of(noise_key, position, jax.random.normal, x.shape)
            new = []
            for cache in caches:
                y, cache = way(x, cache, parents, ancestors, position)
                x = 0.5 * (x + y)
                new.append(cache)
            return x, ancestors, new

        caches = [(room(shapes[0]), room(shapes[1])) for _ in range(LAYERS.value)]
        first = room("BKHD"), room("BKL").astype(jnp.int32), caches
        return jax.lax.fori_loop(0, sizes["L"], step, first)[0]

    return functools.partial(loop, jax.random.key(0), jax.random.key(1))


def main() -> None:
    ways = {
        "gather": make(gather, ("BKHLD", "BKHLD")),
        "indices": make(indices, ("BKHLD", "BKHLD")),
        "mask, sums of products": make(mask, ("BHDKL", "BHKLD")),
        "mask, matrix products": make(
            functools.partial(mask, attend_to_cache=look_up_by_matrix_products), ("BHDKL", "BHKLD")
        ),
    }
    timings = interleaved(ways, REPEATS.value)
    for name, timing in timings.items():
        np.testing.assert_allclose(timing.result, timings["gather"].result, atol=1e-4, err_msg=name)
    table = rich.table.Table("way", "a step", "from", "to")
    for name, timing in timings.items():
        per_step = (1000 * seconds / LENGTH.value for seconds in (timing.median, timing.low, timing.high))
        table.add_row(name, *(f"{milliseconds:.2f} ms" for milliseconds in per_step))
    console = rich.console.Console()
    console.print(
        f"{LAYERS.value} layers, {BATCH.value} sentences x {BEAM.value} hypotheses x {LENGTH.value} positions, "
        f"{HEADS.value} heads of {DEPTH.value}, float32, {jax.devices()[0].device_kind}",
        table,
        sep="\n",
    )


if __name__ == "__main__":
    cli.run(main)
