"""`python -m transformer_flax.translate` as a user meets it: lines, pipes, a terminal, and mistakes."""

import gzip
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest

import transformer_flax
from tests import forked
from tests.commands.process import PATIENCE, refused, run, started, succeeds, wait_for_output
from tests.conftest import ROOT
from tests.training.small import copied
from transformer_flax.data.text_files import open_text
from transformer_flax.decoding.settings import Sampling
from transformer_flax.line_io import _count_lines

# Each begins with a digit of its own, so that a model of 200 steps tells them apart on any machine.
LINES = ["siebenhundert", "", "einhundert", "fünfhundertdreizehn", "neunzehn"]
RESTORE = """
from absl import flags
from transformer_flax import translate
flags.FLAGS(["translate", "--workdir={}"])
run, _ = translate.RESTORE()
"""  # as the command does
TEXT = "".join(f"{line}\n" for line in LINES)


@pytest.fixture(scope="module")
def restored(finished):
    return transformer_flax.restore(finished)


@pytest.fixture(scope="module")
def expected(restored):
    """The translations of LINES."""
    translations = restored.translate(LINES)
    assert len(set(translations)) == len(LINES)
    return translations


@pytest.fixture
def file(tmp_path):
    def file(name: str, content: str | bytes = TEXT):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return file


# What it puts out


def test_each_line_of_standard_input_gives_one_of_standard_output(finished, expected):
    # Line ends of Windows, and none at the very end.
    result = succeeds("translate", f"--workdir={finished}", given=TEXT.replace("\n", "\r\n").removesuffix("\r\n"))
    assert result.stdout == "".join(f"{line}\n" for line in expected)
    first, summary = result.stderr.splitlines()
    assert first == "numbers: the mean of the parameters at steps 150, 200"
    assert re.fullmatch(r"5 lines in \d+ seconds?, [\d.]+ a second; 1 compilations?", summary)


def test_compiled_searches_are_kept_in_the_users_cache(finished, tmp_path):
    code = f"import jax; jax.config.update('jax_compilation_cache_dir', None)\n{RESTORE.format(finished)}"
    result = forked.run("-c", f"{code}print(run.translate(['one']))", XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("transformer_flax/compiled/*/*-cache"))) > 0


def test_the_cores_of_a_cpu_are_devices_that_share_the_lines(finished):
    code = RESTORE.format(finished) + "print(run.translator().num_devices)"
    assert forked.run("-c", code, JAX_NUM_CPU_DEVICES="-1").stdout == f"{min(len(os.sched_getaffinity(0)), 4)}\n"
    assert forked.run("-c", code, JAX_NUM_CPU_DEVICES="3").stdout == "3\n"


