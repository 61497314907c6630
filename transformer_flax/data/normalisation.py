"""Lower case and Moses' tokens: the texts that published scores of small sets, such as Multi30k's, are measured on."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Normaliser:
    """Normalises lines of a language. Without lower case and tokens, it returns them unchanged.

    With both, a line is what lowercase.perl | normalize-punctuation.perl | tokenizer.perl of Moses make of it, as in
    the files lc.norm.tok of Multi30k. `language` is a code such as "de"; Moses uses the abbreviations of English for
    languages that it does not know.
    """

    language: str
    lowercase: bool = False
    tokenized: bool = False

    def __call__(self, lines: Iterable[str]) -> list[str]:
        if self.lowercase:
            lines = [line.lower() for line in lines]
        if self.tokenized:
            punctuation, moses = _moses(self.language)
            lines = [moses.tokenize(punctuation.normalize(line), return_str=True) for line in lines]
        return list(lines)

    @property
    def tokens(self) -> str:
        """How the tokens are made, as a part of a signature of sacreBLEU."""
        return f"tok:moses-{self.language}|punct:normalised|sacremoses:{importlib.metadata.version('sacremoses')}"


@functools.cache
def _moses(language: str) -> tuple[Any, Any]:
    import sacremoses  # takes 0.3 s, and few runs need it

    return sacremoses.MosesPunctNormalizer(language), sacremoses.MosesTokenizer(language)
