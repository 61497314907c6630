import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import classifier
from tests.conftest import TINY, long
from tests.model.parameters import random_params
from tests.training.small import small_config
from transformer_flax.data.batches import BucketedBatches, PackedBatches
from transformer_flax.data.corpus import Corpus, Sentences
from transformer_flax.model.registry import init_params, make_config, make_model
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL, PAD_ID
from transformer_flax.training import loss
from transformer_flax.training.loss import cross_entropy, in_one_pass, in_two_passes, perplexity, translation_loss

ONE = dataclasses.replace(TINY, num_layers=1)  # no law of a loss depends on how many
LOGITS = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32) * 3
TARGET = np.array([3, 10, 2])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_smoothing_is_the_cross_entropy_against_an_explicit_distribution(smoothing):
    log_p = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(-1, keepdims=True))
    for row, target in enumerate(TARGET):
        q = np.full(11, smoothing / 10)  # over the 10 ids that are not padding
        q[PAD_ID] = 0
        q[target] += 1 - smoothing
        assert q.sum() == pytest.approx(1)
        loss, nll, _ = cross_entropy(jnp.array(LOGITS[row]), jnp.array(target), smoothing)
        assert float(loss) == pytest.approx(-(q * log_p[row]).sum(), abs=1e-5)
        assert float(nll) == pytest.approx(-log_p[row, target], abs=1e-5)


def test_the_smoothed_loss_is_least_at_its_own_distribution_and_pushes_padding_down():
    q = np.full(11, 0.1 / 10)
    q[PAD_ID] = 0
    q[4] += 0.9
    at_q = jnp.log(jnp.maximum(q, 1e-30)).astype(jnp.float32)
    gradient = jax.grad(lambda logits: cross_entropy(logits, jnp.array(4), 0.1)[0])(at_q)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_a_run_has_the_loss_that_its_config_describes(monkeypatch):
    config = small_config(label_smoothing=0.3, loss_chunks=2, r_drop=5.0)
    fields = classifier.get_config().model.to_dict() | {"dtype": "float32"}
    translator, labeller = Transformer(ONE), make_model(make_config(29, fields))
    for name in ("translation_loss", "classification_loss"):
        monkeypatch.setattr(loss, name, lambda *given, **options: (given, options))
    assert loss.make_loss(config, translator) == ((translator, 0.3, 2), {"r_drop": 5.0})
    assert loss.make_loss(config, labeller) == ((labeller, 0.3), {})


