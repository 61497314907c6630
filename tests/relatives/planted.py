"""A text of which it is known which words are alike."""

import numpy as np

from transformer_flax.data.corpus import Sentences
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.special_tokens import END_ID

TOPICS = (("cat", "dog", "cow", "hen"), ("red", "blue", "pink", "gray"), ("one", "two", "six", "ten"))


def planted_text(sentences: int = 600, seed: int = 0) -> list[str]:
    """Sentences of six words of one topic each."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(TOPICS[i % len(TOPICS)], 6)) for i in range(sentences)]


def tokenise(text: list[str]) -> tuple[Tokenizer, Sentences]:
    tokenizer = Tokenizer.train(text, 300)
    return tokenizer, encode(tokenizer, text)


def encode(tokenizer: Tokenizer, text: list[str]) -> Sentences:
    encoded = [[*ids, END_ID] for ids in tokenizer.encode(text)]
    ids = np.array([i for line in encoded for i in line], np.uint16)
    return Sentences(ids, np.cumsum([0, *map(len, encoded)]))
