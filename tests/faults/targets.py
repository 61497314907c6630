"""Readers of files from outside, each as a function of what a file holds."""

import dataclasses
import gzip
import io
import json
import lzma
import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tests.data.make import ListPairs
from tests.faults.mutations import mutate
from tests.training.small import learn, small_config
from transformer_flax.ablation.jobs import Recipe
from transformer_flax.ablation.results import Journal, Result
from transformer_flax.ablation.results import read as read_results
from transformer_flax.ablation.variants import make_variants
from transformer_flax.data.corpus import CHECKSUMS, load_corpus
from transformer_flax.data.text_files import decode_lines, open_text
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.decoding.translator import Translator
from transformer_flax.errors import UserError
from transformer_flax.run import restore
from transformer_flax.special_tokens import NUM_SPECIAL
from transformer_flax.training.averaging import choose
from transformer_flax.training.metrics import read_lines
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.saved_model import load_setup

PAIRS = ListPairs((f"number {n}", f"die Nummer {n}") for n in range(3))
SENTENCES = ["number 3 <end>", "", "🜁 die  Nummer\n"]
RUN = "run"  # where `learn` puts it
TOKENIZER = Tokenizer.train([text for pair in PAIRS for text in pair], 270)


class Target:
    """A reader, and the files that it reads.

    An input is the name of one of them, a line break, and what stands in it instead.

    Args:
      folder: for them alone.
    """

    pattern = "**/*"  # of the files that are changed

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.prepare()
        found = sorted(file for file in folder.glob(self.pattern) if file.is_file())
        # A name that is drawn at random is written "*", so that an input serves another folder too.
        self.paths = {re.sub(r"[0-9a-f]{32}", "*", str(file.relative_to(folder))): file for file in found}
        self.files = {name: file.read_bytes() for name, file in self.paths.items()}

    def prepare(self) -> None:
        """Writes the real files."""

    def make(self, rng: random.Random) -> bytes:
        """An input that depends on the generator alone."""
        name = rng.choice(list(self.files))
        return name.encode() + b"\n" + mutate(rng, self.files[name], list(self.files.values()))

    def __call__(self, given: bytes) -> str:
        """Reads the files, one of them as it is given: what became of it, in a word.

        Raises:
          AssertionError: what was read is not what its readers rely on.
          Exception: a defect.
        """
        name, _, content = given.partition(b"\n")
        changed = self.paths[name.decode()]
        changed.write_bytes(content)
        try:
            return self.read(changed)
        except UserError as error:
            return "refused" if len(str(error)) > 20 else "refused without a word"
        finally:
            self.repair(name.decode())

    def repair(self, name: str) -> None:
        self.paths[name].write_bytes(self.files[name])

    def read(self, changed: pathlib.Path) -> str:
        raise NotImplementedError


class Config(Target):
    """config.json, up to where parameters would be loaded, and as a run that is resumed looks at it."""

    pattern = "config.json"

    def prepare(self) -> None:
        RunDirectory(self.folder).claim(small_config(), {"train": "abc"}, TOKENIZER)
        run = json.loads((self.folder / "config.json").read_text())
        del run["crc32"]  # which would catch most of what is tried here before it comes further
        (self.folder / "config.json").write_text(json.dumps(run, indent=2))
        (self.folder / "checkpoints/3/state").mkdir(parents=True)

    def read(self, changed: pathlib.Path) -> str:
        place = RunDirectory(self.folder)
        config, tokenizer, _ = load_setup(place)
        choose(place.checkpoints, config)
        Translator([], None, tokenizer, **config.decode)
        place.load_fingerprints()
        try:
            place.check(small_config(), {"train": "abc"})
        except UserError:
            return "read, another run's"
        return "read"


class Tokens(Target):
    """tokenizer.json, and the use of what is read of it."""

    def prepare(self) -> None:
        (self.folder / "tokenizer.json").write_text(TOKENIZER.to_json(), encoding="utf-8")

    def read(self, changed: pathlib.Path) -> str:
        tokenizer = Tokenizer.load(changed)
        same = True
        for text, ids in zip(SENTENCES, tokenizer.encode(SENTENCES), strict=True):
            assert all(NUM_SPECIAL <= i < tokenizer.vocab_size for i in ids)
            same = tokenizer.decode(ids) == text and same
        return "read" if same else "read, one that loses something"


