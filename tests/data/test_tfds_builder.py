"""A translation set of TFDS is found, copied or prepared; a message says why it cannot be had."""

import importlib
import json
import re
import shutil
import sys

import pytest

from tests.data.made_sets import GERMAN_OF, TEXTS, MadeTranslate, as_list, files_of, read
from transformer_flax.data import tfds
from transformer_flax.errors import UserError


def test_a_set_is_prepared_once(made_set, monkeypatch):
    monkeypatch.setattr(MadeTranslate, "texts", {"train": [("other", "anders")]})
    assert dict(as_list(read(made_set))) == GERMAN_OF


def test_a_set_on_another_machine_is_copied_once(make_set, tmp_path, monkeypatch):
    folder, other = make_set(TEXTS), make_set({"train": [("other", "anders")]}, "other")
    fingerprint = read(folder).fingerprint
    monkeypatch.setattr(tfds, "REMOTE", "made_translate")  # as if it lay on gs://
    cache = {"cache_dir": str(tmp_path / "cache")}
    pairs = read(folder, **cache)
    assert (dict(as_list(pairs)), pairs.fingerprint) == (GERMAN_OF, fingerprint)
    for file in files_of(folder).glob("*array_record*"):
        file.unlink()
    assert as_list(read(folder, **cache)) == as_list(pairs)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    assert as_list(read(folder, **cache)) == [("other", "anders")]


def test_a_set_is_not_prepared_on_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds, "REMOTE", "made_translate")
    with pytest.raises(UserError, match=rf"is not in {tmp_path}.*copy DIRECTORY/made_translate to {tmp_path}/made_tr"):
        read(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_copy_that_cannot_be_made_is_not_left_half(made_set, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds, "REMOTE", "made_translate")
    folder = shutil.copytree(made_set, tmp_path / "data")
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


def test_a_half_prepared_set_is_refused(made_set, tmp_path):
    shutil.copytree(files_of(made_set), files_of(tmp_path))
    (files_of(tmp_path) / "dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"made_translate/1\.0\.0 is half prepared.*remove it"):
        read(tmp_path)


def test_what_a_killed_process_left_behind_is_no_obstacle(make_set, tmp_path):
    (tmp_path / "data" / "made_translate" / "incomplete.ABC123_1.0.0").mkdir(parents=True)
    assert dict(as_list(read(make_set(TEXTS)))) == GERMAN_OF


def test_a_damaged_description_of_a_set_is_refused(made_set, tmp_path):
    shutil.copytree(files_of(made_set), files_of(tmp_path))
    (files_of(tmp_path) / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


def test_a_set_of_another_format_is_refused(made_set, tmp_path):
    shutil.copytree(files_of(made_set), files_of(tmp_path))
    file = files_of(tmp_path) / "dataset_info.json"
    file.write_text(file.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(UserError, match=r"made_translate as tfrecord.*--config\.data\.path"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["", "type"], ids=["as written", "as in old sets"])
def test_code_that_a_set_names_is_not_executed(made_set, tmp_path, monkeypatch, kind):
    shutil.copytree(files_of(made_set), files_of(tmp_path))
    (tmp_path / "planted.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'marker')!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    features = files_of(tmp_path) / "features.json"
    if kind:
        features.write_text(json.dumps({kind: "planted.Text", "content": {}}))
    else:
        features.write_text(features.read_text().replace("tensorflow_datasets.core.features.tr", "planted.tr"))
    with pytest.raises(UserError, match=rf"{tmp_path}: features\.json .* 'planted\.[\w.]+', .* no feature of TFDS"):
        read(tmp_path, name="made_translate:1.0.0")
    assert not (tmp_path / "marker").exists()
    importlib.import_module("planted")
    del sys.modules["planted"]
    assert (tmp_path / "marker").exists()  # that the bait works


@pytest.mark.parametrize("name", ["huggingface:glue", "planted:made_translate/de-en"])
def test_a_set_of_a_namespace_is_refused_as_its_code_is_not_of_tfds(tmp_path, name):
    with pytest.raises(UserError, match=rf"config\.data\.name is '{name}': .*namespace.*; TFDS has "):
        read(tmp_path, name=name)


@pytest.mark.parametrize("package", ["tensorflow_datasets", "importlib_resources"])
def test_a_package_that_is_not_installed_is_named(made_set, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf'{package}.*pip install -e "\.\[wmt\]"') as refusal:
        read(made_set)
    named = re.findall(r"configs/(\w+)\.py", str(refusal.value))
    assert named
    for name in named:
        assert importlib.import_module(f"configs.{name}").get_config().data.source in ("numbers", "folder")


def test_preparing_without_tensorflow_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r'wmt14_translate/de-en needs TensorFlow.*pip install -e "\.\[wmt\]"'
    ) as refusal:
        read(tmp_path, name="wmt14_translate/de-en")
    assert "configs/numbers.py" in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_without_a_network_it_is_told_what_could_not_be_reached_and_what_can_be_done(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens, on any machine
    monkeypatch.setattr(tfds, "RETRIES", 0)
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: name)  # as if TensorFlow were there
    with pytest.raises(UserError) as refusal:
        read(tmp_path, name="wmt14_translate/de-en")
    message = str(refusal.value)
    assert "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz could not be reached" in message
    assert f"Put these files into {tmp_path}/downloads/manual by hand" in message
    for archive in ("training-parallel-commoncrawl.tgz", "training-parallel-nc-v9.tgz", "dev.tgz"):
        assert f"\n  {archive} from http://" in message
    assert "configs/multi30k.py" in message


def test_an_archive_that_is_not_what_it_should_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: name)
    archive = tmp_path / "downloads" / "manual" / "training-parallel-europarl-v7.tgz"
    archive.parent.mkdir(parents=True)
    archive.write_bytes(b"half of it")
    with pytest.raises(UserError, match=rf"damaged or has changed; remove it(.|\n)*{archive}"):
        read(tmp_path, name="wmt14_translate/de-en")


def test_what_goes_wrong_while_preparing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(MadeTranslate, "texts", {"train": [("one", 1)]})
    with pytest.raises(UserError, match=r"made_translate could not be prepared in .* \(\w+: .*1"):
        read(tmp_path)


def test_another_process_may_have_prepared_it_first(made_set, tmp_path, monkeypatch):
    def overtaken(self, split):
        shutil.copytree(files_of(made_set), files_of(tmp_path), dirs_exist_ok=True)
        yield 0, {"de": "spät", "en": "late"}

    monkeypatch.setattr(MadeTranslate, "_generate_examples", overtaken)
    assert dict(as_list(read(tmp_path))) == GERMAN_OF
