"""A config has all fields that there are; unknown and wrong fields are refused."""

import dataclasses
import importlib
import json

import pytest
from ml_collections import ConfigDict

from configs import base, vectors
from tests.conftest import ROOT
from tests.training.small import small_config
from transformer_flax.checked_fields import rate
from transformer_flax.errors import UserError
from transformer_flax.model.registry import find_kind
from transformer_flax.training import config_fields
from transformer_flax.training.config_checks import check, check_text
from transformer_flax.training.config_fields import (
    RunConfig,
    complete,
    differences,
    flatten,
    require_fields,
    vector_run_config,
)


def types_of(section) -> dict:
    if isinstance(section, ConfigDict):
        return {name: types_of(section[name]) for name in section if name != "model"}
    return type(section)


def known(dataclass) -> dict:
    return {
        field.name: known(field.type) if dataclasses.is_dataclass(field.type) else field.type
        for field in dataclasses.fields(dataclass)
        if field.name != "model"
    }


def test_the_known_fields_and_types_are_those_of_the_configs():
    assert types_of(base.get_config()) == known(RunConfig)
    assert types_of(vectors.get_config()) == known(vector_run_config())


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/[a-z]*.py")), ids=lambda file: file.stem)
def test_a_config_of_ours_passes_its_checks(file):
    config = importlib.import_module(f"configs.{file.stem}").get_config()
    (check_text if "vectors" in config else check)(config)
    if "model" in config:  # a field that is missing has its default, so the check passes without it
        known = {field.name for field in dataclasses.fields(find_kind(config.model.kind).config)}
        assert {*config.model} == known - {"vocab_size"} | {"kind"}


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("stepz", 3, r"config\.stepz is an unknown field; did you mean 'steps'\?"),
        ("decode.beam", 3, r"config\.decode\.beam is an unknown field; did you mean 'beam_size'\?"),
        (
            "model.num_head",
            3,
            r"num_head is not a field of kind 'transformer'; did you mean 'num_heads'\?",
        ),
        ("eval.every", "10", r"config\.eval\.every is '10'; it must be a whole number"),
        ("eval.test", 1, r"config\.eval\.test is 1; it must be true or false"),
        ("data.cache_dir", 1.5, r"config\.data\.cache_dir is 1\.5; it must be a text in quotes"),
        ("optimizer", 3, r"config\.optimizer is 3; it must be a section of fields"),
        ("log", ..., r"config\.log is missing"),
        ("data.seed", ..., r"config\.data\.seed is missing"),
    ],
)
def test_an_unknown_a_missing_or_a_mistyped_field_is_refused_by_name(where, value, message):
    config = json.loads(small_config().to_json())  # of plain values, which may be replaced by any other
    *sections, last = where.split(".")
    section = config
    for name in sections:
        section = section[name]
    section[last] = value
    if value is ...:
        del section[last]
    with pytest.raises(UserError, match=message):
        check(ConfigDict(config))


def test_a_config_of_word_vectors_is_completed_too():
    config = vectors.get_config()
    del config.data.lowercase
    assert complete(config).data.lowercase is False


def test_a_section_that_is_newer_than_a_config_has_its_defaults(monkeypatch):
    noise = dataclasses.make_dataclass("NoiseConfig", [("gradient", float, rate(default=0.0))], frozen=True)
    fields = [("noise", noise)]
    newer = dataclasses.make_dataclass("Newer", fields, bases=(RunConfig,), frozen=True, kw_only=True)
    monkeypatch.setattr(config_fields, "RunConfig", newer)
    older = small_config()
    assert complete(older).noise.gradient == 0.0
    require_fields(complete(older))
    ours, theirs = (flatten(config.to_dict()) for config in (complete(older), older))
    assert differences(theirs, ours, ()) == []
    assert differences(theirs, {**ours, "noise.gradient": 0.1}, ()) == ["config.noise.gradient: 0.0 there, 0.1 now"]


def test_a_config_of_an_older_version_may_lack_what_its_source_does_not_read():
    config = small_config()
    for name in ("longest_trained", "longest_tested", "label_column", "text_column", "held_out"):
        del config.data[name]
    check(config)
