"""A run starts from a trained model: its parameters, its tokenizer, other data, a new optimizer; or of parts alone."""

import os

import jax
import numpy as np
import pytest

from tests.conftest import TINY, long
from tests.training.small import final_state
from transformer_flax.console import Progress
from transformer_flax.errors import UserError
from transformer_flax.run import restore
from transformer_flax.training.fine_tuning import _deciding
from transformer_flax.training.loop import train
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.setup import checked_config, prepare_run

STEPS = 4


@pytest.fixture(scope="module")
def text(finished, tmp_path_factory):
    """Other sentences than those of the finished run: its last ones, the other way round."""
    folder = tmp_path_factory.mktemp("text")
    given = finished.parent / "text"
    for language in ("de", "en"):
        lines = (given / f"train.{language}").read_text().splitlines()
        for split, of in (("train", slice(600, 900)), ("valid", slice(900, 910)), ("test", slice(910, 920))):
            (folder / f"{split}.{language}").write_text("\n".join(lines[of]) + "\n")
    return folder


def fine_tuned(finished, text, **overrides):
    config = RunDirectory(finished).load_config()
    config.data.update(tokenizer="wordpiece", vocab_size=290)  # the tokenizer's are saved, whatever the config says
    config.update_from_flattened_dict(
        {
            "init_from": str(finished),
            "steps": STEPS,
            "data.path": str(text),
            "optimizer.factor": 0.5,
            "eval.final_average": 1,
            "eval.final_sentences": 4,
            "eval.test": False,
            "checkpoint.every": STEPS,
            **{name.replace("__", "."): value for name, value in overrides.items()},
        }
    )
    return config


def params(workdir, step=STEPS):
    return jax.device_get(final_state(workdir, step).params)


def test_a_run_starts_from_the_parameters_and_the_tokenizer_of_another(finished, text, tmp_path, capsys):
    given = restore(finished)
    given.export(tmp_path / "exported")
    train(fine_tuned(finished, text, steps=1, optimizer__factor=1e-30, checkpoint__every=1), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, params(tmp_path / "run", 1), given.params)
    told = capsys.readouterr().out
    assert "starting from the mean of the parameters at steps 150, 200 of " in told
    assert restore(tmp_path / "run").tokenizer.to_json() == given.tokenizer.to_json()

    for source, expected in ((tmp_path / "exported", given), (f"{finished}@150", restore(finished, steps=150))):
        workdir = tmp_path / f"run of {expected.params_from}"
        config = fine_tuned(finished, text, steps=1, optimizer__factor=1e-30, init_from=str(source))
        train(config, workdir)
        jax.tree.map(np.testing.assert_array_equal, params(workdir, 1), expected.params)


def test_it_learns_on_and_resumes_to_the_bit(finished, text, tmp_path):
    config = fine_tuned(finished, text)
    [valid] = [train(config, tmp_path / "whole")["valid"]]
    config.steps = 2
    train(config, tmp_path / "half")
    config.steps, config.init_from = STEPS, f"{os.path.relpath(config.init_from)}/"  # as a shell completes it
    train(config, tmp_path / "half")
    jax.tree.map(np.testing.assert_array_equal, params(tmp_path / "half"), params(tmp_path / "whole"))
    scratch = fine_tuned(finished, text, init_from="")
    assert valid.scalars["perplexity"] < train(scratch, tmp_path / "scratch")["valid"].scalars["perplexity"] / 2
    saved = RunDirectory(tmp_path / "half").load_config()
    assert (saved.data.tokenizer, saved.data.vocab_size) == ("bpe", 300)


def test_only_the_parts_that_are_named_are_trained(finished, text, tmp_path, capsys):
    before = jax.device_get(restore(finished).params)
    train(fine_tuned(finished, text, train_only="decoder,*.cross_attention"), tmp_path / "run")
    after = params(tmp_path / "run")
    count = sum(leaf.size for part in before if part.startswith("decoder") for leaf in jax.tree.leaves(before[part]))
    assert f"training decoder,*.cross_attention alone: {count:,} of the parameters" in capsys.readouterr().out
    for part in before:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before[part], after[part]))
        assert not any(same) if part.startswith("decoder") else all(same), part


