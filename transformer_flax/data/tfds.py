"""Pairs of a translation set of TensorFlow Datasets (TFDS), read at random, without TensorFlow."""

import hashlib
import html.entities
import json
import re
from collections.abc import Sequence

from transformer_flax.data.tfds_builder import prepared_builder
from transformer_flax.errors import UserError

SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # ours: theirs
ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);")
CLEANING = 1  # raise it when `clean` changes
BLOCK = 512  # pairs read ahead: one at a time would take 30 times as long
SAMPLE = 256  # pairs that a fingerprint looks at


def clean(text: str) -> str:
    """One line of plain text: HTML entities undone, and a single blank for all whitespace in a row, none at the ends.

    What was escaped twice is undone twice (`&amp;quot;` is `"`). Only what ends in a semicolon is an entity: nothing is
    to be undone in `?a=1&copy=2`.
    """
    while "&" in text and (undone := ENTITY.sub(_character, text)) != text:
        text = undone
    return " ".join(text.split())


def _character(entity: re.Match) -> str:
    if entity[0][1] == "#":
        return html.unescape(entity[0])
    return html.entities.html5.get(entity[0][1:], entity[0])  # html.unescape would make "¬it;" of "&notit;"


class TfdsPairs:
    """A split of a translation set; if the set is not there yet, all of it is prepared first.

    Pairs come fast in order or in bulk (`__getitems__`), and slowly one by one in no order. May be pickled, and used on
    both sides of a fork.
    """

    def __init__(self, config, split: str):
        builder = prepared_builder(config)
        from tensorflow_datasets.core.decode import DeserializeMethod  # it is there, or the line above has said so

        self._folder = builder.data_dir
        self._languages = (config.source_language, config.target_language)
        info = builder.info
        if SPLITS[split] not in info.splits:
            there = ", ".join(sorted(info.splits))
            raise UserError(f"{config.name} has no {SPLITS[split]!r} split, to be used as {split!r}; it has {there}")
        try:
            raw = builder.as_data_source(SPLITS[split], deserialize_method=DeserializeMethod.RAW_BYTES)
            self._records = raw.data_source
        except NotImplementedError as error:
            raise UserError(
                f"{self._folder} holds {config.name} as {info.file_format.value}, which cannot be read at random; "
                "remove it, or name another place with --config.data.path=DIRECTORY, and it is prepared as array_record"
            ) from error
        self._block: tuple[int, list[tuple[str, str]]] = (-1, [])
        about = info.splits[SPLITS[split]]
        identity = [info.full_name, about.name, about.shard_lengths, about.num_bytes, self._languages, CLEANING]
        sample = self.__getitems__(range(0, len(self), max(1, len(self) // SAMPLE)))
        self.fingerprint = hashlib.sha256(json.dumps([identity, sample]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[str, str]:
        number, place = divmod(range(len(self))[index], BLOCK)
        block = self._block
        if block[0] != number:
            stop = min((number + 1) * BLOCK, len(self))
            block = self._block = (number, self.__getitems__(range(number * BLOCK, stop)))
        return block[1][place]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[str, str]]:
        """The pairs at `indices`, in their order."""
        # What TFDS decodes by its features takes twice the time of reading; this takes a quarter of it.
        from google.protobuf.message import DecodeError
        from tensorflow_datasets.proto import tf_example_pb2

        if not len(indices):
            return []
        pairs = []
        try:
            for record in self._records.__getitems__(indices):
                example = tf_example_pb2.Example.FromString(record)  # pyrefly: ignore (made when it is imported)
                features = example.features.feature
                source, target = (features[language].bytes_list.value[0].decode() for language in self._languages)
                pairs.append((clean(source), clean(target)))
        except UnicodeDecodeError as error:
            raise UserError(f"{self._folder}, pair {indices[len(pairs)]:,}: not UTF-8 ({error.reason})") from error
        except (RuntimeError, DecodeError) as error:  # of array_record, of protobuf
            raise UserError(f"{self._folder} is damaged ({error}); remove it, and it is prepared anew") from error
        return pairs
