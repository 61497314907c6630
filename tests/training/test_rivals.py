"""Whole runs of the Transformer's rivals: the same loop, the same search, the same working directory."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import transformer_flax
from configs import convolutional, multi30k, recurrent
from tests.model.rivals import CONVOLUTIONAL, RECURRENT
from tests.training.small import final_state, small_config, timeless, write_text
from transformer_flax.errors import UserError
from transformer_flax.model.cost import count_parameters
from transformer_flax.training.loop import train
from transformer_flax.training.metrics import read_lines
from transformer_flax.training.prepare import check, model_config

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


@pytest.mark.parametrize(("kind", "mode"), [("recurrent", "jit"), ("convolutional", "pmap")])
def test_a_rival_learns_and_goes_on_to_the_bit(kind, mode, tmp_path):
    config = rival_config(
        kind,
        steps=30,
        data__path=str(write_text(tmp_path)),
        data__cache_dir=str(tmp_path / "cache"),
        optimizer__warmup_steps=20,
        optimizer__factor=1.0,
        log__every=10,
        eval__every=0,
        checkpoint__every=15,
        parallel__mode=mode,
        parallel__num_devices=2,
    )
    run = tmp_path / "run"
    whole = train(config, run)
    expected, lines = final_state(run, 30), read_lines(run / "metrics.jsonl")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[0] - 1 > losses[1] > losses[2]

    shutil.rmtree(run / "checkpoints/30")
    resumed = train(config, run)
    jax.tree.map(np.testing.assert_array_equal, expected, final_state(run, 30))
    assert resumed["valid"].translations == whole["valid"].translations
    assert timeless(read_lines(run / "metrics.jsonl"))[:4] == timeless(lines)[:4]

    restored = transformer_flax.restore(run)
    attention = restored.attention("twenty-one", "einundzwanzig")
    assert attention.kinds == ("cross",)
    np.testing.assert_allclose(attention.cross.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_what_only_the_transformer_can_is_refused(kind):
    with pytest.raises(
        UserError, match=rf"data\.batching is 'packed'; it must be bucketed: a model of kind {kind} cannot keep several"
    ):
        check(rival_config(kind, data__batching="packed"))
    config = rival_config(kind)
    config.model.remat = "layers"
    with pytest.raises(UserError, match=rf"kind is '{kind}', whose config has nothing for config\.model\.remat"):
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
