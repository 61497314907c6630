"""Compares each variant of a sweep with base, and the differences with the paper's."""

import collections
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformer_flax.ablation import statistics, table3
from transformer_flax.ablation.results import FAILED, Result
from transformer_flax.ablation.statistics import Estimate
from transformer_flax.data.normalisation import NORMALISATION
from transformer_flax.errors import UserError

SIGNIFICANT = 1 - statistics.CONFIDENCE  # a corrected p-value below this is significant
NORMALISED = {f"data.{name}" for name in NORMALISATION}
LARGEST_LOSS = 600.0  # nats; matplotlib can still draw e^600 on an axis with margins


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measure of variants on the validation split."""

    name: str
    unit: str
    digits: int  # decimal places of a difference
    level_name: str
    of: Callable[[Mapping[str, float]], float]  # an evaluation's scores -> the value that is averaged and compared
    level: Callable[[float], float] = float  # the averaged value -> the value shown for a variant
    more_is_better: bool = True
    paper_name: str = "BLEU"  # the paper's measure that is shown beside this one
    paper_digits: int = 1
    of_paper: Callable[[table3.PaperRow], float] = operator.attrgetter("bleu")

    @property
    def resolution(self) -> float:
        """The smallest difference that a table shows."""
        return 10.0**-self.digits

    def values(self, runs: Iterable[Result]) -> list[float]:
        """Returns the values of runs at the end of their training."""
        return [self.of(run.scores["valid"]) for run in runs]


def _perplexity(loss: float) -> float:
    """Returns e^loss, clipped: the interval of a few seeds that differ much may exceed the largest float."""
    return math.exp(max(-LARGEST_LOSS, min(LARGEST_LOSS, loss)))


# Log-perplexity is the cross-entropy in nats. A difference of two log-perplexities is a ratio of two perplexities. This
# ratio means the same at perplexity 5 and at 10. So means of perplexity over seeds are geometric.
LOG_PERPLEXITY = Measure(
    "log-perplexity",
    "nats a piece",
    3,
    "perplexity",
    lambda scores: math.log(scores["perplexity"]),
    level=_perplexity,
    more_is_better=False,
    paper_name="log-perplexity",
    paper_digits=3,
    of_paper=lambda row: math.log(row.perplexity),
)
LOG_PERPLEXITY_OF_TEXTS = dataclasses.replace(LOG_PERPLEXITY, unit="nats a text")  # of classifiers
BLEU = Measure("BLEU", "points", 2, "BLEU", operator.itemgetter("bleu"))
EXACT_MATCH = Measure("exact match", "% of sentences", 1, "exact match, %", lambda scores: 100 * scores["exact_match"])
ACCURACY = Measure("accuracy", "% of texts", 1, "accuracy, %", lambda scores: 100 * scores["accuracy"])
SOURCE_GAIN = Measure(  # for curves only; the paper has no such measure
    "source gain", "nats a token", 2, "source gain, nats a token", operator.itemgetter("source_gain")
)


@dataclasses.dataclass(frozen=True)
class Effect:
    """The difference of a variant from base in one measure."""

    ours: Estimate
    corrected_p: float | None  # p-value, corrected for the number of variants
    paper: float | None  # None: not a row of table 3, or not the paper's change on this base

    @property
    def significant(self) -> bool:
        return self.corrected_p is not None and self.corrected_p < SIGNIFICANT

    @property
    def has_papers_sign(self) -> bool | None:
        """The effect has the paper's sign; None if the paper has no such change, or no difference."""
        return self.ours.value * self.paper > 0 if self.paper else None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variant with its finished runs."""

    variant: str
    row: table3.PaperRow | None  # None: beyond table 3, the user's own variant, or base without the paper's rows
    runs: tuple[Result, ...]  # in the order of seeds; at least one
    means: dict[Measure, Estimate]
    # Empty for base, if there is no base, and for another validation text than base's.
    effects: dict[Measure, Effect] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All variants of a sweep, compared with base."""

    config: Mapping[str, Any]  # the config of the sweep's base, flat
    # The last result of each run. Rows in the order of table 3, then all other variants.
    results: list[Result]
    # In the same order. If no other row was run, base counts as a row only if it is the paper's base.
    entries: list[Entry]
    measures: tuple[Measure, Measure]  # log-perplexity, and the score beside it
    base: Entry | None
    other_changes: list[str]  # rows that do not change this base as they change the paper's
    of_other_text: list[str]  # variants that have no effects, as their validation text is not base's
    missing_rows: list[str]  # rows of table 3 that were not run; empty unless a row other than base was run
    seeds: list[int]  # those with results, and those asked for
    missing_seeds: dict[str, list[int]]  # by variant

    @property
    def finished(self) -> list[Result]:
        return [result for result in self.results if result.finished]

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if not result.finished]

    @property
    def rows(self) -> list[Entry]:
        """The rows of table 3."""
        return [entry for entry in self.entries if entry.row]

    @property
    def is_of_table3(self) -> bool:
        """The comparison has a row of table 3 other than base."""
        return any(entry.row and entry.variant != "base" for entry in self.entries)

    @property
    def own(self) -> list[Entry]:
        """All other variants: the rows beyond table 3, and the user's own."""
        return [entry for entry in self.entries if not entry.row]

    @property
    def score(self) -> Measure:
        return self.measures[1]

    def short_name(self, field: str) -> str:
        """Returns a field's name without its section, unless the config has several fields of that name."""
        name = field.rpartition(".")[2]
        return field if sum(other.rpartition(".")[2] == name for other in self.config) > 1 else name


