import os
import pathlib
import re
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import forked
from tests.data.make import ListPairs
from tests.disks import files_up_to
from transformer_flax.data.classes import Classes
from transformer_flax.data.corpus import Sentences, load_corpus
from transformer_flax.data.sentence_pairs import CHUNK
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.special_tokens import END_ID, NUM_SPECIAL

PAIRS = ListPairs((f"number {n}" * (n % 4), f"die nummer {n}" * (n % 3)) for n in range(50))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([text for pair in PAIRS for text in pair], 300)


class Calls(list):
    """A progress that remembers what it was told."""

    def __call__(self, done: int, of: int) -> None:
        self.append((done, of))


def entries(cache_dir) -> list[str]:
    return sorted(path.name for path in cache_dir.glob("corpora/*"))


def as_lists(sentences: Sentences) -> list[list[int]]:
    return [sentences.ids[a:b].tolist() for a, b in zip(sentences.offsets[:-1], sentences.offsets[1:], strict=True)]


def assert_holds(corpus, pairs, tokenizer) -> None:
    """The corpus is these pairs, each sentence closed by the end symbol."""
    assert len(corpus) == len(pairs)
    for side, sentences in enumerate((corpus.source, corpus.target)):
        texts = [pairs[i][side] for i in range(len(pairs))]
        assert as_lists(sentences) == [[*ids, END_ID] for ids in tokenizer.encode(texts)]
        assert sentences.ids.dtype == np.uint16
        assert sentences.offsets.dtype == np.int64


def test_a_corpus_is_the_ids_of_its_pairs_each_closed_by_the_end_symbol(tmp_path, tokenizer):
    assert_holds(load_corpus(PAIRS, tokenizer, str(tmp_path)), PAIRS, tokenizer)


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path, tokenizer):
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    [key] = entries(tmp_path)
    old, new, anothers = (tmp_path / "corpora" / f"{key}.partial.{end}" for end in ("0" * 32, "1" * 32, "mine"))
    (tmp_path / "corpora" / key).rename(old)
    for folder in (new, anothers):
        shutil.copytree(old, folder)
    for folder in (old, anothers):
        os.utime(folder, (0, 0))
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    assert entries(tmp_path) == [key, new.name, anothers.name]


def test_sentences_keep_their_places_beyond_a_chunk(tmp_path, tokenizer):
    pairs = ListPairs((str(n), str(-n)) for n in range(CHUNK + 3))
    assert_holds(load_corpus(pairs, tokenizer, str(tmp_path)), pairs, tokenizer)


def test_a_split_without_pairs_is_an_empty_corpus(tmp_path, tokenizer):
    for _ in range(2):  # from text, then from the cache
        assert_holds(load_corpus(ListPairs(), tokenizer, str(tmp_path)), [], tokenizer)


def test_an_empty_sentence_is_its_end_symbol_alone(tmp_path, tokenizer):
    corpus = load_corpus(ListPairs([("", "x"), ("", "")]), tokenizer, str(tmp_path))
    assert corpus.source.lengths.tolist() == [1, 1]
    assert corpus.target.lengths.tolist()[1] == 1
    assert as_lists(corpus.source) == [[END_ID], [END_ID]]


def test_lengths_count_the_end_symbol(tmp_path, tokenizer):
    corpus = load_corpus(PAIRS, tokenizer, str(tmp_path))
    assert corpus.target.lengths.tolist() == [len(ids) + 1 for ids in tokenizer.encode([pair[1] for pair in PAIRS])]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_the_beginnings_of_sentences_are_read_one_after_the_other(lengths, data):
    offsets = np.cumsum([0, *lengths])
    sentences = Sentences(np.arange(3, 3 + offsets[-1], dtype=np.int32), offsets)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    taken = [data.draw(st.integers(0, lengths[i])) for i in chosen]
    whole = as_lists(sentences)
    expected = [token for i, count in zip(chosen, taken, strict=True) for token in whole[i][:count]]
    assert sentences.tokens(np.array(chosen, np.int64), np.array(taken, np.int64)).tolist() == expected
    assert sentences.lengths_of(np.array(chosen, np.int64)).tolist() == [lengths[i] for i in chosen]
    assert sentences.lengths.tolist() == lengths


