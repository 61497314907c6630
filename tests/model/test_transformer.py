"""The laws of the whole model, and of every kind of translator.

Letters of shapes: B batch, S source, T target, H heads, K hypotheses, V vocabulary.
"""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from tests.conftest import TINY, VARIANTS, long
from tests.model.parameters import random_params
from tests.model.sentences import SOURCE, SOURCES, TARGET, B, K, S, T, compiled, logits_of
from tests.relatives.rivals import CONVOLUTIONAL, RECURRENT, RIVALS
from transformer_flax.errors import UserError
from transformer_flax.model import registry
from transformer_flax.model.config import STARTS, TransformerConfig
from transformer_flax.model.layers import EncoderLayer, layer_norm, to_logits
from transformer_flax.model.registry import attention_maps, init_params, make_model, param_shapes
from transformer_flax.model.residuals import RESIDUALS, AddAndNorm, Admin, TFixup, init_admin, with_omegas
from transformer_flax.model.transformer import Encoder, Transformer, shift_right
from transformer_flax.special_tokens import BEGIN_ID, END_ID, NUM_SPECIAL, PAD_ID


def pad(tokens, amount):
    return np.pad(tokens, ((0, 0), (0, amount)), constant_values=PAD_ID)


KINDS = VARIANTS | RIVALS
ONE_OF_EACH = {"transformer": TINY, "recurrent": RECURRENT, "convolutional": CONVOLUTIONAL}  # where much is compiled


def each(configs):
    return pytest.mark.parametrize("config", configs.values(), ids=configs)


@pytest.fixture(scope="module")
def maps():
    return jax.tree.map(np.asarray, attention_maps(TINY, random_params(TINY), SOURCE, TARGET))


# ----- the decoder's input


def test_special_tokens_are_the_first_ids():
    assert sorted({PAD_ID, BEGIN_ID, END_ID}) == list(range(NUM_SPECIAL))


def test_decoder_reads_the_target_one_position_late_behind_the_begin_symbol():
    np.testing.assert_array_equal(shift_right(jnp.array([[5, 6, 2, 0], [7, 2, 0, 0]])), [[1, 5, 6, 2], [1, 7, 2, 0]])
    np.testing.assert_array_equal(shift_right(jnp.array([[2]])), [[1]])


# ----- causality


@each(KINDS)
def test_logits_see_the_target_before_them_and_nothing_later(config):
    # One sentence in all rows; then row k has all of its target from position k on changed: [k, position].
    source, target = np.repeat(SOURCE[:1], T, axis=0), np.repeat(TARGET[:1], T, axis=0)
    is_changed = np.triu(np.ones((T, T), bool))
    changed = np.where(is_changed, NUM_SPECIAL + target % (config.vocab_size - NUM_SPECIAL), target)
    seen = np.abs(logits_of(config, source, changed) - logits_of(config, source, target)).max(axis=-1)
    later = np.triu(np.ones((T, T), bool), 1)
    np.testing.assert_array_equal(seen[~later], 0)  # to the bit: what is not before has no weight at all
    next_ones = np.diag(np.ones(T - 1, bool), 1)  # what is further away, a convolution need not reach
    assert (seen[later if isinstance(config, TransformerConfig) else next_ones] > 1e-3).all()


@pytest.mark.parametrize(
    "variant", [TINY, *(long(config, id=name) for name, config in VARIANTS.items() if config is not TINY)]
)
def test_gradients_reach_the_target_before_them_and_nothing_later(variant):
    # Every token stands at one place of one row only, so the gradients of its embedding are those of that place; tied,
    # it would have gradients as a source word and as an output too.
    config = dataclasses.replace(variant, tie_embeddings=False, num_layers=1, vocab_size=NUM_SPECIAL + T * T)
    target = np.arange(NUM_SPECIAL, config.vocab_size).reshape(T, T)
    memory = np.random.default_rng(0).normal(size=(T, S, config.d_model)).astype(np.float32)
    params = random_params(config)

    @jax.jit
    @jax.grad
    def gradient(embedding, params):
        variables = {"params": params | {"target_embedding": {"embedding": embedding}}}
        mask = np.ones((T, 1, 1, S), bool)
        y = Transformer(config).apply(variables, target, memory, mask, method="decode")
        logits = to_logits(y, params["output_embedding"]["embedding"])
        return jnp.einsum("ttv->", logits)  # row t has the gradients of the logits at t

    of_tokens = np.asarray(gradient(params["target_embedding"]["embedding"], params))[target]
    reached = np.abs(of_tokens).max(axis=-1)  # by the logits at t, of the token at u: [t, u]
    before = np.tril(np.ones((T, T), bool), -1)
    np.testing.assert_array_equal(reached[~before], 0)
    assert (reached[before] > 1e-4).all()


