"""docs/paper.md says what is there: functions, fields, and the paper's values."""

import ast
import functools
import importlib
import operator
import re

import pytest

from configs import base, big
from tests.conftest import ROOT

TEXT = (ROOT / "docs/paper.md").read_text()
FUNCTIONS = re.findall(r"\[`([\w.]+)`\]\(\.\./(transformer_flax/[\w/]+)\.py\)", TEXT)
FIELDS = re.findall(r"`(config\.[\w.]+)`", TEXT)
NUMBERS = re.findall(r"^\| .+? \| (\S+) \| (\S+) \| `(config\.[\w.]+)` \|$", TEXT, re.MULTILINE)


def value_of(config, field: str):
    return functools.reduce(operator.getitem, field.split(".")[1:], config)


@pytest.mark.parametrize(("name", "module"), sorted(set(FUNCTIONS)), ids=lambda value: value.replace("/", "."))
def test_every_function_is_there(name, module):
    found = importlib.import_module(module.replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)


def test_every_field_is_there():
    for field in FIELDS:
        value_of(base.get_config(), field)
    assert len(set(FIELDS)) > 30


def test_every_number_is_that_of_the_configs():
    def parse(cell):
        return ast.literal_eval(re.sub(r"(?<=\d),(?=\d{3})", "", cell))

    for of_base, of_big, field in NUMBERS:
        assert value_of(base.get_config(), field) == parse(of_base), field
        assert value_of(big.get_config(), field) == parse(of_big), field
    assert len(NUMBERS) == 23


def test_no_link_to_code_is_left_out_of_these_tests():
    assert len(FUNCTIONS) == TEXT.count("](../transformer_flax/") > 30
