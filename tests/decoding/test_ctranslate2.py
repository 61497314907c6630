"""CTranslate2 runs the model that we export, and refuses those that it cannot run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ctranslate2_peer import make_search
from tests.conftest import VARIANTS, long
from tests.model.parameters import random_params
from transformer_flax import model
from transformer_flax.checked_fields import one_of
from transformer_flax.decoding import ctranslate2
from transformer_flax.decoding.ctranslate2 import require_supported, save
from transformer_flax.decoding.search import Bounds, LengthPenalty, beam_search
from transformer_flax.decoding.translator import as_step
from transformer_flax.errors import UserError
from transformer_flax.model.config import DEEP_STARTS, TransformerConfig
from transformer_flax.model.layers import LAYER_NORM_EPSILON
from transformer_flax.model.registry import make_model
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL

HYPOTHESES, WORDS = 3, 5
HEADS = {"num_heads": 4, "d_k": 4, "d_v": 4}


SUPPORTED = {name: VARIANTS[name] for name in ("learned", "concatenated", "pre_norm", "untied", "attention_bias")}
ALL = dataclasses.replace(VARIANTS["learned"], pre_norm=True, tie_embeddings=False, attention_bias=True)


@pytest.mark.parametrize(
    "config", [VARIANTS["paper"], ALL, *(long(config, id=name) for name, config in SUPPORTED.items())]
)
def test_it_finds_the_same_hypotheses(config, tmp_path):
    config = dataclasses.replace(config, **HEADS)
    params = jax.tree.map(jnp.asarray, random_params(config))
    source = jnp.array([[9, 8, 7, 2], [5, 2, 0, 0]])
    save(config, params, [str(token) for token in range(config.vocab_size)], tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_norm_epsilon"] == LAYER_NORM_EPSILON
    theirs = make_search(tmp_path, source, HYPOTHESES, WORDS, threads=1, nbest=HYPOTHESES)()
    tokens = np.array([[list(map(int, hypothesis)) for hypothesis in result.hypotheses] for result in theirs])

    # CTranslate2's P is over words alone, and no end symbol follows them: here, it surely follows.
    @jax.jit
    def search(params, source):
        step_of_all, cache = as_step(make_model(config), params, source, HYPOTHESES, WORDS + 1)
        ids = jnp.arange(config.vocab_size)

        def step(tokens, parents, position, cache):
            logits, cache = step_of_all(tokens, parents, position, cache)
            return jnp.where(jnp.where(position < WORDS, ids >= NUM_SPECIAL, ids == END_ID), logits, -jnp.inf), cache

        longest = jnp.full(len(source), WORDS + 1)
        bounds = Bounds(jnp.ones_like(longest), longest, jnp.zeros((len(source), WORDS + 1), jnp.int32))
        return beam_search(step, cache, bounds, LengthPenalty("none", 0), beam_size=HYPOTHESES, nbest=HYPOTHESES)

    ours = search(params, source)
    np.testing.assert_array_equal(ours.tokens[:, :, :WORDS], tokens)
    np.testing.assert_allclose(ours.log_probs, [result.scores for result in theirs], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "field"),
    [("relative, dot", "positions"), ("rotary", "positions"), ("paper", "d_k")],
)
def test_a_model_that_it_cannot_run_is_refused_by_the_field(name, field):
    with pytest.raises(UserError, match=rf"config.model.{field} is .*--format=safetensors"):
        require_supported(VARIANTS[name])


@pytest.mark.parametrize(
    ("field", "value"), [("compatibility", "dot"), ("compatibility", "additive"), ("neighbourhood", 4), ("d_v", 5)]
)
def test_a_choice_that_it_does_not_have_is_refused(field, value):
    with pytest.raises(UserError, match=rf"config.model.{field} is {value!r}, and must be "):
        require_supported(dataclasses.replace(VARIANTS["paper"], **HEADS | {field: value}))


def test_a_field_that_the_export_does_not_know_is_refused(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Extended(TransformerConfig):
        gate: str = one_of(("none", "sigmoid"), default="none")

    monkeypatch.setattr(ctranslate2, "TransformerConfig", Extended)  # the class, once it has the field
    fields = vars(dataclasses.replace(VARIANTS["paper"], **HEADS))
    require_supported(Extended(**fields))
    with pytest.raises(UserError, match=r"config\.model\.gate is 'sigmoid', and must be 'none'"):
        require_supported(Extended(**fields, gate="sigmoid"))


def test_sinusoids_that_the_model_gets_later_are_refused(monkeypatch):
    config = dataclasses.replace(VARIANTS["paper"], **HEADS)
    for module in (model.config, ctranslate2):  # wherever the export would take their names from
        monkeypatch.setattr(module, "SINUSOIDS", ("sinusoidal", "short"), raising=False)
    object.__setattr__(config, "positions", "short")
    with pytest.raises(UserError, match=r"config\.model\.positions is 'short', and must be one of sinusoidal, "):
        require_supported(config)


def test_starts_that_change_residuals_are_refused():
    for start in DEEP_STARTS:
        with pytest.raises(UserError, match=rf"config.model.start is '{start}', and must be xavier or fairseq"):
            require_supported(dataclasses.replace(VARIANTS["paper"], **HEADS, start=start))
