import gzip
import lzma
import re

import pytest

from tests.data.make import data_config
from transformer_flax.data.sources import load_pairs
from transformer_flax.errors import UserError

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
ENGLISH = ["A dog runs.", "", "  Two  dogs  sleep. ", "It's naïve 🐕"]
GERMAN = ["Ein Hund rennt.", "", "Zwei Hunde schlafen.", "Größe"]


def write(folder, split="train", *, suffix="", en=ENGLISH, de=GERMAN):
    """Writes both sides of a split; a side is lines, or raw bytes."""
    folder.mkdir(exist_ok=True, parents=True)
    for language, side in (("en", en), ("de", de)):
        content = side if isinstance(side, bytes) else "".join(f"{line}\n" for line in side).encode()
        (folder / f"{split}.{language}{suffix}").write_bytes(COMPRESS[suffix](content))
    return folder


def read(folder, split="train", **fields):
    return load_pairs(data_config(source="folder", path=str(folder), **fields), split)


def as_list(pairs):
    return pairs.read(range(len(pairs)))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_line_n_of_one_file_goes_with_line_n_of_the_other(tmp_path, suffix):
    assert as_list(read(write(tmp_path, suffix=suffix))) == list(zip(ENGLISH, GERMAN, strict=True))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_each_split_has_its_files(tmp_path, split):
    for other in ("train", "valid", "test"):
        write(tmp_path, other, en=[f"en {other}"], de=[f"de {other}"])
    assert as_list(read(tmp_path, split)) == [(f"en {split}", f"de {split}")]


def test_a_share_of_train_is_held_out_where_there_are_no_files_of_valid(tmp_path):
    pairs = [(f"en {i % 400}", f"de {i}") for i in range(1000)]  # most sources more than once
    write(tmp_path, en=[en for en, _ in pairs], de=[de for _, de in pairs])
    write(tmp_path, "test", en=[f"test {i}" for i in range(100)], de=["x"] * 100)
    train, valid = (read(tmp_path, split, held_out=0.2) for split in ("train", "valid"))
    assert sorted(as_list(train) + as_list(valid)) == sorted(pairs)
    assert not {source for source, _ in as_list(train)} & {source for source, _ in as_list(valid)}
    assert len(valid) == pytest.approx(200, abs=50)
    assert as_list(read(tmp_path, "test", held_out=0.2)) == as_list(read(tmp_path, "test"))
    assert as_list(read(tmp_path, held_out=0.2, num_pairs=5)) == as_list(train)[:5]
    assert as_list(read(tmp_path, "valid", held_out=0.2, seed=1)) != as_list(valid)
    assert len({pairs.fingerprint for pairs in (train, valid, read(tmp_path), read(tmp_path, held_out=0.1))}) == 4


def test_a_valid_split_is_either_files_or_held_out(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"has no valid\.en .*; --config\.data\.held_out=0\.1 keeps a tenth of train"):
        read(tmp_path, "valid")
    write(tmp_path, "valid")
    with pytest.raises(UserError, match=r"held_out is 0\.1, so \S+valid\.en would never be read"):
        read(tmp_path, held_out=0.1)


def test_the_languages_choose_the_sides(tmp_path):
    backward = read(write(tmp_path), source_language="de", target_language="en")
    assert as_list(backward) == list(zip(GERMAN, ENGLISH, strict=True))


def test_the_two_sides_may_be_compressed_differently(tmp_path):
    write(tmp_path, suffix=".gz")
    (tmp_path / "train.de.gz").unlink()
    (tmp_path / "train.de").write_text("".join(f"{line}\n" for line in GERMAN), encoding="utf-8")
    assert as_list(read(tmp_path)) == list(zip(ENGLISH, GERMAN, strict=True))


def test_a_file_is_read_in_place_of_its_compressed_copy(tmp_path):
    write(tmp_path, suffix=".gz", en=["older"], de=["älter"])
    assert as_list(read(write(tmp_path, en=["newer"], de=["neuer"]))) == [("newer", "neuer")]


