"""Word vectors: python -m transformer_flax.vectors train | nearest | plot [--FLAG=VALUE ...] [WORD ...].

    python -m transformer_flax.vectors train --config=configs/vectors.py --config.data.path=FOLDER --output=vectors/NAME
    python -m transformer_flax.vectors nearest --vectors=vectors/NAME dog Hund
    python -m transformer_flax.vectors plot --vectors=vectors/NAME --output=plane.png [WORD ...]

`nearest` takes words from the command line, or from standard input, one a line. It prints a line for each neighbour:
the word, the neighbour and their cosine, separated by tabs. It warns of a word without a vector. `plot` draws the given
words, or the most frequent words.
"""

import logging
import pathlib
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from transformer_flax import cli
from transformer_flax.arguments import define_config
from transformer_flax.data.text_files import decode_lines
from transformer_flax.errors import UserError

if TYPE_CHECKING:
    from transformer_flax.relatives.vector_files import Vectors

CONFIG = define_config("vectors.py", explained_in="vectors.py")
OUTPUT = flags.DEFINE_string("output", None, "write the vectors (a new folder) or the picture here")
VECTORS = flags.DEFINE_string("vectors", None, "the folder of trained vectors")
COUNT = flags.DEFINE_integer("count", 10, "number of neighbours", 1)
LEAST = flags.DEFINE_integer("least", 5, "minimum count of a neighbour in the text", 1)
MOST_FREQUENT = flags.DEFINE_integer("most_frequent", 200, "number of words to draw, if none are given", 3)

logger = logging.getLogger(__name__)


def train() -> None:
    """Trains vectors on the text of the config."""
    output, config = pathlib.Path(_required("output", OUTPUT.value)), CONFIG()
    from transformer_flax.console import Progress, counted, duration
    from transformer_flax.data.corpus import load_corpus
    from transformer_flax.data.sources import load_pairs
    from transformer_flax.files import require_free
    from transformer_flax.relatives.word_vectors import VectorConfig, train_vectors
    from transformer_flax.training.compilation_cache import keep_compiled
    from transformer_flax.training.config_checks import check_text, given_tokenizer
    from transformer_flax.training.config_fields import complete
    from transformer_flax.training.setup import train_tokenizer

    if "vectors" not in config:
        raise UserError("the config has no section config.vectors: start from configs/vectors.py")
    chosen = VectorConfig(**config.vectors)
    config = complete(config)
    check_text(config)
    labelled = config.data.source == "tsv"
    if labelled or config.data.source_language == config.data.target_language:
        where = "with labels" if labelled else "of one language"
        chosen.require("sides", chosen.sides == "source", f"'source' for texts {where}")
    require_free(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryDirectory(dir=output.parent).cleanup()  # an unwritable folder raises an error before the training
    keep_compiled(config.data.cache_dir)
    with Progress() as progress:
        with progress.aside():  # TFDS shows its own bars
            pairs = load_pairs(config.data, "train")
        tokenizer = given_tokenizer(config) or train_tokenizer(pairs, config, progress, sources_only=labelled)
        with progress.bar("tokenising") as update:
            corpus = load_corpus(pairs, tokenizer, config.data.cache_dir, progress=update)
        sides = {"source": corpus.source, "target": corpus.target}
        sides = [sides[chosen.sides]] if chosen.sides in sides else list(sides.values())
        words = sum(len(side.ids) - len(side) for side in sides)
        progress.say(f"{words:,} pieces of a vocabulary of {tokenizer.vocab_size:,}; {chosen.kind}")
        started = time.perf_counter()
        with progress.bar("training") as update:

            def show(epochs: float, loss: float) -> None:
                update(epochs, chosen.epochs, note=f"loss {loss:.3f}")
                if epochs == int(epochs):
                    progress.say(f"epoch {int(epochs)} of {chosen.epochs}: loss {loss:.3f} a word")

            vectors = train_vectors(sides, tokenizer, chosen, config.seed, progress=show)
        vectors.save(output, config.to_dict())
        seconds = time.perf_counter() - started
        progress.say(f"{output}/ after {duration(seconds)}, of {counted(len(vectors.words()), 'word')}")


def nearest(*words: str) -> None:
    """Prints the neighbours of words, and warns of each unknown word."""
    vectors = _load()
    unknown = 0
    for word in words or filter(None, map(str.strip, decode_lines(sys.stdin.buffer, "the input"))):
        try:
            found = vectors.nearest(word, COUNT.value, least=LEAST.value)
        except UserError as error:
            logger.warning(str(error))
            unknown += 1
            continue
        for neighbour, cosine in found:
            print(f"{word}\t{neighbour}\t{cosine:.3f}", flush=True)
    if unknown:
        raise UserError(f"{unknown:,} of the words could not be looked up")


def plot(*words: str) -> None:
    """Draws words in a plane."""
    output = _required("output", OUTPUT.value)
    cli.require_picture("output", output)
    if words:
        cli.refuse_idle(("least", "most_frequent"), "with words")
    vectors = _load()
    names = list(words) or [word for word, _ in vectors.words(LEAST.value)[: MOST_FREQUENT.value]]
    if len(names) < 3:
        raise UserError(f"there are {len(names)} words to draw; give at least 3")
    from transformer_flax.analysis.plots import plot_plane

    plot_plane(names, np.stack([vectors.vector(name) for name in names]), file=output)


def _load() -> "Vectors":
    from transformer_flax.relatives.vector_files import Vectors

    return Vectors.load(pathlib.Path(_required("vectors", VECTORS.value)))


def _required(name: str, value: str | None) -> str:
    if not value:
        raise UserError(f"--{name} is missing: {flags.FLAGS[name].help}")
    return value


VERBS = {"train": train, "nearest": nearest, "plot": plot}
IDLE = {  # flags of the other verbs
    "train": ("vectors", "count", "least", "most_frequent"),
    "nearest": ("output", "most_frequent"),
    "plot": ("count",),
}


def main(verb: str = "", *words: str) -> None:
    if verb not in VERBS:
        said = f"unknown verb {verb!r}" if verb else "the verb is missing"
        raise UserError(f"{said}: python -m transformer_flax.vectors {' | '.join(VERBS)}, see --help")
    if words and verb == "train":
        raise UserError(f"train takes no words: {words[0]!r}")
    cli.refuse_idle(IDLE[verb], f"with {verb}")
    VERBS[verb](*words)


if __name__ == "__main__":
    cli.run(main)
