"""A sweep's results are compared with the paper's."""

import math
import random

import pytest

from tests.ablation import made
from tests.ablation.made import compare
from transformer_flax.ablation import comparison, statistics, table3
from transformer_flax.ablation.comparison import BLEU, EXACT_MATCH, LOG_PERPLEXITY, agreement
from transformer_flax.errors import UserError


def entry(comparison, variant):
    (found,) = (entry for entry in comparison.entries if entry.variant == variant)
    return found


def test_an_effect_is_the_difference_from_base_beside_the_papers():
    base = [made.result("base", seed, bleu=34 + seed, perplexity=6 + seed) for seed in range(3)]
    one_head = [made.result("A-h1", seed, bleu=33 + seed / 2, perplexity=7 + seed) for seed in range(3)]
    found = entry(compare(base + one_head), "A-h1")
    assert found.means[BLEU] == statistics.mean([33, 33.5, 34])
    assert found.effects[BLEU].ours == statistics.difference([33, 33.5, 34], [34, 35, 36])
    assert found.effects[BLEU].paper == pytest.approx(24.9 - 25.8)
    logs = [[math.log(perplexity) for perplexity in side] for side in ([7, 8, 9], [6, 7, 8])]
    assert found.effects[LOG_PERPLEXITY].ours == statistics.difference(*logs)
    assert found.effects[LOG_PERPLEXITY].paper == pytest.approx(math.log(5.29 / 4.92))


def test_p_is_corrected_for_all_variants_of_a_measure():
    own = [made.result("base steps=200", seed, row="base", bleu=30.0 + seed) for seed in range(3)]
    comparison = compare(made.sweep() + own)
    assert len(comparison.rows) == 20
    effects = [entry.effects[BLEU] for entry in comparison.entries if entry.effects]
    assert len(effects) == 19 + 1
    assert [effect.corrected_p for effect in effects] == statistics.holm([effect.ours.p for effect in effects])
    assert [effect.significant for effect in effects] == [effect.corrected_p < 0.05 for effect in effects]
    assert {effect.significant for effect in effects if effect.ours.p < 0.05} == {True, False}


def test_one_seed_has_no_test_and_leaves_the_others_theirs():
    several = made.sweep(["base", "A-h1", "A-h4"])
    found = compare([*several, made.result("E", 0, bleu=30)])
    assert entry(found, "E").effects[BLEU].corrected_p is None
    assert not entry(found, "E").effects[BLEU].significant
    assert entry(found, "A-h1").effects == entry(compare(several), "A-h1").effects


def test_the_score_is_bleu_unless_all_are_0_or_single_words_are_right_without_it():
    words = made.sweep(["base", "A-h1"], words=True)
    assert compare(words).score is EXACT_MATCH
    right = [result.scores["valid"]["exact_match"] for result in words if result.variant == "base"]
    assert entry(compare(words), "base").means[EXACT_MATCH].value == pytest.approx(100 * sum(right) / 3)
    assert compare([*words, made.result("E", bleu=20.0)]).score is EXACT_MATCH  # an output of four words in one run
    sentences = made.sweep(["base", "A-h1"])
    assert compare(sentences).score is BLEU
    empty = made.result("E", bleu=0.0)
    empty.scores["valid"]["exact_match"] = 0.0
    assert compare([*sentences, empty]).score is BLEU


def test_the_order_in_which_runs_finished_does_not_matter():
    results = [*made.sweep(), made.failed("E", 7, "killed")]
    shuffled = random.Random(0).sample(results, len(results))
    assert compare(shuffled) == compare(results)
    assert [entry.variant for entry in compare(shuffled).entries] == list(table3.ROWS)


def test_the_last_result_of_a_run_counts():
    again = [made.failed("base", 0, "killed"), made.result("base", 0), made.result("base", 0, bleu=31.0)]
    comparison = compare(again)
    assert not comparison.failed
    assert entry(comparison, "base").means[BLEU].value == 31


@pytest.mark.parametrize("perplexity", [math.inf, math.nan])
def test_a_run_that_diverged_has_failed(perplexity):
    comparison = compare([made.result("base", 0), made.result("base", 1, perplexity=perplexity)])
    assert len(entry(comparison, "base").runs) == 1
    assert [result.error for result in comparison.failed] == [f"diverged: its perplexity is {perplexity}"]


def test_what_is_missing_is_known():
    names = [name for name in table3.ROWS if name not in ("A-h1", "big")]
    results = [result for result in made.sweep(names) if (result.variant, result.seed) not in (("E", 1), ("B-dk16", 0))]
    compared = compare([*results, made.failed("big", 0, "out of memory")])
    assert compared.missing_rows == ["A-h1"]
    assert compared.missing_seeds == {"B-dk16": [0], "E": [1], "big": [1, 2]}
    assert [(result.variant, result.seed) for result in compared.failed] == [("big", 0)]
    assert compare(made.sweep()).missing_rows == []
    assert compare(made.sweep()).missing_seeds == {}
    asked = comparison.compare([made.result("base", 0)], made.CONFIG, asked=[0, 1])
    assert (asked.seeds, asked.missing_seeds) == ([0, 1], {"base": [1]})
    config = {name: value for name, value in made.CONFIG.items() if name not in ("model.num_heads", "model.d_k")}
    assert comparison.compare(results, config).missing_rows == []  # a model without heads has no such row


