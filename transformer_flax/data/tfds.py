"""Translation data sets of TensorFlow Datasets (TFDS): prepared once, then read in any order without TensorFlow."""

import difflib
import functools
import hashlib
import html.entities
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence

from transformer_flax.data.sentence_pairs import Pairs
from transformer_flax.errors import UserError
from transformer_flax.files import cache_root, whole_folder

TFDS_SPLITS = {"train": "train", "valid": "validation", "test": "test"}  # our split names, and the names in TFDS
ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);")
CLEANING_VERSION = 1  # increase when `clean` changes
SAMPLE = 256  # pairs that go into the fingerprint
RETRIES = 5  # of a download, 6 s in all; TFDS's default of 10 takes more than 3 minutes without a network
REMOTE = "://"  # marks a remote directory such as gs://bucket
INSTALL = 'pip install -e ".[wmt]"'
WITHOUT = "These run without: configs/numbers.py, and configs/multi30k.py with a folder of text."


def clean(text: str) -> str:
    """Returns one line of plain text: decodes HTML entities and replaces each run of whitespace by one space.

    Removes blanks at both ends. Also decodes entities that were escaped twice (`&amp;quot;` is `"`). An entity ends in
    a semicolon, so `?a=1&copy=2` has none.
    """
    while "&" in text and (undone := ENTITY.sub(_character, text)) != text:
        text = undone
    return " ".join(text.split())


def _character(entity: re.Match) -> str:
    if entity[0][1] == "#":
        return html.unescape(entity[0])
    return html.entities.html5.get(entity[0][1:], entity[0])  # html.unescape would make "¬it;" of "&notit;"