def compare(
    results: Iterable[Result], config: Mapping[str, Any], score: Measure | None = None, *, asked: Iterable[int] = ()
) -> Comparison:
    """Compares every variant with base.

    Base is the first variant that changes nothing: "base", or else one of a grid. If a run has several results, the
    last one counts. A finished run whose perplexity is not finite counts as failed. `asked` are seeds that all
    variants should have, beside those with results.

    The default of `score`, the measure beside perplexity, is accuracy for classifiers. For translators it is BLEU, or
    exact match if BLEU is 0 in all runs or in a run with right outputs, as on single words.
    """
    last = {result.key: _fail_diverged(result) for result in results}
    if not last:
        raise UserError("there are no results to report yet; let a run of the sweep finish first")
    kept = sorted(last.values(), key=_order)
    runs: dict[str, list[Result]] = {result.variant: [] for result in kept}  # the finished ones
    for result in kept:
        if result.finished:
            runs[result.variant].append(result)
    score = score or _choose_score([result for result in kept if result.finished])
    measures = (LOG_PERPLEXITY_OF_TEXTS if score is ACCURACY else LOG_PERPLEXITY), score
    of_table3 = runs.keys() & table3.ROWS.keys() - {"base"}
    papers = table3.ROWS if of_table3 or table3.is_papers_base(config) else {}
    entries = [
        Entry(variant, papers.get(variant), tuple(own), {each: statistics.mean(each.values(own)) for each in measures})
        for variant, own in runs.items()
        if own
    ]
    base = next((each for each in entries if each.runs[0].row == "base" and not each.runs[0].changes), None)
    of_other_text = [each.variant for each in entries if base and _has_other_text(each.runs[0], base.runs[0], score)]
    if base:
        compared = [each for each in entries if each is not base and each.variant not in of_other_text]
        for measure in measures:
            _add_effects(measure, compared, base, config)
    seeds = sorted({*asked, *(result.seed for result in kept)})
    possible = [name for name, row in table3.ROWS.items() if row.changes.keys() <= config.keys()]  # not of other kinds
    return Comparison(
        config=config,
        results=kept,
        entries=entries,
        measures=measures,
        base=base,
        other_changes=[each.variant for each in entries if each.row and not table3.is_papers_change(each.row, config)],
        of_other_text=of_other_text,
        missing_rows=[name for name in possible if name not in runs] if of_table3 else [],
        seeds=seeds,
        missing_seeds={v: missing for v in runs if (missing := [seed for seed in seeds if (v, seed) not in last])},
    )


def _fail_diverged(result: Result) -> Result:
    if not result.finished or math.isfinite(reached := result.scores["valid"]["perplexity"]):
        return result
    return dataclasses.replace(result, status=FAILED, error=f"diverged: its perplexity is {reached}")


def _has_other_text(run: Result, base: Result, score: Measure) -> bool:
    """Returns whether a run was evaluated on another text than base; False if an older version kept no fingerprint."""
    if score is ACCURACY and {field for field in run.changes if field.startswith("data.")} <= NORMALISED:
        return False  # labels are not normalised, and the fingerprint is of the normalised text
    theirs, ours = base.fingerprints.get("valid"), run.fingerprints.get("valid")
    return None not in (theirs, ours) and theirs != ours