def test_variants_of_ones_own_follow_the_rows_by_their_numbers():
    own = [
        made.result(name, row=row)
        for row, name in [
            ("E", "E steps=20"),
            ("base", "base steps=1000"),
            ("base", "base steps=200"),
            ("base", "base steps=2e3"),
        ]
    ]
    comparison = compare([*own, made.result("base"), made.result("A-h1")])
    assert [entry.variant for entry in comparison.rows] == ["base", "A-h1"]
    assert [entry.variant for entry in comparison.own] == [
        "base steps=200",
        "base steps=1000",
        "base steps=2e3",
        "E steps=20",
    ]
    assert comparison.own[0].effects[BLEU].paper is None


def test_a_grid_without_the_row_base_is_compared_with_the_variant_that_changes_nothing():
    grid = [
        made.result(f"base model.dropout={rate}", row="base", bleu=30 + rate, changes={} if rate == 0.1 else {"x": 1})
        for rate in (0.0, 0.1, 0.2)
    ]
    comparison = compare(grid)
    assert comparison.base is comparison.entries[1]
    assert comparison.entries[2].effects[BLEU].ours.value == pytest.approx(0.1)
    assert comparison.missing_rows == []  # none of table 3 was asked for
    assert compare(grid[:1]).base is None
    assert compare(grid[:1]).entries[0].effects == {}


@pytest.mark.parametrize(("effect", "same", "rho"), [(3.0, 18, 1), (-3.0, 0, -1)])
def test_effects_that_are_the_papers_agree_and_their_opposites_do_not(effect, same, rho):
    results = [
        made.result(
            row.name,
            bleu=34 + effect * (row.bleu - 25.8),
            perplexity=6 * (row.perplexity / 4.92) ** effect,
        )
        for row in table3.ROWS.values()
    ]
    for measure in (BLEU, LOG_PERPLEXITY):
        found = agreement(compare(results), measure)
        assert (found.rows, len(found.same), found.tested) == (18, same, 0)  # A-h16, E: none
        assert found.significant_same == found.significant_other == []
        assert (found.ranked, found.correlation.value) == (19, pytest.approx(rho))


def test_runs_that_have_learned_nothing_neither_agree_nor_disagree():
    rows = {"base": 6.0, "A-h1": 7.0, "big": 5.0}
    results = [made.result(row, exact_match=0.0, bleu=0.0, perplexity=value) for row, value in rows.items()]
    comparison = compare(results)
    found = agreement(comparison, comparison.score)
    assert (comparison.score, found.rows, found.ranked) == (EXACT_MATCH, 0, 0)
    assert agreement(comparison, LOG_PERPLEXITY).rows == 2


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [
        ("model__dropout", 0.2, ["D-drop0.2"]),  # no change
        ("model__dropout", 0.3, ["D-drop0.2", "big"]),  # less of it, and none
        ("model__dropout", 0.0, ["D-drop0.0"]),
        ("label_smoothing", 0.3, ["D-ls0.2"]),
        ("model__positions", "learned", ["E"]),
        ("model__positions", "rotary", ["E"]),  # which learned ones would take the place of, not sinusoids
        ("model__dropout", 0.15, []),
    ],
)
def test_a_row_that_is_not_the_papers_change_on_this_base_is_not_held_against_it(field, value, other):
    comparison = compare(made.sweep(), **{field: value})
    assert comparison.other_changes == other
    assert [e.variant for e in comparison.rows if e.effects and e.effects[BLEU].paper is None] == other
    assert agreement(comparison, BLEU).ranked == 19 - len(other)
    assert agreement(comparison, BLEU).rows == 18 - len(other)


def test_a_row_that_changes_nothing_is_not_what_others_are_compared_with():
    rows = [made.result("D-drop0.2", changes={}), made.result("A-h1")]
    assert compare(rows, model__dropout=0.2).base is None


def test_agreement_counts_what_is_significant():
    comparison = compare(made.sweep(effect=-5.0))
    found = agreement(comparison, BLEU)
    effects = {e.variant: e.effects[BLEU] for e in comparison.rows if e.effects}
    assert found.tested == 18
    assert found.significant_other == [name for name, each in effects.items() if each.significant and each.paper]
    assert found.significant_other
    assert found.significant_same == []
    assert found.correlation.value < -0.8


def test_without_results_there_is_nothing_to_compare():
    with pytest.raises(UserError, match="there are no results to report yet"):
        compare([])


def test_a_sweep_in_which_all_failed_compares_nothing():
    comparison = compare([made.failed("base", 0, "out of memory")])
    assert (comparison.entries, comparison.base) == ([], None)