@pytest.fixture(scope="module", params=[long({"ema_decay": 0.9}), {"optimizer.name": "schedule_free"}], ids=str)
def averaged(finished, text, request, tmp_path_factory):
    """A run of the decoder alone that keeps an average of its parameters."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    train(fine_tuned(finished, text, train_only="decoder", **request.param), folder)
    return folder


def test_what_is_not_trained_stays_the_same_in_an_average_too(finished, averaged):
    before, after = jax.device_get(restore(finished).params), restore(averaged)
    assert after.params_from == f"the moving average at step {STEPS}"
    for part in before:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before[part], after.params[part]))
        assert not any(same) if part.startswith("decoder") else all(same), part


def test_a_named_checkpoint_gives_its_parameters_and_not_their_average(finished, text, averaged, tmp_path):
    start = {"init_from": f"{averaged}@{STEPS}", "steps": 1, "optimizer__factor": 1e-30}
    train(fine_tuned(finished, text, **start), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, params(tmp_path / "run", 1), params(averaged))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model.num_heads": 4, "model.d_model": 32, "model.dropout": 0.3},
            r"is not that of config.init_from, .*; set --config.model.d_model=16 --config.model.num_heads=2$",
        ),
        (
            {"data.lowercase": True, "data.tokenized": True},
            r"the config is not that .*; set --config.data.lowercase=False --config.data.tokenized=False$",
        ),
        ({"model.start": "deepnorm"}, r"set --config.model.start=xavier$"),
        ({"init_from": "nowhere"}, "config.init_from=nowhere: there is no directory nowhere"),
        (
            {"data.tokenizer_file": "x.json"},
            "tokenizer_file is 'x.json'; it must be '' with config.init_from",
        ),
        ({"embedding_init": "vectors"}, "embedding_init is 'vectors'; it must be '' with config.init_from"),
        ({"train_only": "decoder,attention"}, "begins like 'attention'; there are decoder_0, embedding, encoder_0"),
        ({"train_only": "decoder,"}, "begins like ''; there are decoder_0, embedding, encoder_0"),
    ],
)
def test_what_does_not_fit_is_named(finished, text, tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train(fine_tuned(finished, text, **overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_where_only_the_initial_values_differ_a_model_fits(finished, text):
    checked_config(fine_tuned(finished, text, model__start="fairseq", model__branch_init=0.5, model__dropout=0.3))


def test_sizes_positions_and_the_order_of_norms_decide_what_parameters_mean():
    assert _deciding(TINY).keys() >= {
        *("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "vocab_size", "tie_embeddings", "attention_bias"),
        *("positions", "max_length", "clip_distance", "neighbourhood", "compatibility", "pre_norm"),
    }


def prepare(config, folder):
    """Does what training does before its first step."""
    with Progress() as progress:
        prepare_run(checked_config(config), RunDirectory(folder), progress)


def test_a_model_of_other_languages_is_said(finished, text, tmp_path, capsys):
    turned = {"data.source_language": "en", "data.target_language": "de"}
    prepare(fine_tuned(finished, text, **turned), tmp_path / "run")
    assert "WARNING: that model translates de-en, and this run is en-de" in capsys.readouterr().out


def test_the_same_model_may_move_and_another_one_in_its_place_is_noticed(finished, text, tmp_path):
    config = fine_tuned(finished, text, steps=1, init_from=str(tmp_path / "start"))
    restore(finished).export(tmp_path / "start")
    prepare(config, tmp_path / "run")
    (tmp_path / "start").rename(tmp_path / "moved")
    config.init_from = str(tmp_path / "moved")
    prepare(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.init_from: '\S+moved' there, '' now"):
        prepare(fine_tuned(finished, text, steps=1, init_from=""), tmp_path / "run")
    config.init_from = str(tmp_path / "start")
    restore(finished, steps=150).export(tmp_path / "start")
    both = r"config\.init_from: '\S+moved' there, '\S+start' now\n  the init_from data have changed"
    with pytest.raises(UserError, match=both):
        train(config, tmp_path / "run")
