"""Text sources: each is a function of `config.data` and a split that returns the split's pairs."""

import hashlib
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from transformer_flax.data.normalisation import normalisers
from transformer_flax.data.sentence_pairs import Pairs, iterate_pairs, require_split
from transformer_flax.data.synthetic import number_pairs, symbol_pairs
from transformer_flax.data.text_files import Lines, find_text, read_lines, require_as_many, require_text, text_folder
from transformer_flax.data.tfds import tfds_pairs
from transformer_flax.errors import UserError, look_up
from transformer_flax.files import cache_root

IF_MISSING = {  # what to do if there are no files of a split
    "valid": "; --config.data.held_out=0.1 keeps a tenth of train for it instead",
    "test": "; to train without a test split, set --config.eval.test=False",
}


def load_pairs(config, split: str) -> Pairs:
    """Returns the pairs of a split, read and normalised as `config` says.

    Args:
      config: `config.data`.
      split: one of SPLITS.

    Raises:
      UserError: the source, split, folder, data set, file or language does not exist, or a file is malformed.
    """
    require_split(split)
    pairs = look_up("config.data.source", config.source, SOURCES)(config, split)
    if config.source in READ and split == "train" and config.num_pairs:
        pairs = _first(pairs, config.num_pairs)
    return _normalised(pairs, config) if any(normalisers(config)) else pairs


def _first(pairs: Pairs, count: int) -> Pairs:
    """Returns the first `count` of the given pairs."""
    if not 0 < count <= len(pairs):
        raise UserError(
            f"config.data.num_pairs is {count:,}; the train split has {len(pairs):,} pairs: take as many or fewer, "
            "or all with 0"
        )
    fingerprint = hashlib.sha256(f"the first {count} of {pairs.fingerprint}".encode()).hexdigest()
    return Pairs(fingerprint, count, pairs.read)


def _normalised(pairs: Pairs, config) -> Pairs:
    """Returns pairs whose text is converted to lower case, to Moses' tokens, or both, as `config.data` says."""
    both = normalise_source, normalise_target = normalisers(config)

    def read(indices: Sequence[int]) -> list[tuple[str, str]]:
        return [(normalise_source(source), normalise_target(target)) for source, target in pairs.read(indices)]

    # Saved runs compare this fingerprint, so the repr of `Normaliser` must not change.
    fingerprint = hashlib.sha256(f"{both} of {pairs.fingerprint}".encode()).hexdigest()
    return Pairs(fingerprint, len(pairs), read, raw=pairs)


def folder_pairs(config, split: str) -> Pairs:
    """Reads two text files `<split>.<language>`, one sentence a line. Line N of both files makes pair N.

    With `config.held_out`, the valid split is a share of train; see `_file_of`. The files are read once. Memory holds
    16 bytes a pair.
    """
    folder = text_folder(config.path)
    languages = config.source_language, config.target_language
    named = f"config.data.source_language and target_language are {languages[0]} and {languages[1]}"
    hint = f"; {named}; --languages=SOURCE-TARGET sets both"
    if all(find_text(folder, f"train.{language}") for language in languages):
        hint = IF_MISSING.get(split, hint)
    files = [require_text(folder, _file_of(split, config, language), hint=hint) for language in languages]
    source, target = (Lines(read_lines(file), cache_root(config.cache_dir)) for file in files)
    require_as_many(files[0], source, files[1], target)
    digest = hashlib.sha256()
    for lines in (source, target):
        digest.update(lines.text)
        digest.update(b"\0")

    def read(indices: Sequence[int]) -> list[tuple[str, str]]:
        return list(zip(source.read(indices), target.read(indices), strict=True))

    pairs = Pairs(digest.hexdigest(), len(source), read)
    return _part(pairs, config, split) if config.held_out and split != "test" else pairs


def _part(train: Pairs, config, split: str) -> Pairs:
    """Returns the pairs of train that are its own, or those that are held out for valid."""
    sources = (source for block in iterate_pairs(train) for source, _ in block)
    held_out = np.fromiter((_is_held_out(source, config.seed, config.held_out) for source in sources), bool)
    chosen = np.flatnonzero(held_out == (split == "valid"))
    identity = f"{split} of {train.fingerprint}, with {config.held_out} held out and seed {config.seed}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()
    return Pairs(fingerprint, len(chosen), lambda indices: train.read(chosen[np.asarray(indices, int)].tolist()))


def _file_of(split: str, config, suffix: str) -> str:
    """Returns the name of the file that holds a split: `train.<suffix>` for valid, if `config.held_out` is above 0.

    Then that share of train is the valid split, and there must be no file `valid.<suffix>`. Whether a text is held out
    depends only on the text in the file and `config.seed`, so all copies of a text are in the same split.
    """
    share = config.held_out
    if share and (valid := find_text(text_folder(config.path), f"valid.{suffix}")):
        raise UserError(
            f"config.data.held_out is {share!r}, so {valid} would never be read; set --config.data.held_out=0, or "
            "move the file away"
        )
    return f"{'train' if share and split == 'valid' else split}.{suffix}"


def tsv_pairs(config, split: str) -> Pairs:
    """Reads texts with labels from files `<split>.tsv` without a header line. A pair is (text, label).

    With `config.held_out`, the valid split is a share of train; see `_file_of`.
    """
    share = config.held_out
    file = require_text(text_folder(config.path), _file_of(split, config, "tsv"), hint=IF_MISSING.get(split, ""))
    rows = _read_table(file, config.label_column, config.text_column)
    if share and split != "test":  # not by `_part`: saved runs compare the digest of the lines that are kept
        wanted = split == "valid"
        rows = ((label, text) for label, text in rows if _is_held_out(text, config.seed, share) == wanted)
    lines = Lines((f"{label}\t{text}" for label, text in rows), cache_root(config.cache_dir))
    digest = hashlib.sha256(b"label\ttext\n")
    digest.update(lines.text)

    def read(indices: Sequence[int]) -> list[tuple[str, str]]:
        return [(text, label) for label, text in (line.split("\t") for line in lines.read(indices))]

    return Pairs(digest.hexdigest(), len(lines), read)


def _read_table(file: pathlib.Path, label_column: int, text_column: int) -> Iterator[tuple[str, str]]:
    """Yields the (label, text) of each line."""
    columns = 0
    for number, line in enumerate(read_lines(file), start=1):
        cells = line.split("\t")
        columns = columns or len(cells)
        if len(cells) != columns:
            raise UserError(
                f"{file}, line {number:,}: it has {len(cells)} columns and the first line {columns}; a tab must "
                "stand between columns and nowhere else"
            )
        for name, column in (("label_column", label_column), ("text_column", text_column)):
            if not 0 <= column < columns:
                raise UserError(f"config.data.{name} is {column}; {file} has columns 0 to {columns - 1}: {line[:80]!r}")
        label = cells[label_column].strip()
        if not label:
            raise UserError(f"{file}, line {number:,}: its column {label_column}, the label, is empty")
        yield label, cells[text_column]


def _is_held_out(text: str, seed: int, share: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < share * 2**64


MADE = {"numbers": number_pairs, "copy": symbol_pairs, "reverse": symbol_pairs}  # num_pairs: how many to make
READ = {"folder": folder_pairs, "tsv": tsv_pairs, "tfds": tfds_pairs}
SOURCES = MADE | READ
ONE_LANGUAGE = ("copy", "reverse", "tsv")  # sources whose target is not in another language