@pytest.mark.parametrize("scale", [1, 1e4])
def test_one_pass_over_the_logits_finds_what_two_find(scale):
    logits = scale * jnp.array(LOGITS)
    for one, two in zip(in_one_pass(logits), in_two_passes(logits), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


def test_a_gpu_reads_the_logits_once():
    step = jax.jit(lambda logits: cross_entropy(logits, jnp.array(TARGET), 0.1)).trace(jnp.array(LOGITS))
    reductions = {
        platform: len(
            re.findall(r"stablehlo\.reduce\((?!.*stablehlo.and)", step.lower(lowering_platforms=(platform,)).as_text())
        )
        for platform in ("cuda", "cpu")
    }
    assert reductions == {"cuda": 1, "cpu": 3}


def test_the_gradients_are_those_of_the_formula():
    def plainly(logits, target):
        log_p = jax.nn.log_softmax(logits)
        one_hot = jax.nn.one_hot(target, logits.shape[-1])
        u = (jnp.arange(logits.shape[-1]) != PAD_ID) / (logits.shape[-1] - 1)
        return -jnp.sum((0.9 * one_hot + 0.1 * u) * log_p, -1), -jnp.sum(one_hot * log_p, -1)

    def weighed(losses_of):
        def total(logits):
            loss, nll = losses_of(logits)
            return jnp.sum(loss * jnp.array([1.0, -2.0, 3.0]) + nll * jnp.array([0.0, 5.0, 7.0]))

        return jax.grad(total)(jnp.array(LOGITS))

    expected = weighed(lambda logits: plainly(logits, jnp.array(TARGET)))
    found = weighed(lambda logits: cross_entropy(logits, jnp.array(TARGET), 0.1)[:2])
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_losses_are_float32_for_bfloat16_logits():
    loss, nll, _ = cross_entropy(jnp.array(LOGITS, jnp.bfloat16), jnp.array(TARGET), 0.1)
    assert loss.dtype == nll.dtype == jnp.float32


def test_a_prediction_is_correct_where_no_other_is_likelier():
    best = LOGITS.argmax(-1)
    assert cross_entropy(jnp.array(LOGITS), jnp.array(best), 0.1).correct.all()
    assert not cross_entropy(jnp.array(LOGITS), jnp.array((best + 1) % 11), 0.1).correct.any()


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    assert perplexity(5 * np.log(7), 5) == pytest.approx(7, rel=1e-5)


@pytest.fixture(scope="module")
def params():
    return random_params(ONE)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    batch = {side: rng.integers(3, ONE.vocab_size, (3, length)) for side, length in (("source", 6), ("target", 5))}
    batch["source"][1, 4:] = batch["target"][1, 2:] = batch["target"][2, 4:] = PAD_ID
    batch["target"][[0, 1, 2], [4, 1, 3]] = END_ID  # which has a loss, as every word
    return batch


@functools.cache
def compiled_gradient(config, chunks):
    loss_fn = translation_loss(Transformer(config), 0.1, chunks)

    def total(params, batch, key):
        sums, counts = loss_fn(params, batch, key)
        return sums["loss"] / 2, (sums, counts)  # half, so that a loss that ignores how it is used gives another

    return jax.jit(jax.grad(total, has_aux=True))


def gradient(batch, params, *, config=ONE, chunks=1, key=None):
    grads, (sums, counts) = compiled_gradient(config, chunks)(params, batch, key)
    return grads, sums, counts


def test_sums_count_the_real_target_tokens(params, batch):
    _, sums, counts = gradient(batch, params)
    assert sums.keys() == counts.keys() == {"loss", "nll", "accuracy"}
    assert all(float(count) == 5 + 2 + 4 for count in counts.values())
    logits = jax.jit(Transformer(ONE).apply)({"params": params}, batch["source"], batch["target"])
    log_p = np.asarray(jax.nn.log_softmax(logits))
    expected = sum(
        -log_p[b, t, token] for b, row in enumerate(batch["target"]) for t, token in enumerate(row) if token != PAD_ID
    )
    assert float(sums["nll"]) == pytest.approx(float(expected), abs=1e-4)


def test_padding_and_empty_rows_change_neither_loss_nor_gradient(params, batch):
    grads, sums, counts = gradient(batch, params)
    padded = {side: np.pad(rows, ((0, 2), (0, 4))) for side, rows in batch.items()}
    more_grads, more_sums, more_counts = gradient(padded, params)
    assert jax.device_get(counts) == jax.device_get(more_counts)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), (grads, sums), (more_grads, more_sums)
    )


def test_the_gradient_of_a_batch_is_the_sum_of_those_of_its_rows(params, batch):
    grads, *_ = gradient(batch, params)
    rows = [gradient({side: values[i : i + 1] for side, values in batch.items()}, params)[0] for i in range(3)]
    jax.tree.map(lambda all_, *each: np.testing.assert_allclose(all_, sum(each), rtol=2e-5, atol=2e-5), grads, *rows)


@pytest.mark.parametrize(
    "config",
    [long(ONE), dataclasses.replace(ONE, tie_embeddings=False)],
    ids=["tied", "untied"],
)
def test_a_loss_in_chunks_has_the_sums_and_the_gradient_of_the_whole(batch, config):
    params, key = random_params(config), jax.random.key(2)
    whole = gradient(batch, params, config=config, key=key)
    chunks = gradient(batch, params, config=config, chunks=3, key=key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), whole, chunks)
    sums, _ = jax.jit(translation_loss(Transformer(config), 0.1, 3))(params, batch, key)  # without a gradient
    for name, value in whole[1].items():
        assert float(sums[name]) == pytest.approx(float(value), rel=1e-5)


def test_no_array_of_a_loss_in_chunks_has_all_logits():
    rows, length, vocabulary = 8, 5, 4001
    config = dataclasses.replace(ONE, vocab_size=vocabulary)
    batch = {side: np.ones((rows, length), np.int32) for side in ("source", "target")}
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def largest(chunks):
        """Returns the size of the program's largest array over the vocabulary, divided by the vocabulary's."""
        loss_fn = translation_loss(Transformer(config), 0.1, chunks)
        program = jax.jit(jax.grad(lambda params: loss_fn(params, batch, None)[0]["loss"])).lower(params).compile()
        shapes = re.findall(r"f32\[([\d,]+)\]", program.as_text())
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes if str(vocabulary) in shape.split(",")]
        return max(sizes) / vocabulary

    assert largest(1) == rows * length
    assert largest(4) == config.d_model  # the embedding: logits are rows * length / 4