def tfds_pairs(config, split: str) -> Pairs:
    """Returns a split of a translation data set. Prepares the whole data set first if necessary.

    Reading pairs one by one takes 30 times as long as reading many at once. The fingerprint is of the split's sizes and
    of a sample of SAMPLE pairs or somewhat more, so it misses a change of other pairs that keeps the sizes.
    """
    builder = _prepared_builder(config)
    from tensorflow_datasets.core.decode import DeserializeMethod  # installed, or the line above has raised

    info, name = builder.info, TFDS_SPLITS[split]
    if name not in info.splits:
        there = ", ".join(sorted(info.splits))
        raise UserError(f"{config.name} has no {name!r} split, to be used as {split!r}; it has {there}")
    try:
        records = builder.as_data_source(name, deserialize_method=DeserializeMethod.RAW_BYTES).data_source
    except NotImplementedError as error:
        raise UserError(
            f"{builder.data_dir} holds {config.name} as {info.file_format.value}, which cannot be read at random; "
            "remove it, or name another place with --config.data.path=DIRECTORY, and it is prepared as array_record"
        ) from error
    languages = config.source_language, config.target_language
    read = functools.partial(_read, records, languages, builder.data_dir)
    about = info.splits[name]
    identity = [info.full_name, about.name, about.shard_lengths, about.num_bytes, languages, CLEANING_VERSION]
    sample = read(range(0, len(records), max(1, len(records) // SAMPLE)))
    return Pairs(hashlib.sha256(json.dumps([identity, sample]).encode()).hexdigest(), len(records), read)


def _read(records, languages: tuple[str, str], folder: str, indices: Sequence[int]) -> list[tuple[str, str]]:
    # TFDS's decoding takes twice the time of reading; this decoding takes a quarter of it.
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    if not len(indices):
        return []
    pairs = []
    try:
        for record in records.__getitems__(indices):
            example = tf_example_pb2.Example.FromString(record)  # pyrefly: ignore (made when it is imported)
            features = example.features.feature
            source, target = (features[language].bytes_list.value[0].decode() for language in languages)
            pairs.append((clean(source), clean(target)))
    except UnicodeDecodeError as error:
        raise UserError(f"{folder}, pair {indices[len(pairs)]:,}: not UTF-8 ({error.reason})") from error
    except (RuntimeError, DecodeError) as error:  # raised by array_record, by protobuf
        raise UserError(f"{folder} is damaged ({error}); remove it, and it is prepared anew") from error
    return pairs


def _prepared_builder(config):
    """Returns the TFDS builder of the data set that `config.data` names. The prepared data set is on this machine."""
    tfds = _import_tfds()
    builder = _find(tfds, config)
    if not (builder.data_path / "dataset_info.json").exists():
        _prepare(tfds, builder)
        builder = _find(tfds, config)
    if REMOTE in builder.data_dir:
        builder = _copied(tfds, builder, config.cache_dir)
    return builder


def _import_tfds():
    # Where TensorFlow is needed, silence its messages about the processor.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import importlib_resources  # noqa: F401 (TFDS needs it, does not declare it, and hides that it is missing)
        import tensorflow_datasets as tfds
        import tensorflow_datasets.translate  # else its sets are found only if all other sets' packages are there
    except ImportError as error:
        raise UserError(
            f"config.data.source 'tfds' needs a package that is not installed ({error}): {INSTALL}\n{WITHOUT}"
        ) from error
    tfds.features.FeatureConnector.cls_from_name = classmethod(_known_feature)  # pyrefly: ignore
    return tfds


def _known_feature(connector, name: str):
    """Replaces TFDS's own function, which would import any module that a data set's features.json names."""
    if name not in connector._registered_features:
        raise UserError(
            f"features.json says {name!r}, which is no feature of TFDS; the code of a set is never executed"
        )
    return connector._registered_features[name]


def _find(tfds, config):
    """Returns the builder of the data set, and checks that it has texts in both languages."""
    place = config.path or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    try:
        if tfds.core.naming.parse_builder_name_kwargs(config.name)[0].namespace:
            raise ValueError("it has a namespace, whose code is not of TFDS")
        builder = tfds.builder(config.name, data_dir=os.path.expanduser(config.path) or None)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    except (ValueError, AssertionError) as error:  # the data set, its config or its version does not exist
        # Without the pages of advice that TFDS adds.
        reason = re.split(r"\.?\s*\n|\. ", str(error).rpartition('}": ')[2].strip(". "))[0]
        near = ", ".join(_near(tfds, config.name))
        raise UserError(f"config.data.name is {config.name!r}: {reason}; TFDS has {near}") from error
    except Exception as error:  # a remote directory raises errors of many types
        raise UserError(f"{place} cannot be read: {error}") from error
    texts = [name for name, kind in builder.info.features.items() if isinstance(kind, tfds.features.Text)]
    for field in ("source_language", "target_language"):
        if config[field] not in texts:
            there = ", ".join(texts) or "none"
            raise UserError(
                f"config.data.{field} is {config[field]!r}, a text that {config.name} lacks; it has {there}"
            )
    return builder


def _near(tfds, name: str) -> list[str]:
    """Returns similar names: configs if only the config is wrong; else data sets, or all translation data sets."""
    known = set(tfds.list_builders(with_community_datasets=False))
    sets = sorted({tfds.core.naming.camelcase_to_snakecase(each) for each in vars(tfds.translate)} & known)
    names = [f"{each}/{config}" for each in sets for config in tfds.builder_cls(each).builder_configs]
    if configs := [each for each in names if each.startswith(name.partition("/")[0] + "/")]:
        return difflib.get_close_matches(name, configs, n=5, cutoff=0)
    return difflib.get_close_matches(name, [*names, *known - {name}]) or sets


def _prepare(tfds, builder) -> None:
    if builder.data_path.exists():
        raise UserError(f"{builder.data_path} is half prepared: it has no dataset_info.json; remove it and try again")
    from requests import RequestException
    from tensorflow_datasets.core.download import download_manager, downloader

    name = f"{builder.name}/{builder.builder_config_name}" if builder.builder_config_name else builder.name
    if REMOTE in builder.data_dir:
        raise UserError(
            f"{name} is not in {builder.data_dir}, where array_record cannot be written: prepare it on this machine "
            f"(--config.data.path=DIRECTORY), and copy DIRECTORY/{name} to {builder.data_dir_root}/{name}"
        )
    if type(builder).__module__.startswith("tensorflow_datasets.") and importlib.util.find_spec("tensorflow") is None:
        # Raised before gigabytes are downloaded.
        raise UserError(f"preparing {name} needs TensorFlow, reading it does not: {INSTALL}\n{WITHOUT}")
    (tfds.enable_progress_bar if sys.stderr.isatty() else tfds.disable_progress_bar)()
    downloader.MAX_RETRIES = RETRIES  # pyrefly: ignore (a constant to it)
    try:
        # The prepared data sets that TFDS offers on gs:// have another format.
        ours = tfds.download.DownloadConfig(try_download_gcs=False)
        builder.download_and_prepare(file_format="array_record", download_config=ours)
    except (RequestException, tfds.download.DownloadError) as error:
        raise UserError(_unreachable(builder, name, error)) from error
    except download_manager.NonMatchingChecksumError as error:
        raise UserError(f"{name}: an archive is damaged or has changed; remove it and try again\n{error}") from error
    except Exception as error:
        if (builder.data_path / "dataset_info.json").exists():
            return  # another process has prepared it
        raise UserError(
            f"{name} could not be prepared in {builder.data_dir_root} ({type(error).__name__}: {error}); archives that "
            "were downloaded whole are kept for the next time"
        ) from error


def _copied(tfds, builder, cache_dir: str):
    """Returns the builder of a local copy: array_record would ask a remote directory for every single pair."""
    key = hashlib.sha256((builder.data_path / "dataset_info.json").read_bytes()).hexdigest()[:32]
    folder = cache_root(cache_dir) / "tfds" / key
    if not folder.is_dir():
        print(f"copying {builder.data_dir} to {folder}")
        try:
            with whole_folder(folder) as partial:
                for file in builder.data_path.iterdir():
                    file.copy(partial / file.name)
        except Exception as error:  # a remote source raises errors of many types
            raise UserError(f"{builder.data_dir} could not be copied to {folder} ({error})") from error
    return tfds.builder_from_directory(folder)


def _unreachable(builder, name: str, error) -> str:
    """Returns the message for an archive that could not be downloaded: its URL, and how to add archives by hand."""
    from tensorflow_datasets.core.download import checksums
    from tensorflow_datasets.translate import wmt

    urls = [error.request.url] if getattr(error, "request", None) else []
    reason = getattr(next(iter(error.args), None), "reason", error)  # without the text that requests adds around it
    message = f"{name}: {' '.join(urls) or 'an archive'} could not be reached ({reason})"
    if isinstance(builder, wmt.WmtTranslate):  # all archives of a WMT set are known in advance
        source, _ = builder.builder_config.language_pair
        subsets = [wmt.DATASET_MAP[subset] for part in builder.subsets.values() for subset in part]
        urls = [url for subset in subsets for url in subset.get_url(source)]
    known = checksums.get_all_url_infos() | (builder.url_infos or {})
    if by_hand := [url for url in dict.fromkeys(urls) if url in known and known[url].filename]:
        manual = builder.data_dir_root / "downloads" / "manual"
        message += f"\nPut these files into {manual} by hand, and run the same command again:"
        message += "".join(f"\n  {known[url].filename} from {url}" for url in by_hand)
    return f"{message}\n{WITHOUT}"
