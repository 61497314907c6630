"""Lower case and Moses' tokens. Published scores of small data sets such as Multi30k are measured on such text."""

import dataclasses
import functools
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Normaliser:
    """A function that normalises lines of one language. Without `lowercase` and `tokenized`, lines stay unchanged.

    With both, the result equals the output of Moses' lowercase.perl | normalize-punctuation.perl | tokenizer.perl, as
    in the files lc.norm.tok of Multi30k. `language` is a code such as "de" or "de-AT". For languages that Moses does
    not know, Moses uses the abbreviations of English.
    """

    language: str
    lowercase: bool = False
    tokenized: bool = False

    def __bool__(self) -> bool:
        """Returns False if lines stay unchanged."""
        return self.lowercase or self.tokenized

    def __call__(self, line: str) -> str:
        if self.lowercase:
            line = line.lower()
        if self.tokenized:
            punctuation, moses = moses_tools(self.base_language)
            line = moses.tokenize(punctuation.normalize(line), return_str=True)
        return line

    @property
    def base_language(self) -> str:
        """The language without its region: "pt" of "pt-BR"."""
        return re.split("[-_]", self.language)[0].lower()


PLAIN = Normaliser("")
# The fields of config.data that say how a text is normalised.
NORMALISATION = tuple(field.name for field in dataclasses.fields(Normaliser) if field.name != "language")


@functools.cache
def moses_tools(language: str) -> tuple[Any, Any]:
    """Returns Moses' punctuation normaliser and Moses' tokenizer for a language."""
    import sacremoses  # the import takes 0.3 s, and few runs need it

    return sacremoses.MosesPunctNormalizer(language), sacremoses.MosesTokenizer(language)


def normalisers(config) -> tuple[Normaliser, Normaliser]:
    """Returns the source and target normalisers that `config.data` describes. Labels of tsv files stay unchanged."""
    source = Normaliser(config.source_language, config.lowercase, config.tokenized)
    target = PLAIN if config.source == "tsv" else Normaliser(config.target_language, config.lowercase, config.tokenized)
    return source, target
