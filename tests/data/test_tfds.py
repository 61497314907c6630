"""A translation set of TFDS that is made here, prepared and read for real."""

import importlib
import pathlib
import pickle
import re
import shutil
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.data.make import data_config
from tests.data.processes import read_without_tensorflow
from transformer_flax.data import tfds as tfds_module
from transformer_flax.data import tfds_builder
from transformer_flax.data.pairs import load_pairs
from transformer_flax.errors import UserError

tfds = pytest.importorskip("tensorflow_datasets", reason='pip install -e ".[tfds]"')

GERMAN_OF = {"A dog runs.": "Ein Hund rennt.", "Two dogs sleep.": "Zwei Hunde schlafen.", "naïve 🐕": "Größe"}
TEXTS = {
    "train": list(GERMAN_OF.items()),
    "validation": [("one", "eins"), ("two", "zwei")],
    "test": [("three", "drei")],
}


class _Made(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    texts = TEXTS

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.Translation(languages=["de", "en"]))

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.texts}

    def _generate_examples(self, split):
        for number, (english, german) in enumerate(self.texts[split]):
            yield number, {"de": german, "en": english}


class MadeTranslate(_Made):
    """What the tests read."""


class MadeOfFields(_Made):
    """Texts by language, and more, without being of the type that TFDS has for translations."""

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"de": text, "en": text, "score": np.int64})
        )

    def _generate_examples(self, split):
        for number, example in super()._generate_examples(split):
            yield number, example | {"score": 7}


def read(folder, split="train", name="made_translate", **fields):
    return load_pairs(data_config(source="tfds", name=name, path=str(folder), **fields), split)


def as_list(pairs):
    return [pairs[i] for i in range(len(pairs))]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Prepares a set of these texts, and says in which folder it lies."""

    def make(texts, folder="data"):
        monkeypatch.setattr(MadeTranslate, "texts", texts)
        read(tmp_path / folder, next(iter(texts)))
        return tmp_path / folder

    return make


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a set that is prepared; not to be changed."""
    folder = tmp_path_factory.mktemp("tfds")
    read(folder)
    return folder


def test_a_set_is_prepared_and_read(made):
    assert dict(as_list(read(made))) == GERMAN_OF


def test_each_split_is_read_from_theirs(made):
    assert as_list(read(made, "test")) == TEXTS["test"]
    assert sorted(as_list(read(made, "valid"))) == TEXTS["validation"]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_languages_choose_the_direction(made, split):
    backward = read(made, split, source_language="de", target_language="en")
    assert as_list(backward) == [(german, english) for english, german in as_list(read(made, split))]


def test_texts_by_language_are_read_as_translations_are(tmp_path):
    assert dict(as_list(read(tmp_path, name="made_of_fields"))) == GERMAN_OF


def test_a_set_is_prepared_once(made, monkeypatch):
    monkeypatch.setattr(MadeTranslate, "texts", {"train": [("other", "anders")]})
    assert dict(as_list(read(made))) == GERMAN_OF


def test_the_home_directory_may_be_written_as_a_tilde(made, monkeypatch):
    monkeypatch.setenv("HOME", str(made.parent))
    assert read(f"~/{made.name}").fingerprint == read(made).fingerprint


def test_pairs_are_a_sequence(make, monkeypatch):
    monkeypatch.setattr(tfds_module, "BLOCK", 4)
    texts = [(f"en {i}", f"de {i}") for i in range(11)]
    pairs = read(make({"train": texts}))
    in_order = list(pairs)
    assert sorted(in_order) == sorted(texts)
    assert as_list(pairs) == in_order
    assert [pairs[-1], pairs[0], pairs[5]] == [in_order[10], in_order[0], in_order[5]]
    assert pairs.__getitems__([7, 0, 7, 10]) == [in_order[i] for i in (7, 0, 7, 10)]
    assert pairs.__getitems__([]) == []
    with pytest.raises(IndexError):
        pairs[11]


def test_pairs_may_be_sent_to_another_process(made):
    pairs = read(made)
    assert as_list(pickle.loads(pickle.dumps(pairs))) == as_list(pairs)


def test_every_text_is_clean(make):
    pairs = read(make({"train": [("&quot;A &amp;amp; B&quot;\n", " &#93; \u2028 \xa0&auml;")]}))
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


