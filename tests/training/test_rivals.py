"""Whole runs of the Transformer's rivals: the same loop, the same search, the same working directory."""

import dataclasses
import pathlib
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import transformer_flax
from configs import convolutional, multi30k, recurrent, rivals_small
from tests.relatives.rivals import CONVOLUTIONAL, RECURRENT
from tests.training.small import final_state, small_config, timeless, write_text
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.flops import count_parameters
from transformer_flax.training.config_checks import check, model_config
from transformer_flax.training.loop import train

MODELS = {
    "recurrent": dataclasses.replace(RECURRENT, num_layers=1),
    "convolutional": dataclasses.replace(CONVOLUTIONAL, max_length=64),
}


def rival_config(kind: str, **overrides) -> ConfigDict:
    config = small_config()
    fields = {name: value for name, value in dataclasses.asdict(MODELS[kind]).items() if name != "vocab_size"}
    config.model = ConfigDict({"kind": kind, **fields})
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


def learned(kind: str, folder: pathlib.Path) -> tuple[ConfigDict, list[dict]]:
    """The config and the metrics of a run in folder/run that has learned something, by its loss."""
    config = rival_config(
        kind,
        steps=20,
        data__path=str(write_text(folder)),
        data__cache_dir=str(folder / "cache"),
        optimizer__warmup_steps=20,
        optimizer__factor=2.0,
        log__every=10,
        eval__every=0,
        checkpoint__every=10,
        decode__beam_size=1,
    )
    train(config, folder / "run")
    lines = read_json_lines(folder / "run/metrics.jsonl")
    assert lines[0]["train/loss"] - 0.5 > lines[1]["train/loss"]
    return config, lines


def test_a_recurrent_run_learns_and_goes_on_to_the_bit(tmp_path):
    config, lines = learned("recurrent", tmp_path)
    run = tmp_path / "run"
    expected = final_state(run, 20)
    shutil.rmtree(run / "checkpoints/20")
    train(config, run)
    jax.tree.map(np.testing.assert_array_equal, expected, final_state(run, 20))
    assert timeless(read_json_lines(run / "metrics.jsonl")) == timeless(lines)


@pytest.mark.long
def test_a_convolutional_run_learns_and_is_restored(tmp_path):
    learned("convolutional", tmp_path)
    run = transformer_flax.restore(tmp_path / "run")
    valid, _ = run.split("valid")
    assert run.translate(valid) == (tmp_path / "run/translations/20.txt").read_text().splitlines()


@pytest.mark.parametrize("kind", MODELS)
def test_what_only_the_transformer_can_is_refused(kind):
    with pytest.raises(
        UserError, match=rf"data\.batching is 'packed'; it must be bucketed: a model of kind {kind} cannot keep several"
    ):
        check(rival_config(kind, data__batching="packed"))
    config = rival_config(kind)
    config.model.remat = "layers"
    with pytest.raises(UserError, match=rf"config\.model\.remat is not a field of kind '{kind}'"):
        check(config)


def test_learned_positions_of_a_convolutional_model_must_reach_as_far_as_a_translation():
    check(rival_config("convolutional"))
    with pytest.raises(UserError, match=r"config\.model\.max_length is 63; it must be at least 64 with learned"):
        check(rival_config("convolutional", model__max_length=63))


@pytest.mark.parametrize("module", [recurrent, convolutional])
def test_configs_of_rivals_are_of_the_size_of_the_transformer_s(module):
    def size(config):
        check(config)
        return sum(count_parameters(model_config(config, config.data.vocab_size)).values())

    config = module.get_config()
    assert size(config) == pytest.approx(size(multi30k.get_config()), rel=0.03)
    assert f"{size(config) / 1e6:.2f} million parameters" in module.__doc__


def test_small_rivals_are_of_one_size_and_see_the_same_batches():
    configs = [rivals_small.get_config(kind) for kind in rivals_small.KINDS]
    for config in configs:
        check(config)
        size = sum(count_parameters(model_config(config, config.data.vocab_size)).values())
        assert size == pytest.approx(0.9e6, rel=0.03)
        assert (config.data, config.steps) == (configs[0].data, configs[0].steps)
    with pytest.raises(UserError, match="the kind behind the colon is 'lstm'; it must be one of transformer, "):
        rivals_small.get_config("lstm")