def test_packed_and_bucketed_batches_of_the_same_pairs_have_the_same_loss_and_gradient():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 12, (2, 40))
    corpus = Corpus(*(random_sentences(rng, each) for each in lengths))
    loss_fn = translation_loss(Transformer(dataclasses.replace(ONE, dropout=0.0)), 0.1)
    arguments = {"tokens_per_batch": 96, "rows_multiple_of": 2, "data_seed": 0, "seed": 0}
    params = random_params(ONE)

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            sums, counts = loss_fn(params, batch, None)
            return sums["loss"], (sums, counts)

        return jax.grad(loss, has_aux=True)(params)

    bucketed = BucketedBatches(corpus, np.arange(40), num_buckets=2, **arguments)
    packed = PackedBatches(corpus, np.arange(40), width=24, **arguments)
    assert packed.batches_per_epoch >= 3
    totals = []
    for batches in (bucketed, packed):
        each = [gradient(params, batches[k]) for k in range(batches.batches_per_epoch)]
        totals.append(jax.tree.map(lambda *leaves: np.sum(np.float64(leaves), axis=0), *each))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *totals)


class Given:
    """A model whose features are its parameters: of each row of a batch, those of one pass and then of another."""

    def apply(self, variables, source, target, *, rngs, method):
        passes = variables["params"]["y"]
        assert len(source) == len(target) == passes.shape[0] * passes.shape[1]
        return passes.reshape(-1, *passes.shape[2:]), variables["params"]["embedding"]


GIVEN_TARGET = np.array([[3, 5, END_ID], [4, END_ID, PAD_ID], [PAD_ID] * 3, [END_ID, PAD_ID, PAD_ID]])


@pytest.mark.parametrize("chunks", [1, 2])
def test_r_drop_adds_the_divergence_of_two_passes_to_the_gradient_and_reports_the_cross_entropy(chunks):
    """Liang et al. (2021), equation 4, halved: the mean of both losses and alpha / 4 of both divergences."""
    alpha, rng = 3.0, np.random.default_rng(0)
    params = {"y": rng.normal(size=(4, 2, 3, 7)), "embedding": rng.normal(size=(11, 7))}
    params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    batch = {"source": GIVEN_TARGET, "target": GIVEN_TARGET}

    def ours(params):
        sums, counts = translation_loss(Given(), 0.1, chunks, r_drop=alpha)(params, batch, jax.random.key(0))
        return sums["loss"], (sums, counts)

    def theirs(params):
        loss = divergence = 0.0
        for row, column in np.argwhere(GIVEN_TARGET != PAD_ID):
            logits = params["y"][row, :, column] @ params["embedding"].T
            p, log_p = jax.nn.softmax(logits), jax.nn.log_softmax(logits)
            loss += cross_entropy(logits, jnp.full(2, GIVEN_TARGET[row, column]), 0.1).loss.mean()
            divergence += jnp.sum(p[0] * (log_p[0] - log_p[1])) + jnp.sum(p[1] * (log_p[1] - log_p[0]))
        return loss + alpha / 4 * divergence, (loss, divergence / 2)

    found, (sums, counts) = jax.jit(jax.grad(ours, has_aux=True))(params)
    expected, (loss, divergence) = jax.jit(jax.grad(theirs, has_aux=True))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert float(sums["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(sums["divergence"]) == pytest.approx(float(divergence), rel=1e-5)
    assert sums.keys() == counts.keys() == {"loss", "nll", "accuracy", "divergence"}
    assert {float(count) for count in counts.values()} == {6}  # tokens, once


def test_r_drop_draws_each_pass_anew_and_evaluates_with_none(params, batch):
    loss_fn, alone = (jax.jit(translation_loss(Transformer(ONE), 0.1, r_drop=r_drop)) for r_drop in (5.0, 0.0))
    sums, _ = loss_fn(params, batch, jax.random.key(2))
    assert float(sums["divergence"]) > 0.01
    assert jax.device_get(loss_fn(params, batch, None)) == jax.device_get(alone(params, batch, None))


def random_sentences(rng, lengths) -> Sentences:
    offsets = np.cumsum([0, *lengths])
    ids = rng.integers(NUM_SPECIAL, TINY.vocab_size, offsets[-1])
    ids[offsets[1:] - 1] = END_ID
    return Sentences(ids, offsets)