def test_progress_is_told_up_to_the_end(tmp_path, tokenizer):
    calls = Calls()
    load_corpus(ListPairs([("a", "b")] * (CHUNK + 3)), tokenizer, str(tmp_path), progress=calls)
    assert calls == [(CHUNK, CHUNK + 3), (CHUNK + 3, CHUNK + 3)]


class Unreadable(ListPairs):
    """Text that must not be read before pair `limit`, and fails there with `error`."""

    error: BaseException = AssertionError("the text was read")
    limit = 0

    def __getitem__(self, index):
        if index >= self.limit:
            raise self.error
        return super().__getitem__(index)


def test_a_second_load_reads_the_cache_and_not_the_text(tmp_path, tokenizer):
    first, second = Calls(), Calls()
    load_corpus(PAIRS, tokenizer, str(tmp_path), progress=first)
    corpus = load_corpus(Unreadable(PAIRS), tokenizer, str(tmp_path), progress=second)
    assert first
    assert not second
    assert_holds(corpus, PAIRS, tokenizer)


def test_a_corpus_is_memory_mapped_and_read_only(tmp_path, tokenizer):
    corpus = load_corpus(PAIRS, tokenizer, str(tmp_path))
    for array in (corpus.source.ids, corpus.source.offsets, corpus.target.ids, corpus.target.offsets):
        assert isinstance(array, np.memmap)
        assert not array.flags.writeable


def test_another_text_is_another_entry(tmp_path, tokenizer):
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    changed = ListPairs([*PAIRS[:-1], ("something", "else")])
    assert_holds(load_corpus(changed, tokenizer, str(tmp_path)), changed, tokenizer)
    assert len(entries(tmp_path)) == 2


def test_another_tokenizer_is_another_entry(tmp_path, tokenizer):
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    other = Tokenizer.train([text for pair in PAIRS for text in pair], 280)
    assert_holds(load_corpus(PAIRS, other, str(tmp_path)), PAIRS, other)
    assert len(entries(tmp_path)) == 2


def test_other_classes_are_another_entry(tmp_path, tokenizer):
    pairs = ListPairs([("a", "good"), ("b", "new")])
    for names in (["bad", "good", "new"], ["good", "new"]):
        corpus = load_corpus(pairs, tokenizer, str(tmp_path), labels=Classes(names))
        assert [ids[0] for ids in as_lists(corpus.target)] == [
            NUM_SPECIAL + names.index(name) for name in ("good", "new")
        ]


def test_the_ids_of_a_large_vocabulary_are_kept_whole(tmp_path):
    for size in (1 << 16, (1 << 16) + 1):
        ids = np.array([size - 1, 3], np.int32)
        large = SimpleNamespace(
            vocab_size=size, to_json=lambda: "large", encode_flat=lambda lines, ids=ids: (ids, [1, 1])
        )
        corpus = load_corpus(ListPairs([("a", "b"), (str(size), "c")]), large, str(tmp_path))
        assert as_lists(corpus.source) == as_lists(corpus.target) == [[size - 1, END_ID], [3, END_ID]]


def test_another_format_is_another_entry(tmp_path, tokenizer, monkeypatch):
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    monkeypatch.setattr("transformer_flax.data.corpus.FORMAT_VERSION", "another")
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    assert len(entries(tmp_path)) == 2


def test_an_equal_tokenizer_from_a_file_shares_the_entry(tmp_path, tokenizer):
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    load_corpus(Unreadable(PAIRS), Tokenizer.load(tmp_path / "tokenizer.json"), str(tmp_path))
    assert len(entries(tmp_path)) == 1