class Metrics(Target):
    """metrics.jsonl."""

    def prepare(self) -> None:
        lines = [{"step": n // 2, "seconds": n / 7, "valid/bleu": n / 3, "train/loss": float("nan")} for n in range(5)]
        (self.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def read(self, changed: pathlib.Path) -> str:
        lines = read_lines(changed)
        assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
        drawn = [(line["seconds"] / 60, value / 1) for line in lines for name, value in line.items() if "/" in name]
        assert all(isinstance(x + y, float) for x, y in drawn)
        return "read"


class Results(Target):
    """results.jsonl, without the checksums, which would catch most of what is tried here before it comes further."""

    def prepare(self) -> None:
        head = {"config": {"steps": 9, "model.dropout": 0.1}, "name": "a", "command": "b", "versions": {"jax": "1"}}
        lines = [head | {"hardware": "c", "commit": ""}]
        scores = {"perplexity": 2.5, "bleu": 0.0, "exact_match": 0.5}
        for seed, status in enumerate(["finished", "failed", "finished"]):
            kept = {"valid": scores, "test": scores} if status == "finished" else {}
            result = Result(
                f"E ü={seed}",
                "E",
                {"a.b": 1},
                seed,
                status,
                "",
                5,
                1e9,
                9,
                1.5,
                kept,
                "nrefs:1",
                [[9, 1.5, 2.5, 0.0, 0.5]],
            )
            lines.append(dataclasses.asdict(result))
        (self.folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def read(self, changed: pathlib.Path) -> str:
        head, results = read_results(changed)
        assert isinstance(head["config"], dict)
        for result in results:
            assert result.seconds + result.flops + result.parameters + result.steps + result.seed >= 0
            assert (
                not result.finished or result.scores["valid"]["perplexity"] + result.scores["valid"]["bleu"] is not None
            )
            assert all(isinstance(sum(point), (int, float)) for point in result.curve)
        assert [*Journal(changed, head).results.values()] == results or results != results  # NaN is not itself
        return "read"


class Variants(Target):
    """A file of variants, up to where they would be trained."""

    def prepare(self) -> None:
        text = 'wide = {model.d_ff = 512, row = "E", label_smoothing = 0}\n[many]\nmodel.pre_norm = true\n'
        (self.folder / "mine.toml").write_text(f'{text}data.tokenizer = "bpe"\n')

    def read(self, changed: pathlib.Path) -> str:
        base = small_config()
        made = make_variants(base, "", file=changed)
        Recipe("config.py", base, {}, self.folder).trials(made, seeds=1)
        assert all(variant.config.to_json() for variant in made)
        return "read"


class Text(Target):
    """Texts, plain and packed."""

    def prepare(self) -> None:
        text = "".join(f"{source}\r\n{target} ü\n" for source, target in PAIRS).encode()
        (self.folder / "valid.en").write_bytes(text)
        (self.folder / "valid.en.gz").write_bytes(gzip.compress(text, mtime=0) + gzip.compress(b"more\n", mtime=0))
        (self.folder / "valid.en.xz").write_bytes(lzma.compress(text) + lzma.compress(b"more\n"))

    def read(self, changed: pathlib.Path) -> str:
        spoilt: list[str] = []
        with open_text(changed) as stream:
            lines = list(decode_lines(stream, str(changed), spoilt=spoilt))
        "".join(lines).encode()  # no half characters
        assert not any(line.endswith(("\r", "\n")) for line in lines)
        return "read, not all UTF-8" if spoilt else "read"


class Cache(Target):
    """Tokenised text in the cache."""

    def prepare(self) -> None:
        corpus = load_corpus(PAIRS, TOKENIZER, str(self.folder))
        # Lists, for the arrays are what the files hold, and become what is written there.
        self.truth = [side.offsets.tolist() for side in (corpus.source, corpus.target)]
        self.truth += [side.ids.tolist() for side in (corpus.source, corpus.target)]
        (self.entry,) = self.folder.glob("corpora/*")

    def make(self, rng: random.Random) -> bytes:
        arrays = {name: content for name, content in self.files.items() if name.endswith(".npy")}
        if rng.random() < 0.2:
            name = next(name for name in self.files if name.endswith(CHECKSUMS))
            return name.encode() + b"\n" + mutate(rng, self.files[name])
        name = rng.choice(list(arrays))
        array = np.load(io.BytesIO(arrays[name])).copy()
        if rng.random() < 0.5:
            array[rng.randrange(len(array))] = rng.choice([0, 1, 2, 3, 269, 270, 65535, int(array[0]), int(array[-1])])
            stream = io.BytesIO()
            np.save(stream, array.astype(rng.choice([array.dtype, np.int32, np.float64, np.int64, np.complex64])))
            return name.encode() + b"\n" + stream.getvalue()
        return name.encode() + b"\n" + mutate(rng, arrays[name], list(arrays.values()))

    def repair(self, name: str) -> None:
        for name in self.files:  # what was made anew is not the original in everything
            super().repair(name)

    def read(self, changed: pathlib.Path) -> str:
        (mark := self.entry / "mark").touch()
        corpus = load_corpus(PAIRS, TOKENIZER, str(self.folder))
        sentences = (corpus.source, corpus.target)
        every = np.arange(len(PAIRS))
        tokens = [side.tokens(every, side.lengths_of(every)).tolist() for side in sentences]
        assert [side.offsets.tolist() for side in sentences] + tokens == self.truth
        return "read" if mark.exists() else "made anew"


class Checkpoint(Target):
    """Every file of a checkpoint, read as parameters."""

    pattern = f"{RUN}/checkpoints/200/**/*"

    def prepare(self) -> None:
        if not (self.folder / RUN).exists():
            learn(self.folder)
        self.truth = _leaves(restore(self.folder / RUN, average=1).params)

    def read(self, changed: pathlib.Path) -> str:
        leaves = _leaves(restore(self.folder / RUN, average=1).params)
        same = all(np.array_equal(ours, true, equal_nan=True) for ours, true in zip(leaves, self.truth, strict=True))
        return "read" if same else "read, other parameters"


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


CHEAP: dict[str, Callable[[pathlib.Path], Target]] = {
    "config": Config,
    "tokenizer": Tokens,
    "metrics": Metrics,
    "results": Results,
    "variants": Variants,
    "text": Text,
    "cache": Cache,
}
TARGETS = CHEAP | {"checkpoint": Checkpoint}
