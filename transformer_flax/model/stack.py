"""A stack of N layers (section 3.1), and two ways to compute it with less memory or compilation: remat and scan."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_flax.errors import UserError
from transformer_flax.model.config import LayerConfig
from transformer_flax.model.layers import layer_norm
from transformer_flax.model.residuals import choose_start


class Stack(nn.Module):
    """N layers, one after the other (section 3.1).

    With `pre_norm`, a LayerNorm follows the last layer, because no layer normalises its output.

    The stack shares the scope of the model that contains it (`nn.share_scope`): encoder_0, encoder_1, ...,
    encoder_norm are direct children of the model.
    """

    config: LayerConfig
    layer: ClassVar[type[nn.Module]]
    prefix: ClassVar[str]

    def setup(self):
        layer = self.layer
        c, residual = choose_start(self.config, decoder=self.prefix == "decoder")
        if c.remat != "none":  # the backward pass recomputes activations instead of storing them
            policies = {"products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "layers": None}
            layer = nn.remat(layer, policy=policies[c.remat], prevent_cse=not c.scan_layers)
        self.layers = [layer(c, residual, name=f"{self.prefix}_{n}") for n in range(c.num_layers)]
        self.norm = layer_norm(c, f"{self.prefix}_norm") if c.pre_norm else lambda x: x

    def __call__(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        """Applies the layers: x [B, T, d_model], and the remaining arguments of every layer -> [B, T, d_model]."""
        if self.config.scan_layers and not self.is_initializing():
            x = self._scan(x, *others)
        else:
            for layer in self.layers:
                x = layer(x, *others)
        return self.norm(x)

    def _scan(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        """Applies the layers as one compiled layer that is run N times."""
        # Parameters are stacked here, so that checkpoints are the same with and without `scan_layers`.
        params = jax.tree.map(lambda *p: jnp.stack(p), *(layer.variables["params"] for layer in self.layers))
        keys = jax.random.split(self.make_rng("dropout"), len(self.layers)) if self.has_rng("dropout") else None
        one, *more = (layer.clone(parent=None, name=f"{self.prefix}_0") for layer in self.layers)
        if any(layer != one for layer in more) or len({*map(id, self.layers)}) < len(self.layers):
            raise UserError("config.model.scan_layers must be False, as the layers differ or share parameters")

        def apply(x, params_and_key):
            params, key = params_and_key
            y: Any = one.apply({"params": params}, x, *others, rngs=None if key is None else {"dropout": key})
            return y, None

        return jax.lax.scan(apply, x, (params, keys))[0]