def test_a_leftover_of_a_killed_process_is_not_taken_for_a_cache(tmp_path, tokenizer):
    program = """if True:
        import resource, signal, sys
        from tests.data.test_corpus import PAIRS, load_corpus, pathlib, Tokenizer
        tokenizer = Tokenizer.load(pathlib.Path(sys.argv[1], "tokenizer.json"))
        # The system kills this process at the 100th byte that it writes to a file.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        load_corpus(PAIRS, tokenizer, sys.argv[1])
        """
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    assert forked.run("-c", program, tmp_path).returncode == -signal.SIGXFSZ
    assert len(entries(tmp_path)) == 1
    assert_holds(load_corpus(PAIRS, tokenizer, str(tmp_path)), PAIRS, tokenizer)


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["source.ids", "target.offsets", "checksums.json"])
@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, pathlib.Path.unlink])
def test_a_damaged_entry_is_noticed_and_made_anew(tmp_path, tokenizer, caplog, name, damage):
    load_corpus(PAIRS, tokenizer, str(tmp_path))
    (folder,) = tmp_path.glob("corpora/*")
    damage(folder / name)
    assert_holds(load_corpus(PAIRS, tokenizer, str(tmp_path)), PAIRS, tokenizer)
    assert f"{folder} is damaged" in caplog.text
    caplog.clear()
    load_corpus(Unreadable(PAIRS), tokenizer, str(tmp_path))
    assert not caplog.records


def test_an_entry_that_cannot_be_read_is_not_deleted_as_damaged(tmp_path, tokenizer, monkeypatch, caplog):
    load_corpus(PAIRS, tokenizer, str(tmp_path))

    def refuse(*arguments, **settings):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(PermissionError):
        load_corpus(PAIRS, tokenizer, str(tmp_path))
    assert not caplog.records
    monkeypatch.undo()
    load_corpus(Unreadable(PAIRS), tokenizer, str(tmp_path))


@pytest.mark.parametrize("times", [1, 40])
def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path, tokenizer, times):
    pairs = ListPairs(PAIRS * times)
    place = rf"{re.escape(str(tmp_path))}.*--config\.data\.cache_dir"
    with pytest.raises(UserError, match=place), files_up_to(100):  # the first file fails half-way
        load_corpus(pairs, tokenizer, str(tmp_path))
    assert entries(tmp_path) == []
    assert_holds(load_corpus(pairs, tokenizer, str(tmp_path)), pairs, tokenizer)


def test_a_cache_directory_that_cannot_be_is_refused(tmp_path, tokenizer):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--config\.data\.cache_dir"):
        load_corpus(PAIRS, tokenizer, str(tmp_path / "file"))


@pytest.mark.parametrize("error", [RuntimeError("bad text"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("limit", [0, 20, CHUNK + 1])
def test_a_failure_while_tokenising_leaves_nothing_behind(tmp_path, tokenizer, error, limit):
    whole = ListPairs([("a", "b"), ("c", "d")] * CHUNK)
    failing = Unreadable(whole)
    failing.limit, failing.error = limit, error
    with pytest.raises(type(error)):
        load_corpus(failing, tokenizer, str(tmp_path))
    assert entries(tmp_path) == []


def test_a_whole_corpus_follows_a_failure(tmp_path, tokenizer):
    failing = Unreadable(PAIRS)
    failing.limit = 20
    with pytest.raises(AssertionError):
        load_corpus(failing, tokenizer, str(tmp_path))
    assert_holds(load_corpus(PAIRS, tokenizer, str(tmp_path)), PAIRS, tokenizer)


def test_two_processes_at_once_share_one_entry(tmp_path, tokenizer):
    def meanwhile(done, of):
        load_corpus(PAIRS, tokenizer, str(tmp_path))

    corpus = load_corpus(PAIRS, tokenizer, str(tmp_path), progress=meanwhile)
    assert_holds(corpus, PAIRS, tokenizer)
    assert len(entries(tmp_path)) == 1


def test_without_a_name_the_cache_is_in_the_user_s_cache_directory(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_corpus(PAIRS, tokenizer, "")
    assert len(entries(tmp_path / "transformer_flax")) == 1
