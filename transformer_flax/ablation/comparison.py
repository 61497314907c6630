"""The results of a sweep as effects: what each variant changes of base, beside what it changed in the paper."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from transformer_flax.ablation import beyond, statistics, table3
from transformer_flax.ablation.measures import ACCURACY, BLEU, EXACT_MATCH, LOG_PERPLEXITY, SOURCE_GAIN, Measure
from transformer_flax.ablation.results import CLASSIFYING, FAILED, Result
from transformer_flax.ablation.statistics import Difference, Estimate
from transformer_flax.errors import UserError

SIGNIFICANT = 1 - statistics.CONFIDENCE  # below it, a corrected p


@dataclasses.dataclass(frozen=True)
class Effect:
    """The difference of a variant from base in one measure."""

    ours: Difference
    p: float | None  # corrected for the number of variants compared
    paper: float | None  # None: not a row of the paper's, or on this base not the paper's change

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < SIGNIFICANT

    @property
    def has_papers_sign(self) -> bool | None:
        """None where the paper has no such change, or sees no difference."""
        return self.ours.value * self.paper > 0 if self.paper else None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variant with what its finished runs reached."""

    variant: str
    row: table3.PaperRow | None  # that it is; None: a row beyond the table, or of the user's own making
    runs: tuple[Result, ...]  # by seed; at least one
    means: dict[Measure, Estimate]
    effects: dict[Measure, Effect]  # empty for base itself, and where there is none


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All of a sweep."""

    config: Mapping[str, Any]  # of the sweep's base, flat
    entries: list[Entry]  # rows in the order of table 3, then all others
    score: Measure
    base: Entry | None  # that the others are compared with
    failed: list[Result]
    other_changes: list[str]  # rows that change the base in another direction than in the paper, or not at all
    missing_rows: list[str]  # of table 3, if any but base was run
    missing_seeds: dict[str, list[int]]  # by variant: those that other variants have

    @property
    def rows(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.row]

    @property
    def is_of_table3(self) -> bool:
        """Whether any of it was run but base, which is there for other variants, too."""
        return any(entry.row and entry.variant != "base" for entry in self.entries)

    @property
    def own(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.row]

    @property
    def measures(self) -> tuple[Measure, Measure]:
        return LOG_PERPLEXITY, self.score


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Between our effects and the paper's, in one measure."""

    rows: int  # in which the paper sees a difference
    same_sign: int
    tested: int  # of `rows`
    significant: int
    significant_same_sign: int
    ranked: int
    correlation: Estimate | None  # of the ranks of all effects


def compare(results: Iterable[Result], config: Mapping[str, Any], score: Measure | None = None) -> Comparison:
    """Compares every variant with base.

    The score is accuracy where texts are classified, and else BLEU, unless that is 0 for all runs, as on single words:
    then it is exact match. Base is the row of that name, or else a variant of a grid that changes nothing. Of several
    results of one run the last counts. A run that ended with a perplexity that is not finite has failed.

    Args:
      results: in any order.
      config: of the sweep's base, flat.
      score: that is compared, where it is known.

    Raises:
      UserError: there are no results.
    """
    last = {(result.variant, result.seed): _judged(result) for result in results}
    if not last:
        raise UserError("there are no results to report yet; let a run of the sweep finish first")
    kept = sorted(last.values(), key=lambda result: (_order(result), result.seed))
    finished = [result for result in kept if result.finished]
    score = score or _score(finished)
    runs: dict[str, list[Result]] = {}
    for result in finished:
        runs.setdefault(result.variant, []).append(result)
    unchanged = [v for v, of_variant in runs.items() if of_variant[0].row == "base" and not of_variant[0].changes]
    base = "base" if "base" in runs else next(iter(unchanged), None)
    other = [v for v in runs if v in table3.ROWS and not table3.is_papers_change(table3.ROWS[v], config)]
    entries = _entries(runs, base, (LOG_PERPLEXITY, score), other)
    seeds = {result.seed for result in kept}
    variants = {result.variant: None for result in kept}  # in their order
    tried = set(last)
    missing_seeds = {v: [seed for seed in sorted(seeds) if (v, seed) not in tried] for v in variants}
    of_table3 = variants.keys() & table3.ROWS.keys() - {"base"}
    return Comparison(
        config=config,
        entries=entries,
        score=score,
        base=next((entry for entry in entries if entry.variant == base), None),
        failed=[result for result in kept if not result.finished],
        other_changes=other,
        missing_rows=[name for name in table3.ROWS if name not in variants] if of_table3 else [],
        missing_seeds={variant: missing for variant, missing in missing_seeds.items() if missing},
    )


def _score(finished: Sequence[Result]) -> Measure:
    if finished and finished[0].measures == CLASSIFYING:
        return ACCURACY
    return BLEU if any(result.scores["valid"]["bleu"] for result in finished) else EXACT_MATCH


