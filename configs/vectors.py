"""Word vectors of both languages of a folder of text, by skip-gram or CBOW with negative sampling.

    python -m transformer_flax.vectors train --config=configs/vectors.py --config.data.path=FOLDER --output=vectors/NAME
    python -m transformer_flax.vectors nearest --vectors=vectors/NAME dog Hund
    python -m transformer_flax.vectors plot --vectors=vectors/NAME --output=plane.png

A translator of configs/multi30k.py starts from them with --config.embedding_init=vectors/NAME and their tokenizer
(docs/vectors.md).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "vectors"
    config.seed = 0  # of the training: initial vectors, order of the text, noise

    config.vectors = ConfigDict()  # in brackets: Mikolov et al. (2013)
    config.vectors.kind = "skipgram"  # a word predicts each word around it; or "cbow": their mean predicts the word
    config.vectors.d_model = 192  # of a translator that is to start from them, such as configs/multi30k.py's
    config.vectors.window = 5  # words to each side, at most; how many is drawn for each word, as often 1 as 5 (5)
    config.vectors.negatives = 5  # k, noise words for each word (5 to 20)
    config.vectors.shared_negatives = 32  # noise words that 64 words in a row share; each weighs k / 32
    config.vectors.noise_power = 0.75  # noise is drawn by frequency to this power (0.75)
    config.vectors.subsample = 1e-4  # t: a word of frequency f is left out with probability 1 - sqrt(t / f); 0: none
    config.vectors.sides = "both"  # of the text, each for itself; "interleaved": merged; or "source" or "target" alone
    config.vectors.epochs = 15
    config.vectors.rows_per_batch = 16  # of 64 words each
    config.vectors.learning_rate = 0.15  # of Adagrad, at the beginning; it falls to 0 in a line (0.025, of plain SGD)

    config.data = base.get_config().data  # of which text, languages and tokenizer matter here
    config.data.update(source="folder", name="", vocab_size=16_000)  # many, so that most words are one piece
    return config