def test_the_fingerprint_is_of_the_data_not_of_their_place(made, tmp_path):
    shutil.copytree(made, tmp_path / "elsewhere")
    assert read(tmp_path / "elsewhere").fingerprint == read(made).fingerprint


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
def test_the_fingerprint_changes_with_the_data(made, make, changed):
    assert read(make(changed)).fingerprint != read(made).fingerprint


def test_each_split_and_direction_has_a_fingerprint_of_its_own(make):
    folder = make(dict.fromkeys(("train", "validation", "test"), TEXTS["train"]))
    splits = [read(folder, split).fingerprint for split in ("train", "valid", "test")]
    backward = read(folder, source_language="de", target_language="en").fingerprint
    assert len({*splits, backward}) == 4


def test_another_process_reads_without_tensorflow_nor_the_set_s_code_from_where_tfds_is_told(made):
    for split, (pairs, fingerprint) in read_without_tensorflow(made, "made_translate").items():
        assert [tuple(pair) for pair in pairs] == as_list(read(made, split))
        assert fingerprint == read(made, split).fingerprint


def test_a_set_on_another_machine_is_copied_once(make, tmp_path, monkeypatch):
    folder, other = make(TEXTS), make({"train": [("other", "anders")]}, "other")
    fingerprint = read(folder).fingerprint
    monkeypatch.setattr(tfds_builder, "REMOTE", "made_translate")  # as if it lay on gs://
    cache = {"cache_dir": str(tmp_path / "cache")}
    pairs = read(folder, **cache)
    assert (dict(as_list(pairs)), pairs.fingerprint) == (GERMAN_OF, fingerprint)
    for file in files_of(folder).glob("*array_record*"):
        file.unlink()
    assert as_list(read(folder, **cache)) == as_list(pairs)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    assert as_list(read(folder, **cache)) == [("other", "anders")]


def test_a_set_is_not_prepared_on_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builder, "REMOTE", "made_translate")
    with pytest.raises(UserError, match=rf"is not in {tmp_path}.*copy DIRECTORY/made_translate to {tmp_path}/made_tr"):
        read(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_copy_that_cannot_be_made_is_not_left_half(made, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builder, "REMOTE", "made_translate")
    folder = shutil.copytree(made, tmp_path / "data")
    (files_of(folder) / "a directory").mkdir()
    with pytest.raises(UserError, match=r"could not be copied to .*cache/tfds/"):
        read(folder, cache_dir=str(tmp_path / "cache"))
    assert not list((tmp_path / "cache" / "tfds").iterdir())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("wmt14/de-en", "TFDS has wmt14_translate/de-en, "),
        ("wmt14_translate/en-de", r"TFDS has wmt14_translate/.*wmt14_translate/de-en"),
        ("wmt14_translate/de-en:9.9.9", "TFDS has wmt14_translate/de-en, "),
        ("made_translation", "TFDS has made_translate"),
        ("nowhere near", r"TFDS has bucc, .*ted_hrlr_translate, .*wmt14_translate"),
        ("", "TFDS has bucc, "),
    ],
)
def test_an_unknown_name_is_refused_with_those_near_it(tmp_path, name, near):
    with pytest.raises(UserError, match=rf"config\.data\.name is '{name}'.*{near}"):
        read(tmp_path, name=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["source_language", "target_language"])
@pytest.mark.parametrize(
    ("name", "there"),
    [("made_of_fields", "de, en"), ("wmt14_translate/de-en", "de, en"), ("mnist", "none")],
)
def test_a_language_that_the_set_lacks_is_refused_with_those_it_has(tmp_path, name, there, field):
    languages = {"source_language": "en", "target_language": "de"} if name != "mnist" else {}
    field = field if languages else "source_language"
    with pytest.raises(UserError, match=rf"config\.data\.{field} is 'fr'.*it has {there}$"):
        read(tmp_path, name=name, **languages | {field: "fr"})
    assert not list(tmp_path.iterdir())


def test_a_split_that_the_set_lacks_is_refused_with_those_it_has(make):
    folder = make({"train": TEXTS["train"], "test": TEXTS["test"]})
    with pytest.raises(UserError, match=r"has no 'validation' split.*'valid'; it has test, train"):
        read(folder, "valid")


def files_of(folder) -> pathlib.Path:
    return folder / "made_translate" / "1.0.0"