# ----- padding and batches


@each(KINDS)
def test_more_padding_changes_nothing(config):
    padded = logits_of(config, pad(SOURCE, 9 - S), pad(TARGET, 9 - T))
    np.testing.assert_allclose(padded[:, :T], logits_of(config), atol=1e-5)


@each(RIVALS | {"transformer": TINY})
def test_other_sentences_of_the_batch_change_nothing(config):
    logits = logits_of(config)
    for row in range(B * K):
        source, target = SOURCE[::-1].copy(), np.roll(TARGET, 1, axis=1)
        source[row], target[row] = SOURCE[row], TARGET[row]
        among_others = logits_of(config, source, target)
        np.testing.assert_allclose(among_others[row], logits[row], atol=1e-5)
        assert np.abs(among_others - logits).max() > (1 if config is TINY else 0.1)


@each(KINDS)
def test_parameters_are_float32_where_jax_prefers_float64(config):
    with jax.enable_x64():
        assert {leaf.dtype for leaf in jax.tree.leaves(param_shapes(config))} == {np.dtype("float32")}


def test_size_of_the_batch_changes_nothing(maps):
    def run(params, source, target):
        return Transformer(TINY).apply({"params": params}, source, target), attention_maps(TINY, params, source, target)

    run, logits = jax.jit(run), logits_of(TINY)
    for row in range(B * K):
        alone, maps_alone = run(random_params(TINY), SOURCE[row : row + 1], TARGET[row : row + 1])
        np.testing.assert_allclose(alone[0], logits[row], atol=1e-5)
        for name, weights in maps.items():
            np.testing.assert_allclose(maps_alone[name][:, 0], weights[:, row], atol=1e-5, err_msg=name)


