"""The only definition of each score: BLEU, chrF and exact matches of translations, accuracy and F1 of labels."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sacrebleu
from numpy.typing import ArrayLike

from transformer_flax.data.normalisation import PLAIN, Normaliser, moses_tools
from transformer_flax.data.text_files import one_line

# sacreBLEU's tokenisation of languages without blanks between words: Chinese; Japanese, Thai, Khmer, Lao, Burmese and
# Tibetan. Its own of Japanese needs another package.
UNSPACED = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue"), "zh"),
    **dict.fromkeys(
        ("ja", "jpn", "th", "tha", "km", "khm", "lo", "lao", "my", "mya", "bur", "bo", "bod", "tib"), "char"
    ),
}
LENGTH_RATIOS = 0.9, 1.1  # `full_scores` warns of length ratios outside this range
TOKENISED_SHARE = 0.1  # `full_scores` warns if a larger share of the lines has marks of a tokenizer

# Marks of a tokenizer: a space before a full stop or comma; the joiners of BPE, SentencePiece and compounds; Moses'
# escapes.
_MARKS = re.compile(r"\s[.,](?!\S)|@@(?!\S)|▁|@-@|##AT##|&(?:amp|apos|quot|lt|gt|#124|#91|#93);")
_PIECES = re.compile(r"@@(?!\S)|(?<!\S)▁")  # marks of BPE's and SentencePiece's pieces


@dataclasses.dataclass(frozen=True)
class TranslationScores:
    """Scores of translations with one reference each."""

    bleu: float  # 0 to 100; for plain text: cased, with sacreBLEU's 13a tokenisation, or that of UNSPACED
    exact_match: float  # share of translations equal to their reference, 0 to 1
    signature: str  # sacreBLEU's description of how `bleu` was measured
    length_ratio: float  # tokens of the translations / tokens of the references, as `bleu` counts tokens


@dataclasses.dataclass(frozen=True)
class FullScores(TranslationScores):
    """All scores of a report."""

    chrf: float  # 0 to 100, F2 of character n-grams
    chrf_signature: str
    table2_bleu: float  # 0 to 100, the BLEU of the paper's table 2
    table2_signature: str
    warnings: tuple[str, ...]  # reasons to distrust the scores, one sentence each


def score(translations: Sequence[str], references: Sequence[str], text: Normaliser = PLAIN) -> TranslationScores:
    """Computes corpus BLEU and exact matches of detokenised text, fast enough for every evaluation during training.

    Each translation has one reference. `text` says how both have been normalised. Moses' tokens are not tokenised
    again, except in the languages of UNSPACED, whose words Moses does not find.
    """
    # `force` only silences sacreBLEU's warning of tokenised text: `full_scores` has a warning of its own.
    tokenize = UNSPACED.get(text.base_language, "none" if text.tokenized else "13a")
    metric = sacrebleu.BLEU(lowercase=text.lowercase, tokenize=tokenize, force=True)
    bleu = metric.corpus_score(list(translations), [list(references)])
    matches = sum(one_line(ours) == one_line(theirs) for ours, theirs in zip(translations, references, strict=True))
    signature = str(metric.get_signature())
    if text.tokenized:
        tokens = f"moses-{text.base_language}" if tokenize == "none" else tokenize
        signature = signature.replace(f"tok:{tokenize}", _by_moses(f"{tokens}|punct:normalised"))
    return TranslationScores(bleu.score, matches / len(references), signature, bleu.ratio)


def _by_moses(tokens: str) -> str:
    """Returns the part of a sacreBLEU signature that says how the tokens of a text were made."""
    return f"tok:{tokens}|sacremoses:{importlib.metadata.version('sacremoses')}"


def full_scores(translations: Sequence[str], references: Sequence[str], text: Normaliser) -> FullScores:
    """Computes all scores of detokenised text, with warnings. For the arguments, see `score`."""
    scores = score(translations, references, text)
    chrf_score, chrf_signature = chrf(translations, references, text)
    # These settings compute BLEU like multi-bleu.perl.
    tokenised = sacrebleu.BLEU(lowercase=text.lowercase, tokenize="none", smooth_method="none", force=True)
    compounds = "|compounds:##AT##" if text.base_language == "de" else ""
    punctuation = "normalised" if text.tokenized else "ascii"
    how = _by_moses(f"moses-{text.base_language}{compounds}|punct:{punctuation}")
    ours, theirs = (table2_tokens(lines, text) for lines in (translations, references))
    return FullScores(
        **vars(scores),
        chrf=chrf_score,
        chrf_signature=chrf_signature,
        table2_bleu=tokenised.corpus_score(ours, [theirs]).score,
        table2_signature=str(tokenised.get_signature()).replace("tok:none", how),
        warnings=tuple(_warnings(translations, references, scores, text)),
    )


def chrf(translations: Sequence[str], references: Sequence[str], text: Normaliser) -> tuple[float, str]:
    """Returns chrF and its signature. For the arguments, see `score`."""
    metric = sacrebleu.CHRF(lowercase=text.lowercase)
    value = metric.corpus_score(list(translations), [list(references)]).score
    signature = str(metric.get_signature())  # after the score, which counts the references
    if text.tokenized:  # Moses' escapes, such as &apos;, count as letters
        tokens = _by_moses(f"moses-{text.base_language}|punct:normalised")
        signature = signature.replace("|version:", f"|{tokens}|version:")
    return value, signature


def table2_tokens(lines: Sequence[str], text: Normaliser) -> list[str]:
    """Tokenises lines for the BLEU of the paper's table 2 (the authors' get_ende_bleu.sh), with spaces between tokens.

    Replaces some Unicode punctuation by ASCII (no dashes, guillemets, or low and single opening quotes), runs Moses'
    tokenizer, and splits German compounds at their hyphens. The script processes only the translations in this way,
    because its references are already tokenised. If `text` says that the lines are Moses' tokens, the lines are not
    tokenised again.
    """
    tokens: list[Any] = list(lines)
    if not text.tokenized:
        punctuation, moses = moses_tools(text.base_language)
        tokens = [moses.tokenize(punctuation.replace_unicode_punct(line), return_str=True) for line in lines]
    if text.base_language == "de":
        # Matches bytes, as Perl does in the script. "a-b-c" is split once, because the first match consumes b. "a-ü-c"
        # is split twice, because ü has two bytes, one for each match.
        tokens = [re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode() for line in tokens]
    return tokens


def warning_of_pieces(references: Sequence[str]) -> str:
    """Returns a warning if references are pieces of words by BPE or SentencePiece; otherwise an empty text."""
    pieces = [line for line in references if _PIECES.search(line)]
    if len(pieces) <= TOKENISED_SHARE * len(references):
        return ""
    return (
        f"{len(pieces)} of {len(references)} references are pieces of words, such as {pieces[0][:100]!r}: BLEU counts "
        "pieces as words, so it is too high; join the pieces of all text first"
    )


def _warnings(
    translations: Sequence[str], references: Sequence[str], scores: TranslationScores, text: Normaliser
) -> Iterator[str]:
    short = sum(len(reference.split()) < 4 for reference in references)
    if scores.bleu < 1 and short > len(references) / 2 and text.base_language not in UNSPACED:
        yield "BLEU counts four words in a row, which most references do not have: read the exact matches instead"
    low, high = LENGTH_RATIOS
    ratio = (
        f"the translations have {scores.length_ratio:.3f} times the tokens of the references, outside {low} to {high}"
    )
    if scores.length_ratio < low:
        empty = sum(not line.strip() for line in translations)
        yield (
            f"{ratio}: {empty} of {len(translations)} are empty, others may be cut (config.decode.max_extra_length) or "
            "end early (too little training, or a small config.decode.alpha)"
        )
    if scores.length_ratio > high:
        yield f"{ratio}: look for repetitions (too little training, or a large config.decode.alpha)"
    if warning_of_pieces(translations) and (warning := warning_of_pieces(references)):
        yield warning
    for name, lines, other, opposites in (
        ("translations", translations, "references", references),
        ("references", references, "translations", translations),
    ):
        pairs = zip(lines, opposites, strict=True)
        marked = [line for line, opposite in pairs if _MARKS.search(line) and not _MARKS.search(opposite)]
        if len(marked) > TOKENISED_SHARE * len(lines) and not text.tokenized:
            yield (
                f"{len(marked)} of {len(lines)} {name} look tokenised where the {other} do not, such as "
                f"{marked[0][:100]!r}: detokenise them, as all scores are of plain text"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class ClassScores:
    """Scores of labels. A quotient 0 / 0 counts as 0. Shapes: C classes."""

    classes: tuple[str, ...]
    confusion: np.ndarray  # int64 [C, C]: texts of the row's class that were labelled with the column's class
    accuracy: float  # share of correct labels
    precision: np.ndarray  # [C], for each class, the share of the texts labelled with it that belong to it
    recall: np.ndarray  # [C], for each class, the share of its texts that are labelled with it
    f1: np.ndarray  # [C], harmonic mean of precision and recall
    support: np.ndarray  # [C], number of texts of each class
    macro_f1: float  # unweighted mean of F1 over the classes that occur, as references or as labels


def score_labels(labels: Sequence[str], references: Sequence[str], classes: Sequence[str]) -> ClassScores:
    """Scores labels against the reference labels. Every reference must be one of the classes."""
    numbers = {name: number for number, name in enumerate(classes)}
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    for label, reference in zip(labels, references, strict=True):
        confusion[numbers[reference], numbers[label]] += 1
    correct, support, labelled = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    f1, occurs = _ratio(2 * correct, support + labelled), support + labelled > 0
    return ClassScores(
        tuple(classes),
        confusion,
        accuracy=_ratio(np.trace(confusion), confusion.sum()).item(),
        precision=_ratio(correct, labelled),
        recall=_ratio(correct, support),
        f1=f1,
        support=support,
        macro_f1=f1[occurs].mean().item() if occurs.any() else 0.0,
    )


def _ratio(part: ArrayLike, whole: ArrayLike) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(np.shape(whole)), where=np.asarray(whole) > 0)
