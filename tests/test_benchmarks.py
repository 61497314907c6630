"""The benchmarks time what they say: their rivals do the same work."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.decode import begin_without_cache, make_search
from tests.conftest import ROOT, TINY
from tests.model.parameters import random_params
from transformer_flax.decoding.search import Bounds, LengthPenalty, beam_search
from transformer_flax.decoding.translator import as_step
from transformer_flax.model.registry import init_params
from transformer_flax.model.transformer import Transformer
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL


def test_the_search_without_a_cache_finds_the_same():
    params = jax.tree.map(lambda x: 3 * x, init_params(TINY, jax.random.key(0)))
    source = jnp.array([[9, 8, 7, 2], [5, 2, 0, 0]])
    cached, plain = (
        make_search(begin, Transformer(TINY), params, source, 3, 6)() for begin in (as_step, begin_without_cache)
    )
    np.testing.assert_array_equal(cached.tokens, plain.tokens)
    np.testing.assert_allclose(cached.scores, plain.scores, atol=1e-4)
    assert np.all(np.sum(np.asarray(cached.tokens) != 0, axis=-1) == 6)


def test_ctranslate2_searches_with_the_same_model(tmp_path):
    pytest.importorskip("ctranslate2", reason='CTranslate2 is not installed: pip install -e ".[compare]"')
    from benchmarks import ctranslate2_peer

    config, hypotheses, words = dataclasses.replace(TINY, num_heads=4, d_k=4, d_v=4), 3, 5
    model, params = Transformer(config), random_params(config)
    source = jnp.array([[9, 8, 7, 2], [5, 2, 0, 0]])
    ctranslate2_peer.save(config, params, tmp_path)
    theirs = ctranslate2_peer.make_search(tmp_path, source, hypotheses, words, threads=1, nbest=hypotheses)()
    tokens = np.array([[list(map(int, hypothesis)) for hypothesis in result.hypotheses] for result in theirs])

    # CTranslate2's P is over words alone, and no end symbol follows them: here, it surely follows.
    step_of_all, cache = as_step(model, params, source, hypotheses, words + 1)
    ids = jnp.arange(config.vocab_size)

    def step(tokens, parents, position, cache):
        logits, cache = step_of_all(tokens, parents, position, cache)
        return jnp.where(jnp.where(position < words, ids >= NUM_SPECIAL, ids == END_ID), logits, -jnp.inf), cache

    bounds = Bounds.of(jnp.full(len(source), words + 1), words + 1)
    ours = beam_search(step, cache, bounds, LengthPenalty("none", 0), beam_size=hypotheses, nbest=hypotheses)
    np.testing.assert_array_equal(ours.tokens[:, :, :words], tokens)
    np.testing.assert_allclose(ours.log_probs, [result.scores for result in theirs], atol=1e-4)


def test_the_ways_to_follow_ancestors_agree_and_are_timed():
    options = ["--batch_size=2", "--beam_size=3", "--length=5", "--layers=2", "--heads=2", "--depth=4", "--repeats=1"]
    command = [sys.executable, "benchmarks/ancestors.py", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(way in result.stdout for way in ("gather", "indices", "sums of products", "matrix products"))
