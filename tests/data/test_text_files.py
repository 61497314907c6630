import errno
import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import numbers
from tests.disks import files_up_to
from transformer_flax.data import text_files as module
from transformer_flax.data.sources import load_pairs
from transformer_flax.data.text_files import BLOCK_BYTES, Lines, write_pairs
from transformer_flax.errors import UserError

NOWHERE = pathlib.Path("/proc/nowhere")  # where no folder can be made
LONG = ["a", "", "größer " * (BLOCK_BYTES // 8), "\r", "🐕" * (BLOCK_BYTES // 4), "z"]  # in three blocks
SIZE = sum(len(line.encode()) + 1 for line in LONG)


TEXTS = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), max_size=20)


@given(texts=TEXTS, block=st.integers(1, 50), data=st.data())
def test_lines_come_back_in_any_order(tmp_path_factory, texts, block, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        lines = Lines(texts, tmp_path_factory.getbasetemp())
    assert lines.read(range(len(texts))) == texts
    assert len(lines) == len(texts)
    assert bytes(lines.text).decode() == "".join(f"{text}\n" for text in texts)
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=30)) if texts else []
    assert lines.read(chosen) == [texts[i] for i in chosen]


def test_a_text_larger_than_a_block_is_as_it_was(tmp_path):
    lines = Lines(iter(LONG), tmp_path)
    assert lines.read(range(len(LONG) - 1, -1, -1)) == LONG[::-1]


def test_a_long_text_has_no_name_in_its_folder(tmp_path):
    lines = Lines(LONG, tmp_path / "cache" / "deeper")
    assert not list((tmp_path / "cache" / "deeper").iterdir())
    assert lines.read([2]) == [LONG[2]]


def test_a_short_text_needs_no_folder():
    assert Lines(LONG[:2], NOWHERE).read([0, 1]) == LONG[:2]


def test_a_folder_that_cannot_be_is_refused_with_what_it_is_for():
    with pytest.raises(UserError, match=rf"needs {SIZE / 1e6:.1f} MB in {NOWHERE}, .*--config\.data\.cache_dir"):
        Lines(LONG, NOWHERE)


@pytest.mark.parametrize("room", [0, 500, 3 * BLOCK_BYTES // 2, SIZE - 1])
def test_a_full_disk_is_reported_with_all_that_is_needed_and_leaves_nothing_behind(tmp_path, room):
    needs = rf"needs {SIZE / 1e6:.1f} MB in {re.escape(str(tmp_path))}, "
    with pytest.raises(UserError, match=needs), files_up_to(room):
        Lines(LONG, tmp_path)
    assert not list(tmp_path.iterdir())
    assert Lines(LONG, tmp_path).read(range(len(LONG))) == LONG


def test_a_disk_that_says_at_the_end_only_that_it_is_full_is_heard(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EDQUOT, "quota exceeded")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match=rf"needs {SIZE / 1e6:.1f} MB .*quota exceeded"):
        Lines(LONG, tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "of the source"), KeyboardInterrupt()], ids=["read", "interrupt"])
@pytest.mark.parametrize("before", [0, 3, 6])
def test_what_fails_while_it_is_read_is_not_taken_for_a_full_disk(tmp_path, error, before):
    def failing():
        yield from LONG[:before]
        raise error

    with pytest.raises(type(error)) as caught:
        Lines(failing(), tmp_path)
    assert caught.value is error
    assert not list(tmp_path.iterdir())


def test_pairs_are_written_as_the_folder_that_they_are_read_from(tmp_path):
    pairs = {"train": [("a b", "ä 🐕"), ("", " c ")], "valid": [("d", "e")]}
    write_pairs(tmp_path / "new" / "text", {split: iter(each) for split, each in pairs.items()}, "en", "fr")
    config = numbers.get_config().data
    config.update(source="folder", path=str(tmp_path / "new" / "text"), target_language="fr", num_pairs=0)
    for split, wanted in pairs.items():
        read = load_pairs(config, split)
        assert read.read(range(len(read))) == wanted
    for splits, why in (
        ({"dev": [("a", "b")]}, "there is no split 'dev'; the splits are train, valid, test"),
        ({"train": {"one": "eins"}}, "train has 'one', which is not a pair"),
        ({"train": [("a", "b", "c")]}, "which is not a pair"),
    ):
        with pytest.raises(UserError, match=why):
            write_pairs(tmp_path / "refused", splits)
    with pytest.raises(UserError, match="both languages are 'en'"):
        write_pairs(tmp_path / "refused", {"train": [("a", "b")]}, "en", "en")
    assert not (tmp_path / "refused/train.en").exists()
    for line_break in ("\n", "\r"):  # the second, at the end of a line, would be read as a part of its end
        with pytest.raises(UserError, match="has a line break"):
            write_pairs(tmp_path, {"train": [("a", f"a{line_break}")]})
