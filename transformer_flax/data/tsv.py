"""Texts and their labels in tab-separated files: a column of each, as (text, label) pairs."""

import hashlib
import pathlib
from collections.abc import Iterator, Sequence

from transformer_flax.data.cache import cache_root
from transformer_flax.data.lines import Lines
from transformer_flax.data.text import decode_lines, find_text, open_text, require_text, text_folder
from transformer_flax.errors import UserError


class TsvPairs:
    """Files `<split>.tsv`, plain, .gz or .xz, UTF-8, a text a line, without a line of headings.

    Where config.data.held_out is above 0, there is no valid.tsv: that share of train is the valid split. Which texts
    those are depends on the text and config.data.seed alone, so that copies of one text are all on the same side.

    Raises:
      UserError: there is no such file, or a line has not the columns that the first one has, or an empty label.
    """

    def __init__(self, config, split: str):
        share = config.held_out
        if not 0 <= share < 1:
            raise UserError(f"config.data.held_out is {share!r}; it must be from 0 to below 1: a share of train")
        folder = text_folder(config.path)
        valid = find_text(folder, "valid.tsv")
        if split == "valid" and not share and not valid:
            raise UserError(
                f"{folder} has no valid.tsv; --config.data.held_out=0.1 keeps a tenth of train for it instead"
            )
        if share and valid:
            raise UserError(
                f"config.data.held_out is {share!r}, and there is {valid} too, which would never be read; set "
                "--config.data.held_out=0, or move the file away"
            )
        file = require_text(folder, f"{'train' if share and split == 'valid' else split}.tsv")
        rows = _read(file, config.label_column, config.text_column)
        if share and split != "test":
            wanted = split == "valid"
            rows = ((label, text) for label, text in rows if _is_held_out(text, config.seed, share) == wanted)
        self._lines = Lines((f"{label}\t{text}" for label, text in rows), cache_root(config.cache_dir))
        digest = hashlib.sha256(b"label\ttext\n")
        digest.update(self._lines.text)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return _pair(self._lines[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[str, str]]:
        """The pairs at `indices`, in their order."""
        return [_pair(line) for line in self._lines.__getitems__(indices)]


def _pair(line: str) -> tuple[str, str]:
    label, text = line.split("\t")
    return text, label


def _read(file: pathlib.Path, label_column: int, text_column: int) -> Iterator[tuple[str, str]]:
    """(label, text) of each line."""
    columns = 0
    with open_text(file) as stream:
        for number, line in enumerate(decode_lines(stream, str(file)), start=1):
            cells = line.split("\t")
            columns = columns or len(cells)
            if len(cells) != columns:
                raise UserError(
                    f"{file}, line {number:,}: it has {len(cells)} columns and the first line {columns}; tabs part "
                    "columns, and stand nowhere else"
                )
            for name, column in (("label_column", label_column), ("text_column", text_column)):
                if not 0 <= column < columns:
                    raise UserError(
                        f"config.data.{name} is {column}; {file} has columns 0 to {columns - 1}: {line[:80]!r}"
                    )
            label = cells[label_column].strip()
            if not label:
                raise UserError(f"{file}, line {number:,}: its column {label_column}, the label, is empty")
            yield label, cells[text_column]


def _is_held_out(text: str, seed: int, share: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < share * 2**64
