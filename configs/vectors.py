"""Word vectors of both languages of a folder of text, by skip-gram or CBOW with negative sampling.

    python -m transformer_flax.vectors train --config=configs/vectors.py --config.data.path=FOLDER --output=vectors/NAME
    python -m transformer_flax.vectors nearest --vectors=vectors/NAME dog Hund
    python -m transformer_flax.vectors plot --vectors=vectors/NAME --output=plane.png

To start a translator of configs/multi30k.py from these vectors, set --config.embedding_init=vectors/NAME and use the
vectors' tokenizer (docs/vectors.md).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "vectors"
    config.seed = 0  # the training's seed: initial vectors, order of the text, noise

    config.vectors = ConfigDict()  # values in brackets: Mikolov et al. (2013)
    config.vectors.kind = "skipgram"  # a word predicts each word around it; or "cbow": their mean predicts the word
    config.vectors.d_model = 192  # that of the translator that will start from the vectors, such as configs/multi30k.py
    config.vectors.window = 5  # maximum words on each side; each word draws its number uniformly from 1 to 5 (5)
    config.vectors.negatives = 5  # k, noise words for each word (5 to 20)
    config.vectors.shared_negatives = 32  # noise words that a row of 64 words shares; each has weight k / 32
    config.vectors.noise_power = 0.75  # noise words are drawn by their frequency to this power (0.75)
    config.vectors.subsample = 1e-4  # t: a word of frequency f is left out with probability 1 - sqrt(t / f); 0: none
    config.vectors.sides = "both"  # each side of the text by itself; "interleaved": merged; "source" or "target": one
    config.vectors.epochs = 15
    config.vectors.rows_per_batch = 16  # of 64 words each
    config.vectors.learning_rate = 0.15  # of Adagrad, at the start; it falls linearly to 0 (0.025, of plain SGD)

    config.data = base.get_config().data  # only the fields of text, languages and tokenizer matter here
    config.data.update(source="folder", name="", vocab_size=16_000)  # large, so that most words are one piece
    return config