def test_text_is_normalised_on_request_in_the_language_of_its_side(tmp_path):
    write(tmp_path, en=["It's Prof. Smith's dog."], de=["Ein „Hund“, z.B. rot-weiß."])
    assert as_list(read(tmp_path, lowercase=True)) == [("it's prof. smith's dog.", "ein „hund“, z.b. rot-weiß.")]
    both = read(tmp_path, lowercase=True, tokenized=True)
    assert as_list(both) == [("it &apos;s prof. smith &apos;s dog .", "ein &quot; hund &quot; , z.b. rot-weiß .")]
    assert as_list(both.raw) == as_list(read(tmp_path))


def test_text_that_is_normalised_otherwise_has_another_fingerprint(tmp_path):
    write(tmp_path)
    normalised = [{}, {"lowercase": True}, {"tokenized": True}, {"lowercase": True, "tokenized": True}]
    assert len({read(tmp_path, **fields).fingerprint for fields in normalised}) == 4
    # As before there were the fields, so that old caches and runs stay valid.
    known = "64bd9917a2fe668151676ba307f8a7c40396ed9e3b3ea3a8e69e1601b9640619"
    assert read(tmp_path).fingerprint == known
    known = "c57c4f7e603ed69aaa64aba201a2c6ab2a022670a63e68d90e190c3a969796cb"
    assert read(tmp_path, lowercase=True).fingerprint == known


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_the_fingerprint_is_of_the_text_not_of_its_file(tmp_path, suffix):
    plain = read(write(tmp_path / "here"))
    assert read(write(tmp_path / "there" / "deeper", suffix=suffix)).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        {"en": [*ENGLISH[:-1], "It's naive 🐕"]},
        {"de": [*GERMAN[:-1], "Grösse"]},
        {"en": ENGLISH[::-1]},
        {"en": GERMAN, "de": ENGLISH},
        {"en": ENGLISH[:-1], "de": GERMAN[:-1]},
        {"en": ["A dog", " runs.", *ENGLISH[2:]]},
        {"en": [ENGLISH[0] + " ", *ENGLISH[1:]]},
    ],
    ids=["source", "target", "order", "sides", "fewer", "line end", "space"],
)
def test_the_fingerprint_changes_with_the_text(tmp_path, changed):
    assert read(write(tmp_path / "a")).fingerprint != read(write(tmp_path / "b", **changed)).fingerprint


@pytest.mark.parametrize("suffix", COMPRESS)
def test_windows_line_ends_do_not_matter(tmp_path, suffix):
    windows = {"en": "\r\n".join(ENGLISH).encode() + b"\r\n", "de": "\r\n".join(GERMAN).encode() + b"\r\n"}
    pairs = read(write(tmp_path / "windows", suffix=suffix, **windows))
    assert as_list(pairs) == list(zip(ENGLISH, GERMAN, strict=True))
    assert pairs.fingerprint == read(write(tmp_path / "unix")).fingerprint


def test_the_last_line_needs_no_end(tmp_path):
    assert as_list(read(write(tmp_path, en=b"one\ntwo", de=b"eins\nzwei\n"))) == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("separator", list("\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r"), ids=ascii)
def test_only_newlines_end_a_line(tmp_path, separator, suffix):
    """str.splitlines and text files in Python split at these, and would put the two sides out of step."""
    line = f"one{separator}two"
    assert as_list(read(write(tmp_path, suffix=suffix, en=[line, "x"], de=["eins", "y"]))) == [
        (line, "eins"),
        ("x", "y"),
    ]


def test_empty_files_are_a_split_of_no_pairs(tmp_path):
    assert as_list(read(write(tmp_path, en=[], de=[]))) == []


def test_an_empty_path_is_refused():
    with pytest.raises(UserError, match=r"config\.data\.path is empty.*--config\.data\.path="):
        read("")


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=re.escape(f"config.data.path is '{tmp_path / 'nowhere'}'")):
        read(tmp_path / "nowhere")