def test_sentence_of_only_padding_has_finite_outputs_and_gradients():
    # Rows that fill up the last batch are of this kind.
    source, target = SOURCE.copy(), TARGET.copy()
    source[0] = target[0] = PAD_ID
    config = dataclasses.replace(TINY, num_layers=1)

    def loss(params):
        logits = Transformer(config).apply({"params": params}, source, target)
        return (jax.nn.log_softmax(logits)[..., 3] ** 2).mean(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(random_params(config))
    assert np.isfinite(logits).all()
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 0, path  # and every parameter is used


# ----- decoding one position at a time


@functools.cache
def decoder(config):
    """Programs that fill a cache for SOURCES, and that decode a position."""
    model = make_model(config)
    room = T + 2  # more than is used, so that what is empty must be masked

    def begin(params):
        return model.apply(params, SOURCES, K, room, method="init_cache", mutable=["memory", "cache"])[1]

    def step(variables, tokens, parents, position):
        return model.apply(variables, tokens, parents, position, method="decode_step", mutable=["cache"])

    return jax.jit(begin), jax.jit(step)


def decode_stepwise(config, tokens, parents=None):
    """Logits [B, K, T, V] after each of tokens [B, K, T]. parents [T, B, K]: which each goes on from, or itself."""
    (begin, step), params = decoder(config), {"params": random_params(config)}
    if parents is None:
        parents = np.broadcast_to(np.arange(K, dtype=np.int32), (T, B, K))
    state = begin(params)
    outputs = []
    for position in range(T):
        logits, updated = step(params | state, tokens[:, :, position], parents[position], np.int32(position))
        state = state | updated
        outputs.append(logits)
    return np.stack(outputs, axis=2)


def test_decoding_stepwise_gives_the_logits_of_the_whole_target_at_once(variant):
    inputs = np.asarray(shift_right(TARGET)).reshape(B, K, T)
    np.testing.assert_allclose(decode_stepwise(variant, inputs), logits_of(variant).reshape(B, K, T, -1), atol=1e-5)


@each(KINDS)
def test_a_hypothesis_sees_its_own_history_whoever_wrote_it(config):
    # As in a beam search, in which hypotheses are continued twice, exchanged, dropped. The parents at position 0 are
    # random too: there is nothing yet that they could have written.
    rng = np.random.default_rng(0)
    tokens = rng.integers(NUM_SPECIAL, config.vocab_size, (B, K, T))
    tokens[:, :, 0] = BEGIN_ID
    parents = rng.integers(0, K, (T, B, K), dtype=np.int32)
    assert (parents[1:] != np.arange(K)).any(axis=(1, 2)).all()
    # histories[:, :, t]: all that stands behind the begin symbol when position t has been read, then padding.
    history = np.zeros((B, K, T), int)
    histories = []
    for position in range(T):
        history = np.take_along_axis(history, parents[position][:, :, None], axis=1)
        if position:
            history[:, :, position - 1] = tokens[:, :, position]
        histories.append(history.copy())
    expected = [
        logits_of(config, SOURCE, history.reshape(B * K, T)).reshape(B, K, T, -1)[:, :, position]
        for position, history in enumerate(histories)
    ]
    decoded = decode_stepwise(config, tokens, parents)
    np.testing.assert_allclose(decoded, np.stack(expected, axis=2), atol=1e-5)


def test_what_is_not_in_its_history_changes_nothing_of_a_hypothesis():
    # After position 2, all go on from hypothesis 1: what the others wrote until then is out of the world, to the bit.
    tokens = np.asarray(shift_right(TARGET)).reshape(B, K, T)
    parents = np.broadcast_to(np.arange(K, dtype=np.int32), (T, B, K)).copy()
    parents[3] = 1
    others = tokens.copy()
    others[:, [0, 2], :3] = 13
    before, after = (decode_stepwise(TINY, some, parents) for some in (tokens, others))
    np.testing.assert_array_equal(after[:, :, 3:], before[:, :, 3:])
    np.testing.assert_array_equal(after[:, 1], before[:, 1])
    assert (np.abs(after - before)[:, [0, 2], :3].max(axis=-1) > 1e-2).all()


# ----- numbers


def test_layer_norm_adds_epsilon_to_the_variance():
    def normalise(*x):
        variables = {"params": {"scale": np.ones(len(x)), "bias": np.zeros(len(x))}}
        return layer_norm(TINY, "norm").apply(variables, np.array(x, np.float32))

    # Variance 1e-6, epsilon 1e-6: 1e-3 / sqrt(2e-6). Epsilon added to the standard deviation would give 0.999.
    np.testing.assert_allclose(normalise(1e-3, -1e-3), [0.5**0.5, -(0.5**0.5)], rtol=1e-4)
    # E[x^2] - E[x]^2 is 1e8 - 1e8 here, in float32.
    np.testing.assert_allclose(normalise(10_001, 9_999, 10_001, 9_999), [1, -1, 1, -1], rtol=1e-4)


def test_initial_parameters_are_float32_of_the_right_spread():
    config = dataclasses.replace(TINY, num_layers=1, dtype="bfloat16", positions="learned", attention_bias=True)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0, impl="rbg"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.dtype == jnp.float32, path
        if path[-1].key in ("embedding", "table"):  # times sqrt(d_model), an embedding starts at one
            assert abs(leaf.std() * config.d_model**0.5 - 1) < 0.1, path
        elif path[-1].key == "kernel":  # Glorot: uniform within sqrt(6 / (inputs + outputs)) of the whole matrix
            inputs = leaf.size // config.d_model if path[-2].key == "output" else leaf.shape[0]
            limit = (6 / (inputs + leaf.size // inputs)) ** 0.5
            assert 0.9 * limit < jnp.abs(leaf).max() <= limit, path
        else:
            assert (leaf == (path[-1].key == "scale")).all(), path


OTHERWISE = {  # the same model, computed in another way
    "scanned": {"scan_layers": True},
    "layers again": {"remat": "layers"},
    "all but products again": {"remat": "products"},
    "scanned, layers again": {"scan_layers": True, "remat": "layers"},
}


@functools.cache
def loss_and_gradient(config, key):
    def loss(params):
        rngs = None if key is None else {"dropout": jax.random.key(key)}
        logits = Transformer(config).apply({"params": params}, SOURCE, TARGET, rngs=rngs)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 5])

    plain = dataclasses.replace(config, scan_layers=False, remat="none")
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(random_params(plain)))


@each(RIVALS | {"transformer": TINY})
def test_the_loss_measures_the_model_that_translates(config):
    features = jax.jit(functools.partial(make_model(config).apply, method="features"))
    logits = to_logits(*features({"params": random_params(config)}, SOURCE, TARGET))
    np.testing.assert_allclose(logits, logits_of(config), atol=1e-5)


