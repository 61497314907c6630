"""The pairs of a translation set of TFDS are read."""

import shutil

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.data.made_sets import GERMAN_OF, TEXTS, as_list, files_of, read
from tests.data.processes import read_without_tensorflow
from transformer_flax.data import tfds as tfds_module
from transformer_flax.errors import UserError


def test_a_set_is_prepared_and_read(made_set):
    assert dict(as_list(read(made_set))) == GERMAN_OF


def test_each_split_is_read_from_theirs(made_set):
    assert as_list(read(made_set, "test")) == TEXTS["test"]
    assert sorted(as_list(read(made_set, "valid"))) == TEXTS["validation"]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_languages_choose_the_direction(made_set, split):
    backward = read(made_set, split, source_language="de", target_language="en")
    assert as_list(backward) == [(german, english) for english, german in as_list(read(made_set, split))]


def test_texts_by_language_are_read_as_translations_are(tmp_path):
    assert dict(as_list(read(tmp_path, name="made_of_fields"))) == GERMAN_OF


def test_the_home_directory_may_be_written_as_a_tilde(made_set, monkeypatch):
    monkeypatch.setenv("HOME", str(made_set.parent))
    assert read(f"~/{made_set.name}").fingerprint == read(made_set).fingerprint


def test_pairs_are_read_at_any_places(make_set):
    texts = [(f"en {i}", f"de {i}") for i in range(11)]
    pairs = read(make_set({"train": texts}))
    in_order = as_list(pairs)
    assert sorted(in_order) == sorted(texts)
    assert pairs.read([7, 0, 7, 10]) == [in_order[i] for i in (7, 0, 7, 10)]
    assert pairs.read([]) == []


def test_every_text_is_clean(make_set):
    pairs = read(make_set({"train": [("&quot;A &amp;amp; B&quot;\n", " &#93; \u2028 \xa0&auml;")]}))
    assert as_list(pairs) == [('"A & B"', "] ä")]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain text", "plain text"),
        ("", ""),
        ("&quot;R&amp;D&quot;", '"R&D"'),
        ("l&apos;eau &lt;b&gt; &#91;1&#93; &#xE9; &#8222;", "l'eau <b> [1] é „"),
        ("&amp;quot;twice&amp;quot; &amp;amp;amp;", '"twice" &'),
        ("R&D, AT&T; & so on &", "R&D, AT&T; & so on &"),
        ("?a=1&copy=2&lt=3&section=4", "?a=1&copy=2&lt=3&section=4"),
        ("&notit; &nonsense; &;&#;", "&notit; &nonsense; &;&#;"),
        ("a&nbsp;b&#10;c\td\r\ne\u2028f\u3000g  h\x85", "a b c d e f g h"),
        ("zero\u200bwidth", "zero\u200bwidth"),
        ("&#0; &#99999999; &#xD800;", "\ufffd \ufffd \ufffd"),
    ],
)
def test_cleaning(text, cleaned):
    assert tfds_module.clean(text) == cleaned


@hypothesis.given(st.text() | st.text(alphabet="&amp;#38;lt;quot \n\u2028"))
def test_what_is_clean_is_one_line_and_stays_as_it_is(text):
    cleaned = tfds_module.clean(text)
    assert len(cleaned.splitlines()) <= 1
    assert cleaned == cleaned.strip()
    assert tfds_module.clean(cleaned) == cleaned


def test_the_fingerprint_is_of_the_data_not_of_their_place(made_set, tmp_path):
    shutil.copytree(made_set, tmp_path / "elsewhere")
    assert read(tmp_path / "elsewhere").fingerprint == read(made_set).fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        {"train": [*TEXTS["train"][:2], ("naïve 🐕", "GröBe")]},
        {"train": TEXTS["train"][:2]},
        {"train": [*TEXTS["train"], ("more", "mehr")]},
        {"train": [(german, english) for english, german in TEXTS["train"]]},
    ],
    ids=["a letter", "fewer", "more", "sides"],
)
def test_the_fingerprint_changes_with_the_data(made_set, make_set, changed):
    assert read(make_set(changed)).fingerprint != read(made_set).fingerprint


def test_each_split_and_direction_has_a_fingerprint_of_its_own(make_set):
    folder = make_set(dict.fromkeys(("train", "validation", "test"), TEXTS["train"]))
    splits = [read(folder, split).fingerprint for split in ("train", "valid", "test")]
    backward = read(folder, source_language="de", target_language="en").fingerprint
    assert len({*splits, backward}) == 4


def test_another_process_reads_without_tensorflow_nor_the_set_s_code_from_where_tfds_is_told(made_set):
    for split, (pairs, fingerprint) in read_without_tensorflow(made_set, "made_translate").items():
        assert [tuple(pair) for pair in pairs] == as_list(read(made_set, split))
        assert fingerprint == read(made_set, split).fingerprint


def test_a_split_that_the_set_lacks_is_refused_with_those_it_has(make_set):
    folder = make_set({"train": TEXTS["train"], "test": TEXTS["test"]})
    with pytest.raises(UserError, match=r"has no 'validation' split.*'valid'; it has test, train"):
        read(folder, "valid")


@pytest.mark.parametrize("damage", ["missing", "cut short", "overwritten"])
def test_a_damaged_set_is_refused(make_set, damage):
    texts = {"train": [(f"en {i * i}", f"de {i * i}") for i in range(1000)]}
    (file,) = files_of(make_set(texts)).glob("*array_record*")
    whole = file.read_bytes()
    file.unlink()
    if damage == "cut short":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "overwritten":
        file.write_bytes(whole[:1000] + b"\xff" * 1000 + whole[2000:])
    with pytest.raises(UserError, match=r"made_translate/1\.0\.0 is damaged .*remove it"):
        as_list(read(file.parent.parent.parent))


def test_text_that_is_not_utf8_is_refused_with_its_place(make_set):
    with pytest.raises(UserError, match=r"made_translate/1\.0\.0, pair 0: not UTF-8"):
        make_set({"train": [("one", b"f\xfcnf")]})
