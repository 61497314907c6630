"""Lower case and Moses' tokens: the texts that published scores of small sets, such as Multi30k's, are measured on."""

import dataclasses
import functools
import importlib.metadata
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

    def __bool__(self) -> bool:
        """False if it returns lines unchanged."""
        return self.lowercase or self.tokenized

    def __call__(self, line: str) -> str:
        if self.lowercase:
            line = line.lower()
        if self.tokenized:
            punctuation, moses = moses_tools(self.language)
            line = moses.tokenize(punctuation.normalize(line), return_str=True)
        return line

    @property
    def tokens(self) -> str:
        """Says how the tokens are made, as a part of a signature of sacreBLEU."""
        return f"tok:moses-{self.language}|punct:normalised|sacremoses:{importlib.metadata.version('sacremoses')}"


PLAIN = Normaliser("")


@functools.cache
def moses_tools(language: str) -> tuple[Any, Any]:
    """Moses' normaliser of punctuation and its tokenizer, for a language."""
    import sacremoses  # takes 0.3 s, and few runs need it

    return sacremoses.MosesPunctNormalizer(language), sacremoses.MosesTokenizer(language)


def normalisers(config) -> tuple[Normaliser, Normaliser]:
    """The normalisers of sources and targets that `config.data` describes. Labels are not normalised."""
    source, target = (
        Normaliser(language, config.lowercase, config.tokenized)
        for language in (config.source_language, config.target_language)
    )
    return source, PLAIN if config.source == "tsv" else target