def test_files_become_an_n_best_list_with_a_prefix_for_each_line(finished, restored, file, tmp_path):
    first, second = file("1.txt", "siebenhundert\n\n"), file("2.txt", "fünfhundertdreizehn\neinhundert\n")
    prefixes = ["one", "", "six hundred", ""]
    beside = file("prefixes.txt", "".join(f"{prefix}\n" for prefix in prefixes))
    (tmp_path / "out.txt").write_text("an older output, which goes\n" * 100)
    options = [f"--workdir={finished}", "--nbest=2", f"--prefix_file={beside}", f"--output={tmp_path / 'out.txt'}"]
    result = succeeds("translate", *options, first, second)
    assert result.stdout == ""
    rows = [line.split(" ||| ") for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert [int(row[0]) for row in rows] == [0, 0, 1, 2, 2, 3, 3]  # an empty line has one translation
    lines = ["siebenhundert", "", "fünfhundertdreizehn", "einhundert"]
    found = [t for best in restored.translator(nbest=2).search(lines, prefixes=prefixes) for t in best]
    for (number, text, features, score), translation in zip(rows, found, strict=True):
        assert text == translation.text
        assert text.startswith(prefixes[int(number)])
        name, log_prob = features.split(" ")
        assert name == "log_prob="
        assert float(log_prob) == pytest.approx(translation.log_prob, abs=1e-3)
        assert float(score) == pytest.approx(translation.score, abs=1e-3)
    for better, worse in itertools.pairwise(rows):
        assert better[0] != worse[0] or float(better[3]) >= float(worse[3])


def test_scores_stand_before_translations_and_settings_are_those_of_the_flags(finished):
    settings = {"beam_size": 1, "length_penalty": "length", "alpha": 1.0, "min_length": 6, "max_extra_length": 0}
    options = ["--average=1", "--scores", "--prefix=two", *(f"--{name}={value}" for name, value in settings.items())]
    result = succeeds("translate", f"--workdir={finished}", *options, given=TEXT)
    assert result.stderr.startswith("numbers: the parameters of step 200\n")
    found = transformer_flax.restore(finished, average=1).translator(**settings).search(LINES, prefixes="two")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    for (score, text), (best,) in zip(rows, found, strict=True):
        assert text == best.text
        assert float(score) == pytest.approx(best.score, abs=1e-3)
    assert rows[0][1].startswith("two")


def test_samples_are_those_of_their_seed(finished, restored):
    options = [f"--workdir={finished}", "--sample", "--temperature=2", "--top_k=50", "--top_p=0.95", "--seed=3"]
    result = succeeds("translate", *options, "--nbest=3", "--output=/dev/stdout", given=TEXT)  # a pipe, no file
    drawn = restored.translator(sampling=Sampling(2.0, 50, 0.95, seed=3), nbest=3).search(LINES)
    texts = [translation.text for translations in drawn for translation in translations]
    assert [line.split(" ||| ")[1] for line in result.stdout.splitlines()] == texts
    assert len(set(texts)) > 10


def test_given_translations_are_scored_by_an_ensemble_of_checkpoints(finished, file, tmp_path):
    lower = copied(finished, tmp_path / "lower", lowercase=True)  # reads all text in lower case
    # The third is longer than any output, and cut.
    targets = ["Seven Hundred", "", "one hundred " * 40, "five hundred and thirteen", "<end> ü|"]
    beside = file("targets.txt", "\n".join(targets))
    options = [f"--workdir={lower}@150", f"--workdir={lower}@200", f"--target={beside}"]
    result = succeeds("translate", *options, file("in.txt"))
    assert result.stderr.startswith("numbers + numbers: the parameters of step 150; the parameters of step 200\n")
    both = transformer_flax.restore(lower, steps=[150]).ensemble(transformer_flax.restore(lower, steps=[200]))
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    for (total, each, pieces), target, scores in zip(rows, targets, both.score(LINES, targets), strict=True):
        log_probs = [float(x) for x in each.split(" ")]
        assert log_probs == pytest.approx(scores, abs=2e-3)
        assert float(total) == pytest.approx(sum(log_probs), abs=1e-3)
        assert pieces.split(" ") == both.tokenizer.pieces(target.lower())[: len(scores)]
        assert pieces.endswith("<end>") == (len(target) < 100)


def test_odd_lines_are_translated_with_a_warning(finished, restored, file):
    odd = [b"siebenhundert\xff", b"einhundert " * 20, b"\xc3", b"acht"]
    result = succeeds("translate", f"--workdir={finished}", file("in.txt", b"\n".join(odd)))
    assert result.stdout.splitlines() == restored.translate(line.decode(errors="replace") for line in odd)
    of_bytes, of_length = (line for line in result.stderr.splitlines() if line.startswith("WARNING: "))
    assert "UTF-8" in of_bytes
    assert "line 1" in of_bytes
    assert re.search(r"\b2 lines\b", of_bytes)
    assert of_length == "WARNING: 1 of 4 lines were cut to 40 tokens"


# Pipes, interruptions, terminals


def test_lines_come_as_they_are_put_in_and_an_interruption_ends_quietly(finished, expected):
    with started("translate", f"--workdir={finished}", "--window=1", stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        for line, translation in zip(LINES[:3], expected, strict=False):
            process.stdin.write(f"{line}\n".encode())
            wait_for_output(process.stdout)  # while the input is still open
            assert process.stdout.readline().decode() == f"{translation}\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out == b""
    assert err.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in err


def test_a_reader_that_has_had_enough_is_no_error(finished, expected, file):
    options = [f"--workdir={finished}", "--window=1", file("in.txt", TEXT * 200)]
    with started("translate", *options, stdout=PIPE, stderr=PIPE) as process:
        wait_for_output(process.stdout)
        assert process.stdout.readline().decode() == f"{expected[0]}\n"
        process.stdout.close()  # as `| head -1` does
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 141
    assert err.decode().splitlines() == ["numbers: the mean of the parameters at steps 150, 200"]


def test_a_terminal_is_a_prompt(finished, restored, expected):
    terminal, theirs = pty.openpty()
    shown = b""

    def wait_for(text: str) -> None:
        nonlocal shown
        while text.encode() not in shown:
            wait_for_output(terminal)
            try:
                shown += os.read(terminal, 1000)
            except OSError:  # nobody is at the other end any more
                pytest.fail(process.stderr.read().decode())
        shown = shown.split(text.encode(), 1)[1]

    with started("translate", f"--workdir={finished}", stdin=theirs, stdout=theirs, stderr=PIPE) as process:
        os.close(theirs)
        (odd,) = restored.translate(["sieben\ufffdhundert"])
        for line, translation in ((LINES[0].encode(), expected[0]), (b"sieben\xffhundert", odd)):
            wait_for("> ")
            os.write(terminal, line + b"\n")
            wait_for(f"{translation}\r\n")
        wait_for("> ")
        os.write(terminal, b"\x04")  # Ctrl-D
        _, err = process.communicate(timeout=PATIENCE)
    os.close(terminal)
    assert process.returncode == 0
    assert err.decode().splitlines() == ["numbers: the mean of the parameters at steps 150, 200", ""]


# What the user can get wrong


def test_help_tells_of_usage_and_every_flag():
    told = run("translate", "--help").stdout
    assert "python -m transformer_flax.translate --workdir=runs/base [FILE ...] < in.txt > out.txt" in told
    for flag in (
        "workdir",
        "average",
        "beam_size",
        "nbest",
        "target",
        "[no]scores",
        "prefix_file",
        "[no]sample",
        "long",
    ):
        assert f"  --{flag}:" in told
    assert "--config" not in told


# A run that is not there shows that these are told before it is looked for.
NOWHERE = "--workdir=/nowhere"


def test_a_flag_that_is_switched_off_is_as_if_it_were_not_there():
    assert "there is no directory /nowhere" in refused("translate", NOWHERE, "--nosample", "--beam_size=2")
    assert "--beam_size has no effect with --sample" in refused("translate", NOWHERE, "--sample", "--beam_size=2")


@pytest.mark.parametrize(("flag", "pipe"), [("--target", False), ("--prefix_file", True)])
def test_a_file_beside_the_input_must_be_as_long(file, flag, pipe):
    beside = file("two.txt", "a\nb\n")
    given = {"given": TEXT} if pipe else {}
    message = refused("translate", NOWHERE, f"{flag}={beside}", *([] if pipe else [file("in.txt")]), **given)
    assert message == f"{beside} has 2 lines and the input has 5: line N of one must belong to line N of the other"


@pytest.mark.parametrize("arguments", [["no.txt"], ["--target=no.txt"], ["--prefix_file=no.txt"]], ids=str)
def test_a_file_that_is_not_there_is_named(arguments):
    assert refused("translate", NOWHERE, *arguments) == "No such file or directory: no.txt"


def test_a_place_that_cannot_be_written_is_told_of_before_any_work(tmp_path):
    message = refused("translate", NOWHERE, f"--output={tmp_path / 'no/out.txt'}")
    assert message == f"No such file or directory: {tmp_path / 'no/out.txt'}"


def test_a_full_disk_is_named_by_the_output(finished, file):
    message = refused("translate", f"--workdir={finished}", "--output=/dev/full", file("in.txt"))
    assert message == "No space left on device: /dev/full"


def test_an_output_is_not_emptied_for_nothing(finished, file):
    kept = file("out.txt", "the work of a day\n")
    refused("translate", NOWHERE, f"--output={kept}", file("in.txt"))
    assert kept.read_text() == "the work of a day\n"
    assert str(kept) in refused("translate", NOWHERE, f"--output={kept}", kept)
    with kept.open("rb") as given, started("translate", NOWHERE, f"--output={kept}", stdin=given, stderr=PIPE) as same:
        assert str(kept) in same.communicate(timeout=PATIENCE)[1].decode()
    for flag in ("--target", "--prefix_file"):
        options = (NOWHERE, f"--output={kept}", f"{flag}={kept}", file("in.txt"))
        assert refused("translate", *options) == f"{kept} is an input; write to another file"
    refused("translate", f"--workdir={finished}", "--long=refuse", f"--output={kept}", given="einhundert " * 20)
    assert kept.read_text() == "the work of a day\n"
    succeeds("translate", f"--workdir={finished}", f"--output={kept}", given="")
    assert kept.read_text() == ""


@pytest.mark.parametrize("flag", ["--target", "--prefix_file"])
def test_a_line_that_is_not_utf_8_is_refused_on_request(file, flag):
    bad = file("bad.txt", b"siebenhundert\nz\xffig\n")
    message = refused("translate", NOWHERE, "--invalid=refuse", f"{flag}={bad}", bad)
    assert message == f"{bad}, line 2: not UTF-8 (invalid start byte at byte 1)"


def test_a_line_that_is_too_long_is_refused_on_request(finished, expected, file):
    options = [f"--workdir={finished}", "--window=1", "--long=refuse"]
    message = refused("translate", *options, given="siebenhundert\n" + "einhundert " * 20, out=f"{expected[0]}\n")
    assert re.fullmatch(r"line 2 has \d+ tokens and at most 40 are taken; .*max_input_length", message)


def test_settings_that_do_nothing_are_refused(file):
    assert "--sample" in refused("translate", NOWHERE, "--top_p=0.9", file("in.txt"))
    assert "--min_length" in refused("translate", NOWHERE, f"--target={file('in.txt')}", "--min_length=5")


def test_compressed_text_and_the_mark_of_an_editor_are_read_as_the_plain_text(finished, expected, tmp_path):
    compressed = tmp_path / "in.txt.gz"
    compressed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + TEXT.encode()))
    result = succeeds("translate", f"--workdir={finished}", str(compressed))
    assert result.stdout.splitlines() == expected
    compressed.write_bytes(compressed.read_bytes()[:30])
    assert "in.txt.gz is damaged" in refused("translate", NOWHERE, f"--target={compressed}", str(compressed))


def test_a_run_in_place_of_a_text_is_told_how_to_be_named(tmp_path):
    assert f"--workdir={tmp_path}" in refused("translate", NOWHERE, str(tmp_path))


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-"])
def test_closed_streams_are_no_defect(closed):
    line = f"exec {sys.executable} -m transformer_flax.translate --workdir=nowhere {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: there is no directory nowhere\n")


def test_lines_are_counted_for_the_bar_and_none_of_them_is_lost(tmp_path):
    (tmp_path / "text").write_text("one\ntwo\nthree")
    (tmp_path / "whole.gz").write_bytes(gzip.compress(b"four\n" * 9))
    (tmp_path / "cut.gz").write_bytes((tmp_path / "whole.gz").read_bytes()[:-12])
    text, whole, cut = (open_text(tmp_path / name) for name in ("text", "whole.gz", "cut.gz"))
    assert text.readline() == b"one\n"
    assert _count_lines([text, whole]) == 2 + 9
    assert (text.read(), whole.read()) == (b"two\nthree", b"four\n" * 9)
    assert _count_lines([cut]) is None  # it is refused when it is read
    read_end, write_end = os.pipe()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert _count_lines([pipe]) is None
