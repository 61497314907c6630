"""How good a translation is: the one definition of every score."""

import dataclasses
from collections.abc import Sequence

import sacrebleu


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a list of translations against one reference each."""

    bleu: float  # 0 to 100, cased, sacreBLEU's 13a tokenisation
    exact_match: float  # share of translations equal to their reference, 0 to 1
    signature: str  # how `bleu` was measured


def score(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Corpus BLEU and exact matches of detokenised text."""
    metric = sacrebleu.BLEU(tokenize="13a")
    bleu = metric.corpus_score(list(translations), [list(references)]).score
    matches = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
    return Scores(bleu, matches / max(len(references), 1), str(metric.get_signature()))
