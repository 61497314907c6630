"""Costs of a model, counted from the model that is built: parameters, floating-point operations, activations."""

import collections
import functools
import itertools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from transformer_flax.model.config import ModelConfig
from transformer_flax.model.registry import kind_of, make_model, param_shapes


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Counts the parameters of each module. Layers of a stack are counted together, as "encoder/self_attention"."""
    counts: dict[str, int] = {}
    for name, module in param_shapes(config).items():
        for inner, content in (module if isinstance(module, dict) else {"": module}).items():  # or the model's own
            has_modules = isinstance(content, dict) and any(isinstance(part, dict) for part in content.values())
            key = "/".join([re.sub(r"_\d+$", "", name), *([inner] if has_modules else [])])
            counts[key] = counts.get(key, 0) + sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(content))
    return counts


def forward_flops(config: ModelConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> dict[str, int]:
    """Counts the floating-point operations of each module for the logits of sentence pairs of these lengths [pairs].

    Counts the matrix products and convolutions of the program, and attention's two products. Each token and element of
    a matrix counts 2 operations, a product and a sum. Masks save nothing, but local attention counts only the keys in
    its window. Padding, lookups and element-wise operations count nothing. A classifier reads the source alone.
    """
    source, target = (np.asarray(lengths, np.int64) for lengths in (source_lengths, target_lengths))
    r = getattr(config, "neighbourhood", 0)
    seen = 2 * (r // 2) + 1 if r else None  # keys in the window of local attention

    def grown(lengths: np.ndarray, power: int) -> np.ndarray:
        """Returns lengths^power; in local attention, each token of a text sees at most `seen` keys of it."""
        return lengths * np.clip(lengths, None, seen) ** (power - 1) if power else np.ones_like(lengths)

    return {
        module: round(
            sum(factor * int((grown(source, s) * grown(target, t)).sum()) for (s, t), factor in terms.items())
        )
        for module, terms in _flops_polynomials(make_model(config.changed(**WITHOUT_PRODUCTS))).items()
    }


# No product depends on these fields. Configs that differ in nothing else share a cached count.
WITHOUT_PRODUCTS = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0, "branch_init": 1.0}
PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
LENGTHS = (512, 1024, 1536)  # of sources and targets; multiples of most numbers of experts and widths of blocks
CHECKED = (1200, 1040)  # lengths at which a program is compared: far from the primes, so that rounded lengths differ
TOLERANCE = 0.1  # of the operations there

Polynomials = dict[str, dict[tuple[int, int], float]]  # by module: the factors of S^s T^t, by (s, t)


@functools.cache
def _flops_polynomials(model: Any) -> Polynomials:
    """Returns the floating-point operations of a pair by module, as polynomials in its lengths S and T.

    One traced program gives them, if a program of other lengths agrees. It does not where an axis of a product has
    another length, such as S + 1 with a token for the class, S + T with source and target in one row, or the capacity
    of an expert. Then nine programs of long texts give polynomials of at most the second degree in S and in T. A
    length that is rounded up, as a capacity is, counts about as if it were not.

    Raises:
      NotImplementedError: no such polynomials are within `TOLERANCE` of the operations.
    """
    counted = collections.Counter()
    for product in _products(model, *CHECKED):
        counted[product.module] += product.flops

    def error(polynomials: Polynomials) -> float:
        left = counted.copy()
        for module, terms in polynomials.items():
            left[module] -= sum(factor * CHECKED[0] ** s * CHECKED[1] ** t for (s, t), factor in terms.items())
        return sum(map(abs, left.values()))

    if error(polynomials := _factorise(model)) == 0:
        return polynomials
    if error(polynomials := _fit(model)) > TOLERANCE * counted.total():
        raise NotImplementedError(
            f"the operations of {type(model).__name__} are no polynomial in the lengths: count them in {__file__}"
        )
    return polynomials


def _factorise(model: Any) -> Polynomials:
    """Returns the polynomials of a model whose products have no axes but lengths, sizes and their products.

    The source and target of the traced program have lengths that are primes and divide no size of the model. So the
    number of times that a prime divides the operations of a product is the power of that length.
    """
    sizes = {value for value in vars(model.config).values() if type(value) is int}
    sizes |= {size for leaf in jax.tree.leaves(param_shapes(model.config)) for size in leaf.shape}
    primes = [prime for prime in PRIMES if all(size % prime or not size for size in sizes)][:2]
    polynomials: dict[str, Any] = collections.defaultdict(collections.Counter)
    for product in _products(model, *primes):
        if not product.flops:
            continue
        factor, powers = product.flops, []
        for prime in primes:
            powers.append(next(power for power in itertools.count() if factor % prime ** (power + 1)))
            factor //= prime ** powers[-1]
        polynomials[product.module][tuple(powers)] += factor
    return polynomials


def _fit(model: Any) -> Polynomials:
    """Returns the polynomials of at most second degree in S and in T that fit programs of all pairs of `LENGTHS`."""
    values: dict[str, Any] = collections.defaultdict(lambda: np.zeros((3, 3)))
    for at in np.ndindex(3, 3):
        for product in _products(model, *(LENGTHS[i] for i in at)):
            values[product.module][at] += product.flops
    solve = np.linalg.inv(np.vander(LENGTHS, increasing=True))
    return {module: dict(np.ndenumerate(solve @ value @ solve.T)) for module, value in values.items()}


class Product(NamedTuple):
    """A matrix product or a convolution of a program."""

    module: str  # `product_flops` gives the name stack instead
    flops: int


def _products(model: Any, source_length: int, target_length: int) -> list[Product]:
    """Returns the products of the forward pass of a pair of these lengths.

    Traces a program without blocks of local attention, with enough positions, and without kernels that hide products.
    """
    lengths = {"source": source_length, "target": target_length}
    enough = 2 * max(lengths.values())
    config = model.config.changed(neighbourhood=0, max_length=enough, attention_implementation="plain")
    sides = [jax.ShapeDtypeStruct((1, lengths[side]), jnp.int32) for side in kind_of(config).reads]
    program = jax.make_jaxpr(make_model(config).init)(jax.random.key(0), *sides)  # runs the forward pass too
    modules = count_parameters(model.config)
    return [each._replace(module=_module_of(each.module, modules)) for each in product_flops(program.jaxpr)]


def _module_of(stack: str, modules: Iterable[str]) -> str:
    """Finds the module of an operation by its name stack, "Transformer/encoder/encoder_0/.../self_attention/query".

    Returns:
      Of the `modules` whose names are all in the stack, the one that begins outermost; of several, the one that ends
      innermost. If there is no such module, the first name below the model's, or "logits".
    """
    # With and without its number: encoder_1 is a layer of the encoder, feed_forward_2 a module of that name.
    names = [each for name in re.split(r"[/.]", stack) for each in (re.sub(r"_\d+$", "", name), name)]
    around = {module: module.split("/") for module in modules if set(module.split("/")) <= set(names)}
    if around:
        return max(around, key=lambda module: (-names.index(around[module][0]), names.index(around[module][-1])))
    return next(iter([name for name in stack.split("/") if name.isidentifier()][1:]), "logits")


def product_flops(program: Any, stack: str = "") -> list[Product]:
    """Lists the matrix products and convolutions in a jaxpr.

    Raises:
      NotImplementedError: products are in a Pallas kernel, in `ragged_dot`, or in a `while` loop of unknown length.
    """
    found = []
    for equation in program.eqns:
        kind, names = equation.primitive.name, f"{stack}/{equation.source_info.name_stack}"
        if kind == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            found.append(Product(names, 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)))
        if kind == "conv_general_dilated":
            kernel, outputs = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec[0]
            result = equation.outvars[0].aval.shape
            found.append(Product(names, 2 * math.prod(result) * math.prod(kernel) // kernel[outputs]))
        inner = [getattr(param, "jaxpr", param) for param in equation.params.values()]
        times = equation.params["length"] if kind == "scan" else 1
        within = [
            product._replace(flops=times * product.flops)
            for each in inner
            if isinstance(each, jax.extend.core.Jaxpr)
            for product in product_flops(each, names)
        ]
        if "ragged_dot" in kind or (within and kind in ("while", "pallas_call")):
            raise NotImplementedError(f"the operations of {kind} are not counted: count them in {__file__}")
        branches = [product_flops(branch.jaxpr, names) for branch in equation.params.get("branches", ())]
        found += within + max(branches, key=lambda branch: sum(product.flops for product in branch), default=[])
    return found


def training_flops(config: ModelConfig, source_lengths: np.ndarray, target_lengths: np.ndarray) -> int:
    """Counts the floating-point operations of an update on sentence pairs of these lengths [pairs]: "model FLOPs".

    The count is three times `forward_flops`: the gradient with respect to either factor of a product costs as much as
    the product. Recomputation counts nothing.
    """
    return 3 * sum(forward_flops(config, source_lengths, target_lengths).values())


def activation_bytes(
    config: ModelConfig, rows: int, source_length: int, target_length: int, *, loss_chunks: int = 1
) -> int:
    """Counts the bytes that a forward pass over `rows` pairs of these lengths, with dropout, stores for the gradient.

    Counts the arrays of the program as it is written, without running it, and the logits of one of `loss_chunks`. XLA
    stores less where it recomputes cheap operations, and needs a little more memory for other purposes.
    """
    kind = kind_of(config)
    lengths = {"source": source_length, "target": target_length}
    sides = [jax.ShapeDtypeStruct((rows, lengths[side]), jnp.int32) for side in kind.reads]

    def kept(params: Any, *sides: jax.Array) -> list[jax.Array]:
        def features(params):
            rngs = {"dropout": jax.random.key(0)}
            method = None if kind.classifies else "features"
            y: Any = make_model(config).apply({"params": params}, *sides, rngs=rngs, method=method)
            return y if kind.classifies else y[0]

        y, backward = jax.vjp(features, params)
        given = {id(leaf) for leaf in jax.tree.leaves((params, sides))}
        return [y, *(leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in given)]

    leaves = jax.eval_shape(kept, param_shapes(config), *sides)
    logits = 0 if kind.classifies else 4 * rows * target_length * config.vocab_size // loss_chunks
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + logits