def agreement(comparison: Comparison, measure: Measure) -> Agreement:
    """How far the effects of table 3's rows are the paper's."""
    effects = [entry.effects[measure] for entry in comparison.rows if entry.effects]
    effects = [effect for effect in effects if effect.paper is not None]
    with_sign = [effect for effect in effects if effect.paper]
    significant = [effect for effect in with_sign if effect.significant]
    return Agreement(
        len(with_sign),
        sum(bool(effect.has_papers_sign) for effect in with_sign),
        sum(effect.p is not None for effect in with_sign),
        len(significant),
        sum(bool(effect.has_papers_sign) for effect in significant),
        len(effects),
        statistics.rank_correlation(
            [effect.ours.value for effect in effects], [effect.paper or 0.0 for effect in effects]
        ),
    )


def over_training(comparison: Comparison) -> dict[int, Comparison]:
    """The comparison at each evaluation of base, by its step.

    A row that makes more or fewer steps than base is taken at the same share of its own; one that has ended, at its
    last evaluation.
    """
    runs = [run for entry in comparison.entries for run in entry.runs]
    if comparison.base is None or not all(run.curve for run in runs):
        return {}
    found = {}
    for step in [int(point[0]) for point in comparison.base.runs[0].curve]:
        then = [_at(run, step, comparison.config["steps"]) for run in runs]
        if all(then):
            found[step] = compare([run for run in then if run], comparison.config, comparison.score)
    return found


def _at(result: Result, step: int, base_steps: int) -> Result | None:
    """A result as it was when base was at a step; None before its first evaluation."""
    own_steps = result.changes.get("steps", base_steps)
    past = [point for point in result.curve if point[0] * base_steps <= step * own_steps]
    if not past:
        return None
    scores = dict(zip(("perplexity", *result.measures), past[-1][2:], strict=False))
    return dataclasses.replace(result, scores={"valid": scores})


def curve_of(run: Result, measure: Measure) -> dict[float, float]:
    """A measure by step, as it is averaged; without points that are not finite or have not the measure."""
    points = {}
    for step, _, *values in run.curve:
        scores = dict(zip(("perplexity", *run.measures, "source_gain"), values, strict=False))
        if measure is not SOURCE_GAIN or "source_gain" in scores:
            points[step] = measure.of(scores)
    return {step: value for step, value in points.items() if math.isfinite(value)}


def _judged(result: Result) -> Result:
    if not result.finished or math.isfinite(reached := result.scores["valid"]["perplexity"]):
        return result
    return dataclasses.replace(result, status=FAILED, error=f"diverged: its perplexity is {reached}")


def _order(result: Result) -> tuple:
    """Rows as in table 3, then those beyond it and the user's own by their row and name, in which 200 precedes 1000."""
    names = list(beyond.ALL)
    place = names.index(result.row) if result.row in beyond.ALL else len(names)
    parts = re.split(r"(\d+(?:\.\d+)?)", result.variant)
    return result.variant not in table3.ROWS, place, [float(p) if i % 2 else p for i, p in enumerate(parts)]


def _entries(
    runs: Mapping[str, Sequence[Result]], base: str | None, measures: Sequence[Measure], other: Collection[str]
) -> list[Entry]:
    values = {
        measure: {variant: [measure.of(run.scores["valid"]) for run in runs[variant]] for variant in runs}
        for measure in measures
    }
    effects = {measure: _effects(measure, values[measure], base, other) for measure in measures}
    return [
        Entry(
            variant,
            table3.ROWS.get(variant),
            tuple(of_variant),
            {measure: statistics.mean(values[measure][variant]) for measure in measures},
            {measure: effects[measure][variant] for measure in measures if variant in effects[measure]},
        )
        for variant, of_variant in runs.items()
    ]


def _effects(
    measure: Measure, values: Mapping[str, Sequence[float]], base: str | None, other: Collection[str]
) -> dict[str, Effect]:
    """By variant; all of a measure are one family, whose p-values are corrected together."""
    if base is None:
        return {}
    ours = {variant: statistics.difference(values[variant], values[base]) for variant in values if variant != base}
    ps = {variant: difference.p for variant, difference in ours.items() if difference.p is not None}
    corrected = dict(zip(ps, statistics.holm(list(ps.values())), strict=True))
    return {
        variant: Effect(
            difference, corrected.get(variant), None if variant in other else _papers_effect(measure, variant)
        )
        for variant, difference in ours.items()
    }


def _papers_effect(measure: Measure, variant: str) -> float | None:
    row = table3.ROWS.get(variant)
    return measure.of_paper(row) - measure.of_paper(table3.ROWS["base"]) if row else None