@pytest.mark.parametrize("name", [long(name) if name == "layers again" else name for name in OTHERWISE])
def test_a_model_computed_otherwise_is_the_same(name):
    # Parameters behind each stack, and of attention more than its projections; several layers where they are scanned.
    layers = {"num_layers": 2 if "scan_layers" in OTHERWISE[name] else 1}
    plain = dataclasses.replace(TINY, pre_norm=True, positions="relative", compatibility="additive", **layers)
    config = dataclasses.replace(plain, **OTHERWISE[name])
    initial = [jax.eval_shape(lambda c=c: init_params(c, jax.random.key(0))) for c in (plain, config)]
    assert jax.tree.structure(initial[0]) == jax.tree.structure(initial[1])

    def assert_same(ours, theirs):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)

    key = None if config.scan_layers else 1  # scanned layers have other keys
    assert_same(loss_and_gradient(config, key), loss_and_gradient(plain, key))


def alternating(config):
    configs = config, dataclasses.replace(config, neighbourhood=0)
    return [EncoderLayer(c, AddAndNorm, name=f"encoder_{n}") for n, c in enumerate(configs)]


def shared(config):
    return [EncoderLayer(config, AddAndNorm, name="encoder_0")] * 2


@pytest.mark.parametrize("make_layers", [alternating, shared])
def test_layers_that_differ_or_are_one_are_not_scanned(make_layers):
    class Other(Encoder):
        def setup(self):
            self.layers, self.norm = make_layers(self.config), lambda x: x

    config = dataclasses.replace(TINY, num_layers=2, neighbourhood=4)
    x, is_word = jnp.ones((1, 8, config.d_model)), jnp.ones((1, 1, 1, 8), bool)
    variables = Other(config).init(jax.random.key(0), x, is_word)
    Other(config).apply(variables, x, is_word)
    with pytest.raises(UserError, match=r"scan_layers must be False, as the layers differ or share parameters"):
        Other(dataclasses.replace(config, scan_layers=True)).apply(variables, x, is_word)


def test_scanned_layers_have_masks_of_their_own():
    # Three layers that do nothing but drop: with one mask for all, what one leaves the others would leave too. The
    # layers begin with zeros, as sinusoids would bring values and a mask of their own.
    config = dataclasses.replace(TINY, num_layers=3, dropout=0.5, pre_norm=True, scan_layers=True, positions="relative")
    params = jax.tree_util.tree_map_with_path(
        lambda path, values: np.full_like(values, path[-1].key == "scale"), random_params(config)
    )
    for layer in range(3):  # each feed-forward layer gives ones
        params[f"encoder_{layer}"]["feed_forward"]["w_2"]["bias"][:] = 1

    encode = jax.jit(functools.partial(Transformer(config).apply, method="encode"))
    memory = encode({"params": params}, SOURCE, rngs={"dropout": jax.random.key(3)})
    kinds = {round(float(value), 3) for value in np.ravel(memory[0, 0])}
    assert len(kinds) > 2  # the sum of three masks has four values, that of one mask three times only two


@each(ONE_OF_EACH)
def test_bfloat16_stays_near_float32_and_gives_float32_logits(config):
    rounded = logits_of(dataclasses.replace(config, dtype="bfloat16"))
    assert rounded.dtype == np.float32
    difference = np.abs(rounded - logits_of(config))
    # A bfloat16 keeps 8 bits, 0.4 %; logits here spread by about one. Were it all float32, they would be equal.
    assert 1e-3 < difference.max() < (0.15 if config is TINY else 0.2)
    assert difference.mean() < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each(RIVALS | {"transformer": TINY})