def test_a_missing_split_is_refused_with_what_is_there(tmp_path):
    write(tmp_path)
    write(tmp_path, "test", suffix=".gz")
    with pytest.raises(UserError, match=r"valid\.en.*test\.de\.gz, test\.en\.gz, train\.de, train\.en"):
        read(tmp_path, "valid")
    (tmp_path / "test.en.gz").unlink()
    with pytest.raises(UserError, match=r"test\.en.*; to train without a test split, set --config\.eval\.test=False$"):
        read(tmp_path, "test")


@pytest.mark.parametrize("field", ["source_language", "target_language"])
def test_a_missing_language_is_refused_with_what_is_there_and_how_to_name_another(tmp_path, field):
    languages = "fr and de" if field == "source_language" else "en and fr"
    message = (
        r"has no train\.fr .*; it holds train\.de, train\.en; config\.data\.source_language and target_language are "
        rf"{languages}; --languages=SOURCE-TARGET sets both$"
    )
    with pytest.raises(UserError, match=message):
        read(write(tmp_path), **{field: "fr"})


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing"):
        read(tmp_path)


def test_sides_of_unequal_length_are_refused_with_both_counts_and_names(tmp_path):
    with pytest.raises(UserError, match=r"train\.en has 1,234 lines and .*train\.de has 3:"):
        read(write(tmp_path, en=["x"] * 1234, de=["y"] * 3))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_that_is_not_utf8_is_refused_with_file_and_line(tmp_path, suffix):
    latin1 = "eins\nzwei\nfünf\nsechs\n".encode("latin-1")
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'train.de'}{suffix}, line 3: not UTF-8")):
        read(write(tmp_path, suffix=suffix, de=latin1))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_truncated_file_is_refused(tmp_path, suffix, keep):
    lines = [str(i * i) for i in range(1000)]
    whole = (write(tmp_path, suffix=suffix, en=lines, de=lines) / f"train.en{suffix}").read_bytes()
    (tmp_path / f"train.en{suffix}").write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(UserError, match=rf"train\.en{suffix} is damaged after line"):
        read(tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, suffix):
    write(tmp_path, suffix=suffix)
    (tmp_path / f"train.en{suffix}").write_bytes(b"A dog runs.\n" * 4)
    with pytest.raises(UserError, match=rf"train\.en{suffix} is damaged after line 0"):
        read(tmp_path)


@pytest.mark.parametrize(
    "suffix",
    [
        ".gz",
        ".xz",
    ],
)
def test_a_file_with_damage_behind_its_header_is_refused(tmp_path, suffix):
    lines = [str(i * i) for i in range(1000)]
    whole = (write(tmp_path, suffix=suffix, en=lines, de=lines) / f"train.en{suffix}").read_bytes()
    header = {".gz": 10, ".xz": 24}[suffix]
    (tmp_path / f"train.en{suffix}").write_bytes(whole[:header] + b"\xff" * (len(whole) - header))
    with pytest.raises(UserError, match=rf"train\.en{suffix} is damaged after line"):
        read(tmp_path)


def test_an_unknown_source_is_refused_with_those_there_are():
    with pytest.raises(UserError, match=r"config\.data\.source is 'web'.*numbers, copy, reverse, folder, tsv, tfds"):
        load_pairs(data_config(source="web"), "train")


def test_the_first_pairs_of_train_alone_may_be_taken(tmp_path):
    every = list(zip(ENGLISH, GERMAN, strict=True))
    for split in ("train", "valid"):
        write(tmp_path, split)
    first = read(tmp_path, num_pairs=3)
    assert as_list(first) == every[:3]
    assert as_list(read(tmp_path, "valid", num_pairs=3)) == as_list(read(tmp_path)) == every
    fingerprints = {read(tmp_path, num_pairs=count).fingerprint for count in (0, 1, 2)}
    assert len(fingerprints) == 3
    with pytest.raises(UserError, match=r"num_pairs is 5; the train split has 4 pairs"):
        read(tmp_path, num_pairs=5)


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(UserError, match=r"'dev'.*train, valid, test"):
        read(write(tmp_path), "dev")


def test_numbers_are_a_source():
    pairs = load_pairs(data_config(source="numbers", num_pairs=1_000), "train")
    assert pairs.read([21]) == [("twenty-one", "einundzwanzig")]
