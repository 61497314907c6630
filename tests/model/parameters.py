"""Parameters for tests, in which nothing is zero or one, as biases and LayerNorms are at first: all must count."""

import functools

import jax
import numpy as np

from transformer_flax.model.config import ModelConfig
from transformer_flax.model.registry import init_params


@functools.cache
def random_params(config: ModelConfig) -> dict:
    """Random float32 parameters of `make_model(config)`, sized so that activations stay near one."""
    rng = np.random.default_rng(0)

    def fill(path, shape):
        noise = rng.normal(size=shape.shape).astype(np.float32)
        match path[-1].key:
            case "scale" | "omega":
                return 1 + 0.3 * noise
            case "bias":
                return 0.3 * noise
            case "kernel":
                # The output projection of attention joins two axes, heads and d_v, and a convolution's kernel its
                # places and their width; all others start from one.
                joined = path[-2].key in ("output", "conv") and len(shape.shape) == 3
                fan_in = np.prod(shape.shape[:2]) if joined else shape.shape[0]
                return noise / np.sqrt(fan_in).astype(np.float32)
            case "table" if path[-2].key == "distances":  # added to keys, which are near one too
                return noise
            case "v":
                return noise / np.sqrt(shape.shape[-1]).astype(np.float32)
            case "embedding" | "table" | "query":
                return noise * np.float32(config.d_model**-0.5)
        raise AssertionError(f"no value for the parameter {path}")

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(fill, shapes)
