"""Translation sets of TFDS that are made here, prepared and read for real."""

import pathlib

import numpy as np
import pytest

from tests.data.make import data_config
from transformer_flax.data.sources import load_pairs

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
    """The tests read this set. `make_set` gives it other texts."""


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
    return pairs.read(range(len(pairs)))


def files_of(folder) -> pathlib.Path:
    return folder / "made_translate" / "1.0.0"