def _order(result: Result) -> tuple:
    """Returns a sort key: rows of table 3 first, then other variants by row and name; then by seed.

    Numbers in names sort by value: 200 precedes 1000, and 1e-05 precedes 0.001.
    """
    names = list(table3.ALL)
    place = names.index(result.row) if result.row in table3.ALL else len(names)
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", result.variant)
    natural = [float(part) if i % 2 else part for i, part in enumerate(parts)]
    return result.variant not in table3.ROWS, place, natural, result.seed


def _choose_score(finished: Sequence[Result]) -> Measure:
    if finished and "macro_f1" in finished[0].scores["valid"]:
        return ACCURACY
    scores = [result.scores["valid"] for result in finished]
    # A single wrong output of four words gives a run of right single words some BLEU.
    single_words = any(each["exact_match"] and not each["bleu"] for each in scores)
    return BLEU if any(each["bleu"] for each in scores) and not single_words else EXACT_MATCH


def _add_effects(measure: Measure, entries: Sequence[Entry], base: Entry, config: Mapping[str, Any]) -> None:
    """Adds the effect of each entry in a measure. The p-values are corrected for the number of entries."""
    differences = [statistics.difference(measure.values(entry.runs), measure.values(base.runs)) for entry in entries]
    corrected = iter(statistics.holm([each.p for each in differences if each.p is not None]))
    for entry, ours in zip(entries, differences, strict=True):
        paper = None
        if entry.row and table3.is_papers_change(entry.row, config):
            paper = measure.of_paper(entry.row) - measure.of_paper(table3.ROWS["base"])
        entry.effects[measure] = Effect(ours, None if ours.p is None else next(corrected), paper)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The agreement of our effects with the paper's in one measure, over the rows with a difference in the paper."""

    same: list[str]  # rows whose effect has the paper's sign
    other: list[str]  # rows whose effect has another sign
    tested: int
    significant_same: list[str]
    significant_other: list[str]
    ranked: int  # number of effects that the paper has, differences of 0 included
    correlation: Estimate | None  # of our ranks with the paper's

    @property
    def rows(self) -> int:
        return len(self.same) + len(self.other)


def agreement(comparison: Comparison, measure: Measure) -> Agreement:
    """Finds the rows of table 3 whose effect has the paper's sign, and correlates the ranks of all effects.

    If all effects are exactly 0, nothing compares: the runs have learned nothing yet, or all there is to learn.
    """
    effects = {entry.variant: entry.effects[measure] for entry in comparison.rows if entry.effects}
    effects = {variant: effect for variant, effect in effects.items() if effect.paper is not None}
    if not any(effect.ours.value for effect in effects.values()):
        effects = {}
    same = [variant for variant, effect in effects.items() if effect.has_papers_sign]
    other = [variant for variant, effect in effects.items() if effect.has_papers_sign is False]
    return Agreement(
        same,
        other,
        sum(effects[variant].corrected_p is not None for variant in same + other),
        [variant for variant in same if effects[variant].significant],
        [variant for variant in other if effects[variant].significant],
        len(effects),
        statistics.rank_correlation(
            [effect.ours.value for effect in effects.values()], [effect.paper or 0.0 for effect in effects.values()]
        ),
    )


def over_training(comparison: Comparison) -> dict[int, Comparison]:
    """Compares the rows of table 3 at each evaluation of base; returns the comparisons by step.

    A row with more or fewer steps than base is compared at the same share of its own steps. A row that has ended is
    compared at its last evaluation.
    """
    if comparison.base is None or not comparison.rows:
        return {}
    runs = [run for entry in comparison.entries if entry.row or entry is comparison.base for run in entry.runs]
    found = {}
    for step in sorted({int(point["step"]) for run in comparison.base.runs for point in run.curve}):
        then = [_at(run, step, comparison.config["steps"]) for run in runs]
        if all(then):
            found[step] = compare([run for run in then if run], comparison.config, comparison.score)
    return found


def _at(run: Result, step: int, base_steps: int) -> Result | None:
    """Returns a run's result as it was when base was at a step; None if the run was not evaluated then."""
    own_steps = run.changes.get("steps", base_steps)
    past = [point for point in run.curve if point["step"] * base_steps <= step * own_steps]
    if not past or (past[-1] is not run.curve[-1] and past[-1]["step"] * base_steps < step * own_steps):
        return None
    return dataclasses.replace(run, scores={"valid": past[-1]})


def curve_of(run: Result, measure: Measure) -> dict[float, float]:
    """Returns the values of a measure by step. Skips points that lack the measure or are not finite."""
    points = {point["step"]: measure.of(collections.defaultdict(lambda: math.nan, point)) for point in run.curve}
    return {step: value for step, value in points.items() if math.isfinite(value)}