def test_a_half_prepared_set_is_refused(made, tmp_path):
    shutil.copytree(files_of(made), files_of(tmp_path))
    (files_of(tmp_path) / "dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"made_translate/1\.0\.0 is half prepared.*remove it"):
        read(tmp_path)


def test_what_a_killed_process_left_behind_is_no_obstacle(make, tmp_path):
    (tmp_path / "data" / "made_translate" / "incomplete.ABC123_1.0.0").mkdir(parents=True)
    assert dict(as_list(read(make(TEXTS)))) == GERMAN_OF


@pytest.mark.parametrize("damage", ["missing", "cut short", "overwritten"])
def test_a_damaged_set_is_refused(make, damage):
    texts = {"train": [(f"en {i * i}", f"de {i * i}") for i in range(1000)]}
    (file,) = files_of(make(texts)).glob("*array_record*")
    whole = file.read_bytes()
    file.unlink()
    if damage == "cut short":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "overwritten":
        file.write_bytes(whole[:1000] + b"\xff" * 1000 + whole[2000:])
    with pytest.raises(UserError, match=r"made_translate/1\.0\.0 is damaged .*remove it"):
        as_list(read(file.parent.parent.parent))


def test_a_damaged_description_of_a_set_is_refused(made, tmp_path):
    shutil.copytree(files_of(made), files_of(tmp_path))
    (files_of(tmp_path) / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


def test_a_set_of_another_format_is_refused(made, tmp_path):
    shutil.copytree(files_of(made), files_of(tmp_path))
    file = files_of(tmp_path) / "dataset_info.json"
    file.write_text(file.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(UserError, match=r"made_translate as tfrecord.*--config\.data\.path"):
        read(tmp_path)


def test_text_that_is_not_utf8_is_refused_with_its_place(make):
    with pytest.raises(UserError, match=r"made_translate/1\.0\.0, pair 0: not UTF-8"):
        make({"train": [("one", b"f\xfcnf")]})


@pytest.mark.parametrize("package", ["tensorflow_datasets", "importlib_resources"])
def test_a_package_that_is_not_installed_is_named(made, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf'{package}.*pip install -e "\.\[wmt\]"') as refusal:
        read(made)
    named = re.findall(r"configs/(\w+)\.py", str(refusal.value))
    assert named
    for name in named:
        assert importlib.import_module(f"configs.{name}").get_config().data.source in ("numbers", "folder")


def test_preparing_without_tensorflow_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r'wmt14_translate/de-en needs TensorFlow.*pip install -e "\.\[wmt\]"'
    ) as refusal:
        read(tmp_path, name="wmt14_translate/de-en")
    assert "configs/numbers.py" in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_without_a_network_it_is_told_what_could_not_be_reached_and_what_can_be_done(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens, on any machine
    monkeypatch.setattr(tfds_builder, "RETRIES", 0)
    monkeypatch.setattr(tfds_builder.importlib.util, "find_spec", lambda name: name)  # as if TensorFlow were there
    with pytest.raises(UserError) as refusal:
        read(tmp_path, name="wmt14_translate/de-en")
    message = str(refusal.value)
    assert "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz could not be reached" in message
    assert f"put into {tmp_path}/downloads/manual by hand" in message
    for archive in ("training-parallel-commoncrawl.tgz", "training-parallel-nc-v9.tgz", "dev.tgz"):
        assert f"\n  {archive} from http://" in message
    assert "configs/multi30k.py" in message


def test_an_archive_that_is_not_what_it_should_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builder.importlib.util, "find_spec", lambda name: name)
    archive = tmp_path / "downloads" / "manual" / "training-parallel-europarl-v7.tgz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"half of it")
    with pytest.raises(UserError, match=rf"damaged or has changed; remove it(.|\n)*{archive}"):
        read(tmp_path, name="wmt14_translate/de-en")


def test_what_goes_wrong_while_preparing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(MadeTranslate, "texts", {"train": [("one", 1)]})
    with pytest.raises(UserError, match=r"made_translate could not be prepared in .* \(\w+: .*1"):
        read(tmp_path)


def test_another_process_may_have_prepared_it_first(made, tmp_path, monkeypatch):
    def overtaken(self, split):
        shutil.copytree(files_of(made), files_of(tmp_path), dirs_exist_ok=True)
        yield 0, {"de": "spät", "en": "late"}

    monkeypatch.setattr(MadeTranslate, "_generate_examples", overtaken)
    assert dict(as_list(read(tmp_path))) == GERMAN_OF