def test_step_leaves_the_cache_in_the_shapes_and_types_it_began_with(config, dtype):
    # Else it could not be carried around a loop, nor a sentence leave with its part.
    config = dataclasses.replace(config, dtype=dtype)
    model, params = make_model(config), random_params(config)

    def begin():
        return model.apply({"params": params}, SOURCES, K, T, method="init_cache", mutable=["memory", "cache"])[1]

    def step(state, position):
        variables = {"params": params, **state}
        tokens = parents = jnp.zeros((B, K), jnp.int32)
        return model.apply(variables, tokens, parents, position, method="decode_step", mutable=["cache"])

    state = jax.eval_shape(begin)
    logits, updated = jax.eval_shape(step, state, jnp.int32(0))
    assert (logits.shape, logits.dtype) == ((B, K, config.vocab_size), np.float32)
    assert updated["cache"] == state["cache"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {B}
    if not isinstance(config, TransformerConfig):
        return
    cache = dict(state["cache"])
    assert (cache["ancestors"].shape, cache.pop("ancestors").dtype.name) == ((B, K, T), "int32")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {dtype}
    keys, values = (B, config.num_heads, config.d_k, K, T), (B, config.num_heads, K, T, config.d_v)
    assert {leaf.shape for leaf in jax.tree.leaves(cache)} == {keys, values}


# ----- attention maps


def test_attention_maps_are_one_per_layer_sentence_and_head(maps):
    first = (TINY.num_layers, B * K, TINY.num_heads)
    shapes = {name: weights.shape for name, weights in maps.items()}
    assert shapes == {"encoder": (*first, S, S), "decoder": (*first, T, T), "cross": (*first, T, S)}
    for weights in maps.values():
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


def test_attention_maps_give_nothing_to_padding(maps):
    is_padding = SOURCE == PAD_ID
    assert is_padding.any()
    for weights in (maps["encoder"], maps["cross"]):
        to_padding = np.moveaxis(weights, (1, -1), (0, 1))[is_padding]
        np.testing.assert_array_equal(to_padding, 0)
    # The decoder's rows up to the end symbol are the ones with a loss: to them, padding is later.
    for row, target in enumerate(TARGET):
        is_word = target != PAD_ID
        is_padding = np.asarray(shift_right(target[None]))[0] == PAD_ID
        np.testing.assert_array_equal(maps["decoder"][:, row][:, :, is_word][..., is_padding], 0)


def test_attention_maps_of_the_decoder_are_lower_triangular(maps):
    later = np.triu(np.ones((T, T), bool), 1)
    np.testing.assert_array_equal(maps["decoder"][..., later], 0)
    assert (maps["decoder"][..., ~later] > 0).all()


# DeepNorm's figure 2 at N = M = 2: alpha and beta of the encoder and of the decoder.
DEEPNORM = {"encoder": (0.81 * 2 ** (5 / 16), 0.87 / 2 ** (5 / 16)), "decoder": (6**0.25, 24**-0.25)}
# T-Fixup's section 3.3 at N = 2. It scales the embeddings of source and target.
T_FIXUP = {"encoder": 0.67 * 2**-0.25, "decoder": 18**-0.25, "source": 18**-0.25, "target": 18**-0.25}


def init_by_operations(config):
    """Does what `init_params` does, in small programs that models share: a whole one takes seconds to compile."""
    return registry._init.__wrapped__(make_model(config), jax.random.key(0))


@functools.cache
def initial(config):
    params = flatten_dict(jax.device_get(init_by_operations(config)), sep=".")
    return {name: leaf for name, leaf in params.items() if not name.endswith("omega")}


@pytest.mark.parametrize("start", STARTS)
def test_a_start_scales_the_initial_values_of_its_matrices_and_nothing_else(start):
    untied = dataclasses.replace(TINY, tie_embeddings=False)
    plain, scaled = initial(untied), initial(dataclasses.replace(untied, start=start, branch_init=0.5))
    left_out = {name for name in plain if ".norm." in name} if start == "t_fixup" else set()
    assert scaled.keys() == plain.keys() - left_out
    for name, value in scaled.items():
        stack, gain = re.split(r"[_.]", name)[0], 1.0
        if name.endswith(("value.kernel", "output.kernel", "w_1.kernel", "w_2.kernel")):
            gain *= 0.5 * (DEEPNORM[stack][1] if start == "deepnorm" else 1)
            gain *= T_FIXUP[stack] if start == "t_fixup" else 1
        if start == "t_fixup" and stack in ("source", "target"):
            gain *= T_FIXUP[stack]
        if start == "fairseq" and name.endswith(("query.kernel", "key.kernel", "value.kernel")):
            gain *= 2**-0.5
        np.testing.assert_allclose(value, gain * plain[name], rtol=1e-6)


def test_t_fixup_has_no_layer_norm():
    x = jnp.array([[[100.0, -3.0, 0.5, 2.0] * 4]])
    y = TFixup(TINY).apply({"params": {}}, x, lambda x: 2 * x)
    np.testing.assert_array_equal(y, 3 * x)


def test_admin_weighs_a_residual_by_the_variances_of_all_sub_layers_before():
    def layer(*names):
        return {name: {"omega": np.ones(4, np.float32), "norm": name} for name in names} | {"w": 7.0}

    attention, cross, feed_forward = "after_self_attention", "after_cross_attention", "after_feed_forward"
    params = {f"encoder_{n}": layer(attention, feed_forward) for n in range(2)}
    params |= {"reader_0": layer(attention, cross, feed_forward), "embedding": 1.0}
    # Of x and of Sublayer(x). After LayerNorm the variance of x is 1, and only the first x is not normalised.
    sown = {
        "encoder_0": {attention: {"variances": ([1.5, 0.75],)}, feed_forward: {"variances": ([1.0, 1.75],)}},
        "encoder_1": {attention: {"variances": ([1.0, 2.25],)}, feed_forward: {"variances": ([1.0, 9.0],)}},
        "reader_0": {name: {"variances": ([1.0, 3.0],)} for name in (attention, cross, feed_forward)},
    }
    found = with_omegas(params, sown)
    omegas = {
        (name, residual): found[name][residual]["omega"].tolist()
        for name in ("encoder_0", "encoder_1", "reader_0")
        for residual in found[name]
        if residual != "w"
    }
    assert omegas == {
        ("encoder_0", attention): [1.0] * 4,
        ("encoder_0", feed_forward): [1.5] * 4,  # 1.5 + 0.75 = 1.5^2
        ("encoder_1", attention): [2.0] * 4,  # 2.25 + 1.75 = 2^2
        ("encoder_1", feed_forward): [2.5] * 4,  # 4 + 2.25 = 2.5^2
        ("reader_0", attention): [1.0] * 4,
        ("reader_0", cross): [2.0] * 4,
        ("reader_0", feed_forward): [pytest.approx(7**0.5)] * 4,
    }
    assert found["reader_0"][cross]["norm"] == cross  # all else stays
    assert (found["encoder_1"]["w"], found["embedding"]) == (7.0, 1.0)
    assert params["encoder_1"][attention]["omega"].tolist() == [1.0] * 4
    with pytest.raises(NotImplementedError, match="lacks after_both of encoder_0: name each where"):
        with_omegas(params, sown | {"encoder_0": sown["encoder_0"] | {"after_both": {"variances": ([1.0, 3.0],)}}})


@pytest.mark.parametrize(("positions", "length"), [("sinusoidal", 16), ("learned", 8)])
def test_the_sentences_of_admin_have_words_alone_and_no_more_than_there_are_positions_for(positions, length):
    config = dataclasses.replace(TINY, vocab_size=NUM_SPECIAL + 2, positions=positions, max_length=8)
    model = mock.Mock(config=config, **{"init.return_value": {"params": {}, "intermediates": {}}})
    init_admin(model, jax.random.key(0), sides=2)
    tokens = np.array(model.init.call_args.args[1:])
    assert tokens.shape == (2, 64, length)
    assert {*np.unique(tokens)} == {NUM_SPECIAL, NUM_SPECIAL + 1}
    assert (tokens[0] != tokens[1]).any()


def test_admin_measures_on_random_sentences_and_multiplies_residuals():
    config = dataclasses.replace(TINY, start="admin", num_layers=4)
    params = init_by_operations(config)
    for stack, sub_layers in (("encoder", RESIDUALS[::2]), ("decoder", RESIDUALS)):
        omegas = [float(params[f"{stack}_{n}"][name]["omega"][0]) for n in range(4) for name in sub_layers]
        assert omegas[0] == 1
        assert omegas == sorted(set(omegas))  # each sub-layer adds some variance
        # Xavier's values give sub-layers of about the variance of their input, or less.
        assert 1.5 < omegas[-1] ** 2 < 1 + 2 * len(omegas)
    own = params["decoder_3"]["after_cross_attention"]
    x = jax.random.normal(jax.random.key(1), (1, 3, config.d_model))
    y = Admin(config).apply({"params": own}, x, jnp.tanh)
    expected = layer_norm(config, "norm").apply({"params": own["norm"]}, own["omega"] * x + jnp.tanh(x))
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_deepnorm_multiplies_residuals_which_is_as_if_sub_layers_were_divided():
    """LayerNorm(alpha x + f(x)) = LayerNorm(x + f(x) / alpha), but for its epsilon."""
    params = random_params(TINY)

    def divide(path, leaf):
        stack, _, name = jax.tree_util.keystr(path, simple=True, separator=".").partition("_")
        return leaf / DEEPNORM[stack][0] if name.endswith(("output.kernel", "w_2.kernel", "w_2.bias")) else leaf

    divided = jax.tree_util.tree_map_with_path(divide, params)
    deep = dataclasses.replace(TINY, start="deepnorm")
    ours = logits_of(deep)
    theirs = compiled(TINY)({"params": divided}, SOURCE, TARGET, rngs=None)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert not np.allclose(ours, logits_of(TINY), atol=0.01)
