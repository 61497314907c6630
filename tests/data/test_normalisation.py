"""Lines as the scripts of Moses write them."""

import pytest

from tests.data.make import data_config
from transformer_flax.data.normalisation import Normaliser, normalisers
from transformer_flax.decoding.scoring import score


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("Drei Hunde laufen.", "drei hunde laufen ."),
        ("Ein Schild: „Ja“ & 3,5 km", "ein schild : &quot; ja &quot; &amp; 3,5 km"),  # Moses escapes
        ("Der rot-weiße Bus fährt z.B. um 8...", "der rot-weiße bus fährt z.b. um 8 ..."),
        ("ÄÖÜ  ẞ\u00a0x", "äöü ß x"),
        ("1\u00a0000 Hunde", "1,000 hunde"),  # German has a comma there, English a point
        ("", ""),
    ],
)
def test_lower_case_comes_first_then_punctuation_then_tokens(line, tokens):
    assert Normaliser("de", lowercase=True, tokenized=True)(line) == tokens


def test_each_is_done_alone_and_none_changes_nothing():
    line = "Don't  go, O'Neil."
    assert Normaliser("en")(line) == line
    assert Normaliser("en", lowercase=True)(line) == "don't  go, o'neil."
    assert Normaliser("en", tokenized=True)(line) == "Don &apos;t go , O &apos;Neil ."
    assert Normaliser("en", tokenized=True)("1\u00a0000 dogs") == "1.000 dogs"
    config = data_config(source_language="fr", target_language="en", lowercase=True)
    assert normalisers(config) == (Normaliser("fr", lowercase=True), Normaliser("en", lowercase=True))


def test_a_region_keeps_the_rules_of_its_language():
    line = "L'été, c'est l'affaire d'aujourd'hui."
    french = Normaliser("fr", tokenized=True)
    assert french(line) != Normaliser("en", tokenized=True)(line)
    for code in "fr-CA", "fr_CA", "FR":
        assert Normaliser(code, tokenized=True)(line) == french(line)
        assert "|tok:moses-fr|" in score(["a b c d"], ["a b c d"], Normaliser(code, tokenized=True)).signature


def test_any_language_works():
    assert Normaliser("xx", tokenized=True)("Saluton, mondo!") == "Saluton , mondo !"
