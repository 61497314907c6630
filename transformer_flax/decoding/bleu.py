"""How good a translation is: the one definition of every score."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

import sacrebleu

from transformer_flax.errors import UserError

LENGTH_RATIOS = 0.9, 1.1  # outside of these `full_scores` warns
TOKENISED_SHARE = 0.1  # of the lines: more of them with the marks of a tokenizer, and `full_scores` warns

# What tokenizers leave behind: a blank before a full stop or comma; the joints of BPE, SentencePiece and compounds; the
# escapes of Moses.
_MARKS = re.compile(r"\s[.,](?!\S)|@@(?!\S)|▁|@-@|##AT##|&(?:amp|apos|quot|lt|gt|#124|#91|#93);")


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a list of translations against one reference each."""

    bleu: float  # 0 to 100, cased, sacreBLEU's 13a tokenisation
    exact_match: float  # share of translations equal to their reference, 0 to 1
    signature: str  # how `bleu` was measured
    length_ratio: float  # tokens of the translations over those of the references, as `bleu` counts them


@dataclasses.dataclass(frozen=True)
class FullScores(Scores):
    """All that a report needs."""

    chrf: float  # 0 to 100, F2 of character n-grams
    chrf_signature: str
    tokenised_bleu: float  # 0 to 100, the measure of the paper's table 2
    tokenised_signature: str
    warnings: tuple[str, ...]  # reasons to distrust the scores, a sentence each


def score(translations: Sequence[str], references: Sequence[str]) -> Scores:
    """Corpus BLEU and exact matches of detokenised text, cheap enough for every evaluation of a training run.

    Raises:
      UserError: there are no lines, or not as many translations as references.
    """
    if not translations or len(translations) != len(references):
        raise UserError(
            f"there are {len(translations)} translations and {len(references)} references; "
            "give as many of one as of the other, and at least one"
        )
    # `force` leaves the score as it is. It silences sacreBLEU's notes on tokenised text, as `full_scores` has its own.
    metric = sacrebleu.BLEU(tokenize="13a", force=True)
    bleu = metric.corpus_score(list(translations), [list(references)])
    matches = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
    return Scores(bleu.score, matches / len(references), str(metric.get_signature()), bleu.ratio)


def full_scores(translations: Sequence[str], references: Sequence[str], language: str) -> FullScores:
    """Every score of detokenised text, and what is suspicious about it.

    Args:
      language: of both, a code such as "de". Moses knows the abbreviations of some and takes English ones for others.

    Raises:
      UserError: there are no lines, or not as many translations as references.
    """
    scores = score(translations, references)
    chrf = sacrebleu.CHRF()
    tokenised = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)  # as multi-bleu.perl counts
    split = "|compounds:##AT##" if language == "de" else ""
    how = f"tok:moses-{language}{split}|punct:ascii|sacremoses:{importlib.metadata.version('sacremoses')}"
    return FullScores(
        **vars(scores),
        chrf=chrf.corpus_score(list(translations), [list(references)]).score,
        chrf_signature=str(chrf.get_signature()),
        tokenised_bleu=tokenised.corpus_score(
            table2_tokens(translations, language), [table2_tokens(references, language)]
        ).score,
        tokenised_signature=str(tokenised.get_signature()).replace("tok:none", how),
        warnings=tuple(_warnings(translations, references, scores)),
    )


def table2_tokens(lines: Sequence[str], language: str) -> list[str]:
    """The tokens, with blanks between, of which the paper's table 2 has the BLEU: the authors' get_ende_bleu.sh.

    Punctuation of Unicode becomes ASCII (but not the low quote of German), Moses tokenizes, and German compounds come
    apart at their hyphens. The script does so to translations, and takes references that others have tokenised.
    """
    import sacremoses  # here, as it takes 0.3 s: training scores by `score` alone, and runs without it

    punctuation, moses = sacremoses.MosesPunctNormalizer(language), sacremoses.MosesTokenizer(language)
    tokens: list[Any] = [moses.tokenize(punctuation.replace_unicode_punct(line), return_str=True) for line in lines]
    if language == "de":
        # On bytes, as Perl does in the script: "a-b-c" comes apart once only, because the match takes b along, and
        # "a-ü-c" twice, because ü has a byte for either match.
        tokens = [re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode() for line in tokens]
    return tokens


def _warnings(translations: Sequence[str], references: Sequence[str], scores: Scores) -> list[str]:
    found = []
    length_ratio = scores.length_ratio
    if scores.bleu < 1 and scores.exact_match > 0.5:
        found.append("BLEU wants four words in a row, which these lines hardly have: look at the exact matches instead")
    low, high = LENGTH_RATIOS
    ratio = f"the translations have {length_ratio:.3f} times the tokens of the references, outside {low} to {high}"
    if length_ratio < low:
        empty = sum(not line.strip() for line in translations)
        found.append(
            f"{ratio}: {empty} of {len(translations)} are empty, others may be cut (config.decode.max_extra_length) or "
            "end early (too little training, or a small config.decode.alpha)"
        )
    if length_ratio > high:
        found.append(f"{ratio}: look for repetitions (too little training, or a large config.decode.alpha)")
    for name, lines, other, opposites in (
        ("translations", translations, "references", references),
        ("references", references, "translations", translations),
    ):
        pairs = zip(lines, opposites, strict=True)
        marked = [line for line, opposite in pairs if _MARKS.search(line) and not _MARKS.search(opposite)]
        if len(marked) > TOKENISED_SHARE * len(lines):
            found.append(
                f"{len(marked)} of {len(lines)} {name} look tokenised where the {other} do not, such as "
                f"{marked[0][:100]!r}: detokenise them, as every score here is of plain text"
            )
    return found
