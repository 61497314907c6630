"""The report: what it says in Markdown, that the page says the same and needs nothing else, what its figures show."""

import base64
import dataclasses
import html.parser
import itertools
import math
import re
import xml.etree.ElementTree

import matplotlib
import numpy as np
import pytest

from tests.ablation import made
from tests.ablation.made import compare
from transformer_flax.ablation import comparison, figures, report, table3
from transformer_flax.ablation.comparison import BLEU, EXACT_MATCH, LOG_PERPLEXITY, agreement, over_training

SEEDS = {"base": 3, "A-h1": 2, "C-N2": 1}
PICTURES = {f"{name}.png" for name in report.PICTURES}


def unfinished():
    """A sweep with a bit of everything: a row that failed, one not run, one of one seed, and one that lacks a seed."""
    names = [name for name in table3.ROWS if name not in ("C-d256", "big")]
    missing = {("D-ls0.2", 1), ("D-ls0.2", 2), ("A-h32", 1)}
    kept = [result for result in made.sweep(names) if (result.variant, result.seed) not in missing]
    return [*kept, made.failed("big", 0, "out of memory")]


@pytest.fixture(scope="module")
def text():
    return text_of(unfinished())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return report.write(made.BASE, small(), tmp_path_factory.mktemp("report") / "table3" / "multi30k").parent


def cells(markdown: str, head: str) -> list[list[str]]:
    """Returns the cells of the table whose head begins with a word, line by line."""
    lines = markdown.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [rows[0], *rows[2:]]


def small(**fields) -> list:
    """A sweep that is quickly drawn."""
    return made.sweep(["base", "A-h1", "A-h4", "A-h16", "E"], range(2), **fields)


def text_of(results, base=made.BASE, pictures=()) -> str:
    """A report without its pictures, which take seconds to draw."""
    return report.as_markdown(comparison.compare(results, base["config"]), base, pictures)


class Page(html.parser.HTMLParser):
    """Parses a page: its tags, tables, images, and the addresses that it fetches."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.links, self.images, self.rows = [], [], [], []
        self._cell = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action") or name.startswith("on"):
                self.links.append(value)
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data


def test_every_effect_stands_beside_the_papers(text):
    head, *rows = cells(text, "row")
    assert head == [
        "row",
        *("log-perplexity, nats a piece", "paper's log-perplexity", "p (corrected)"),
        *("BLEU, points", "paper's BLEU", "p (corrected)"),
        "changes",
    ]
    compared = compare(unfinished())
    assert [row[0] for row in rows] == [entry.variant for entry in compared.rows if entry.effects]
    by_name = {row[0]: row for row in rows}
    for entry in compared.rows[1:]:
        effect, shown = entry.effects[BLEU], by_name[entry.variant][4]
        assert float(re.match(r"[*]*([-+\d.]+)", shown)[1]) == pytest.approx(effect.ours.value, abs=0.005)
        assert shown.startswith("**") == effect.significant
        if effect.ours.interval:
            half = (effect.ours.interval[1] - effect.ours.interval[0]) / 2
            assert float(re.search(r"± ([\d.]+)", shown)[1]) == pytest.approx(half, abs=0.005)
            assert by_name[entry.variant][6] == f"{effect.ours.p:.2g} ({effect.corrected_p:.2g})"
    assert by_name["A-h1"][7] == "num_heads 1, d_k 512, d_v 512"
    assert by_name["C-N2"][2] == f"{math.log(6.11 / 4.92):+.3f} ✓"
    assert by_name["C-N2"][5] == "-2.1 ✓"
    assert by_name["A-h16"][5] == "+0.0"  # the paper's effect has no sign
    assert by_name["D-ls0.2"][4:7] == [
        f"{compared.rows[-2].effects[BLEU].ours.value:+.2f}",
        "-0.1 ✓",
        "—",
    ]  # one seed


def test_every_score_stands_beside_the_papers(text):
    _, *rows = cells(text[text.index("## Scores") :], "row")
    by_name = {row[0]: row for row in rows}
    base = compare(unfinished()).base
    mean, (low, high) = base.means[BLEU].value, base.means[BLEU].interval
    assert by_name["base"][2:5] == ["4.92", f"{mean:.2f} [{low:.2f}, {high:.2f}]", "25.8"]
    assert by_name["base"][5:] == ["3.48", "65", "3", "3,000", "20.0", "1.23e14"]
    perplexities = [result.scores["valid"]["perplexity"] for result in unfinished() if result.variant == "base"]
    low, high = np.exp(base.means[LOG_PERPLEXITY].interval)
    assert by_name["base"][1] == f"{np.prod(perplexities) ** (1 / 3):.3f} [{low:.3f}, {high:.3f}]"
    assert by_name["D-ls0.2"][7] == "1"  # of seeds
    assert re.fullmatch(r"[\d.]+", by_name["D-ls0.2"][3])  # no interval


def test_what_is_missing_is_told_with_the_command_that_finishes_it(text):
    section = text[text.index("## What is missing") : text.index("## Effects")]
    for line in (
        "- big, seed 0, failed: out of memory",
        "- big: no seed 1 or 2",
        "- A-h32: no seed 1",
        "- D-ls0.2: no seed 1 or 2",
        "- of table 3, not run: C-d256",
        "python -m transformer_flax.sweep --config=configs/table3_small.py --rows=all --seeds=0,1,2",
    ):
        assert line in section.split("\n")
    assert "--rows=all --seeds=3,\n" in text_of([made.result("A-h1", 3, curve=[])])  # 3 alone, not 0, 1 and 2


def test_the_summary_counts_signs_and_ranks(text):
    first = text.split("\n## ")[0]
    assert "51 finished runs: 18 rows of the paper's table 3, 1 to 3 seeds each" in first
    assert re.search(
        r"\*\*BLEU\*\*: \*\*\d+ of the 16\*\* changes that made the paper's BLEU better or worse do the same here.*\. "
        r"Significant, of the 15 that can be tested: in the paper's direction [-\w., ]+; in the other none\. "
        r"Rank correlation with the paper's effects, over 17 rows: \*\*0\.\d\d\*\* \[0\.\d\d, \d\.\d\d\]",
        first,
    )
    assert re.search(r"\*\*Log-perplexity\*\*: \*\*\d+ of the 16\*\*", first)
    rho = agreement(compare(unfinished()), BLEU).correlation
    assert f"over 17 rows: **{rho.value:.2f}** [{rho.interval[0]:.2f}, {rho.interval[1]:.2f}]" in first


def test_the_page_needs_no_other_file_and_says_the_same(written):
    text, page = (written / "report.md").read_text(), Page((written / "index.html").read_text())
    assert [image["alt"] for image in page.images] == re.findall(r"!\[(.*?)\]", text)
    assert page.links == [image["src"] for image in page.images]
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert page.tags.count("script") == 1
    assert not re.search(r"url\(|@import|https?:", (written / "index.html").read_text())
    plain = [[cell.replace("**", "").replace("`", "") for cell in row] for row in cells(text, "row")]
    assert page.rows[: len(plain)] == plain


def test_pictures_on_the_page_take_the_readers_colours(written):
    for image in Page((written / "index.html").read_text()).images:
        svg = base64.b64decode(image["src"].split(",")[1]).decode()
        xml.etree.ElementTree.fromstring(svg)
        assert "prefers-color-scheme:dark" in svg
        assert svg.count(figures.INK) == 1  # the colour that the text is given on a light page
        assert svg.count("currentColor") > 50
        assert "fill: #ffffff" not in svg  # no white paper


def test_number_words_are_scored_by_exact_matches(tmp_path):
    results = made.sweep(["base", "A-h1", "A-h4", "B-dk16", "C-N2"], range(2), words=True, curve=[])
    text = text_of(results)
    assert cells(text, "row")[0][4:7] == ["exact match, % of sentences", "paper's BLEU", "p (corrected)"]
    assert re.search(r"\*\*Exact match\*\*: \*\*\d of the 4\*\* changes that made the paper's BLEU", text)
    assert "BLEU counts four words, which these hardly have" in text
    assert "nrefs" not in text


def test_variants_of_ones_own_have_a_table_of_their_own(tmp_path):
    own = [made.result("base model.dropout=0.3", seed, row="base", bleu=30 + seed, curve=[]) for seed in range(2)]
    text = text_of([*small(curve=[]), *own])
    head, row = cells(text, "variant")
    assert not any("paper" in name for name in head)
    assert row[0] == "base model.dropout=0.3"
    assert "base model.dropout=0.3" not in [row[0] for row in cells(text, "row")]
    assert "5 rows of the paper's table 3 and 1 variant" in text


def test_a_grid_alone_is_not_held_against_the_paper():
    grid = [
        made.result(f"base model.dropout={rate}", row="base", changes={"model.dropout": rate} if rate else {}, curve=[])
        for rate in (0.0, 0.1)
    ]
    text = text_of(grid, made.BASE | {"sessions": [made.SESSION | {"commit": ""}]})
    assert text.startswith("# A sweep of dropout on multi30k\n\n2 finished runs: 2 variants, one seed")
    assert cells(text, "variant")[1][0] == "base model.dropout=0.1"
    assert "Differences from base model.dropout=0.0" in text
    assert not re.search("Rank correlation|not run|paper|newstest", text)


def test_fields_of_one_name_are_told_apart_by_their_sections():
    base, names = made.BASE, ("data.name", "optimizer.name")
    base = base | {"config": base["config"] | dict.fromkeys(names, "")}
    own = made.result("base optimizer.name=muon", row="base", changes={"optimizer.name": "muon", "model.d_ff": 8})
    text = text_of([made.result("base", changes={}), own], base)
    assert text.startswith("# A sweep of d_ff and optimizer.name on multi30k\n")
    assert cells(text, "variant")[1][-1] == "optimizer.name muon, d_ff 8"


def test_base_stands_beside_the_papers_if_it_is_the_papers_or_rows_of_the_paper_were_run():
    runs = [made.result("base", curve=[]), made.result("rotary", curve=[])]
    text = text_of(runs)
    assert text.startswith(
        "# A sweep of positions on multi30k\n\n2 finished runs: base and 1 row beyond table 3, one seed"
    )
    assert [row[0] for row in cells(text[text.index("## Scores") :], "variant")[1:]] == ["base", "rotary"]
    assert not re.search("paper|newstest", text)
    papers = made.BASE | {"config": made.CONFIG | table3.PAPER_BASE | table3.PAPER_ABSOLUTE}
    for beside in (text_of(runs, papers), text_of([*runs, made.result("A-h1", curve=[])])):
        assert cells(beside[beside.index("## Scores") :], "row")[1][:3] == ["base", "6.000", "4.92"]
        assert "The base, beside the paper's:" in beside


def test_fields_that_another_kind_of_model_lacks_are_not_beside_the_papers():
    config = {field: value for field, value in made.CONFIG.items() if field != "model.d_ff"}
    text = text_of([made.result(name, curve=[]) for name in ("base", "D-drop0.0")], made.BASE | {"config": config})
    assert "| `model.d_model` | 192 | 512 |" in text
    assert "d_ff" not in text


def test_the_last_evaluation_of_some_sentences_says_so():
    base = made.BASE | {"config": made.CONFIG | {"eval.final_sentences": 1_000}}
    said = "of the validation split (its first 1,000 sentences; perplexities are of all) at the end of training"
    assert said in text_of(small(curve=[]), base)


def test_a_sweep_without_a_finished_run_tells_nothing_of_scores():
    assert "BLEU, which counts" not in text_of([made.failed("base", 0, "out of memory")])


def test_the_text_that_bleu_is_of_is_named():
    assert "BLEU is sacreBLEU's, of detokenised, cased text: " in text_of(small())
    for lowercase, tokenized, said in (
        (True, False, "detokenised, lower-cased"),
        (False, True, "tokenised, cased"),
        (True, True, "tokenised, lower-cased"),
    ):
        config = made.CONFIG | {"data.lowercase": lowercase, "data.tokenized": tokenized}
        assert f"BLEU is sacreBLEU's, of {said} text" in text_of(small(), made.BASE | {"config": config})
    first, *others = small()
    for signature, text in {
        first.signature.replace("2.", "1."): "detokenised, cased text",
        first.signature.replace("mixed", "lc"): "different texts, so the scores do not compare",
    }.items():
        assert signature != first.signature
        mixed = [dataclasses.replace(first, signature=signature), *others]
        assert f"BLEU is sacreBLEU's, of {text}: " in text_of(mixed)


def test_perplexities_of_other_pieces_are_not_for_comparison():
    told = "Only their scores compare with base's"
    assert told in text_of([made.result("base"), made.result("bpe-dropout")])
    fewer = [made.result("base"), made.result("base data.num_pairs=9", row="base", changes={"data.num_pairs": 9})]
    assert told in text_of(fewer)
    pieces = "vocab_size", "tokenizer", "tokenizer_file", "lowercase"
    for name in (*pieces, "tokenizer_sample", "held_out", "seed", "source", "name", "path", "longest_trained"):
        changes = {"model.d_ff": 9}, {f"data.{name}": 9}
        own = [made.result(variant, row="base", changes=each) for variant, each in zip("ab", changes, strict=True)]
        assert told in text_of([made.result("base"), *own]), name
    reversed_ = {"data.source_language": "de", "data.target_language": "en"}
    for changes in (reversed_, {"init_from": "runs/other"}):
        assert told in text_of([made.result("base"), made.result("own", row="base", changes=changes)])
    given = made.BASE | {"config": made.CONFIG | {"data.tokenizer_file": "tokenizer.json"}}
    assert told not in text_of(fewer, given)
    assert told not in text_of([made.result("base"), made.result("muon")])


def test_scores_of_another_text_are_not_for_comparison():
    own, other = {"valid": "0123"}, {"valid": "4567"}
    grid = [
        made.result("base", fingerprints=own),
        made.result("more", row="base", changes={"data.num_pairs": 9}, fingerprints=own),
        made.result("held", row="base", changes={"data.held_out": 0.5}, fingerprints=other),
        made.result("old", row="base", changes={"data.held_out": 0.4}),
    ]
    text = text_of(grid)
    assert "**Of another validation text** than base, so without effects: held." in text
    assert [row[0] for row in cells(text, "variant")[1:]] == ["more", "old"]
    assert [row[0] for row in cells(text[text.index("## Scores") :], "variant")[1:]] == ["base", "held", "more", "old"]
    for together in (grid[:2], [grid[0], grid[3]], grid[1:]):
        assert "another validation text" not in text_of(together)


@pytest.mark.parametrize(("change", "compares"), [("lowercase", True), ("held_out", False)])
def test_labels_of_normalised_texts_are_for_comparison(change, compares):
    base = made.result("base", fingerprints={"valid": "0123"})
    own = made.result("own", row="base", changes={f"data.{change}": 0.5}, fingerprints={"valid": "4567"})
    labels = {"valid": {"perplexity": 2.0, "accuracy": 0.6, "macro_f1": 0.5}}
    few = made.BASE | {"config": made.CONFIG | {"eval.sentences": 5, "eval.final_sentences": 5}}
    runs = [dataclasses.replace(each, scores=labels, signature="", curve=[]) for each in (base, own)]
    text = text_of(runs, few, ["curves_score"])
    assert not re.search("first 5 sentences|Only their scores", text)  # accuracy is of all, perplexities are of labels
    assert ("another validation text" not in text) == ("## Effects" in text) == compares


def test_every_change_is_named():
    changes = {"model.d_ff": 8, "eval.patience": 1}
    row = cells(text_of([made.result("base"), made.result("own", row="base", changes=changes)]), "variant")[1]
    assert row[-1] == "d_ff 8, patience 1"


def test_steps_and_operations_are_of_all_seeds():
    runs = [made.result("base", seed, steps=steps, flops=1e9 * steps) for seed, steps in enumerate((300, 900, 900))]
    assert "| 300 to 900 |" in text_of(runs)
    assert "| 7.00e11 |" in text_of(runs)


def test_with_one_seed_there_are_no_intervals_and_no_tests():
    text = text_of(made.sweep(["base", "A-h1"], range(1), curve=[]))
    assert "**One seed:** no intervals and no tests." in text
    assert "significant, in" not in text
    assert "±" not in text.split("## How")[0]


def test_without_base_there_are_scores_but_no_effects(tmp_path):
    for name in report.PICTURES:  # of a former report
        (tmp_path / f"{name}.png").touch()
    text = report.write(made.BASE, [made.result("A-h1", curve=[])], tmp_path).read_text()
    assert "**There is no base among the finished runs,** so no effects: add `base` to `--rows`" in text
    assert "## Effects" not in text
    assert cells(text, "row")[1][0] == "A-h1"
    assert {file.name for file in tmp_path.glob("*.png")} == {"scores.png"}  # those of the former report are gone


def test_seeds_may_differ_by_whatever_a_float_can_hold(tmp_path):
    results = [made.result(perplexity=value, seed=seed) for seed, value in enumerate([5.0, 1e50])]
    text = text_of([*results, *made.sweep(["A-h1"], range(2))])
    assert cells(text, "row")[1][0] == "A-h1"


def test_curves_say_of_how_many_sentences_they_are(tmp_path):
    base = made.BASE | {"config": made.CONFIG | {"eval.sentences": 100}}
    text = text_of(small(), base, ["curves_score"])
    assert "Scores before the last step are of the first 100 sentences, perplexities of all." in text
    assert "of the first" not in text_of(small(), pictures=["curves_score"])


def test_all_commands_machines_and_versions_are_named_once(tmp_path):
    there = {"hardware": "1 x H100", "versions": {"jax": "0.11.2"}, "commit": "89ab"}
    sessions = [made.SESSION, made.SESSION | there, made.SESSION | {"command": "python -m transformer_flax.sweep"}]
    results = [made.result("base", curve=[]), made.failed("base", 1, "killed")]
    text = text_of(results, made.BASE | {"sessions": sessions})
    section = text[text.index("## What was swept") :].split("The base,")[0]
    assert section.count(made.SESSION["command"]) == 1
    assert section.count("\npython -m transformer_flax.sweep\n") == 1
    assert (
        "- Commit 0123abc, on 2 cores, with flax 0.12.8, jax 0.10.2.\n- Commit 89ab, on 1 x H100, with jax" in section
    )
    assert section.count("- ") == 2
    missing = text[text.index("## What is missing") : text.index("## Scores")]
    assert "```\npython -m transformer_flax.sweep --seeds=0,1\n```" in missing  # the newest


def test_a_stopped_sweep_lacks_the_seeds_that_it_was_asked_for(tmp_path):
    sessions = [
        made.SESSION | {"command": f"python -m sweep{flags}"} for flags in (" --seeds=9", " --seeds 1,3 --jobs=2")
    ]
    file = report.write(made.BASE | {"sessions": sessions}, [made.result("base", 0)], tmp_path)
    missing = file.read_text().split("## What is missing")[1]
    assert "- base: no seed 1 or 3\n" in missing
    assert "python -m sweep --jobs=2 --seeds=0,1,3\n" in missing


def test_an_effect_of_zero_lacks_the_papers_sign():
    results = [made.result("base"), *(made.result(row, bleu=bleu) for row, bleu in (("A-h1", 34.0), ("A-h4", 33.0)))]
    text = text_of(results)
    assert "| -1.00 | -0.3 ✓ |" in text
    assert "| +0.00 | -0.9 ✗ |" in text


def test_effects_that_are_all_zero_have_no_mark():
    text = text_of([made.result("base"), made.result("A-h1")])
    assert "| +0.00 | -0.9 |" in text
    assert "✓ |" not in text
    assert "✗ |" not in text


@pytest.mark.parametrize(("seeds", "asked"), [("", [0]), (" --seeds=3", [0, 1, 2]), (" --seeds=3,", [3])])
def test_a_sweep_was_asked_for_the_seeds_that_its_command_means(seeds, asked):
    assert [*report._seeds_of(f"python -m sweep --rows=all{seeds} --jobs=2")] == asked


def test_a_row_that_is_no_change_is_told(tmp_path):
    base = made.BASE | {"config": made.CONFIG | {"model.dropout": 0.2}}
    results = [made.result(name, changes={}, curve=[]) for name in ("base", "D-drop0.2")]
    text = text_of(results, base)
    assert "as they change this base in no or the opposite direction: D-drop0.2." in text
    assert cells(text, "row")[1][2] == "—"
    assert "do the same here" not in text


def test_seeds_that_all_find_the_same_cannot_be_tested(tmp_path):
    scores = {"base": (30.0, 30.0), "A-h1": (29.0, 29.0), "C-N2": (20.0, 21.0)}
    results = [made.result(name, seed, bleu=scores[name][seed], curve=[]) for name in scores for seed in range(2)]
    text = text_of(results)
    assert re.search(
        r"BLEU\*\*: \*\*2 of the 2\*\* .* do the same here\. Significant, of the 1 that can be tested:", text
    )


def test_a_sweep_in_which_every_run_failed_is_told(tmp_path):
    text = text_of([made.failed("base", 0, "out of memory")])
    assert "No run has finished." in text
    assert "- base, seed 0, failed: out of memory" in text


def test_what_others_wrote_is_shown_and_not_obeyed(tmp_path):
    evil = "<script>alert(1)</script> | ![x](http://evil/x.png) [y](javascript:z) `*_b_*"
    bad = [made.failed("base", 9, f"{evil}\n# no title"), made.result(f"own {evil}", row="base", curve=[])]
    base = made.BASE | {"sessions": [made.SESSION | {"hardware": evil}], "name": evil}
    path = report.write(base, [*made.sweep(["base", "A-h1"], range(2), curve=[]), *bad], tmp_path)
    page = Page((tmp_path / "index.html").read_text())
    assert page.tags.count("script") == 1
    assert all(link.startswith("data:") for link in page.links)
    assert page.tags.count("h1") == 1
    assert [row for row in page.rows if row[0] == f"own {evil}"]
    assert len({len(row) for row in cells(path.read_text(), "variant")}) == 1


@pytest.fixture
def style():
    with matplotlib.rc_context(figures.STYLE):
        yield


def marks(axes, marker: str) -> dict[int, float]:
    """Returns where the marks of a form are, by line."""
    drawn = [line for line in axes.lines if line.get_marker() == marker]
    return {round(line.get_ydata()[0]): line.get_xdata()[0] for line in drawn}


@pytest.mark.usefixtures("style")
def test_the_figure_of_differences_shows_ours_and_the_papers():
    compared = compare(unfinished())
    left, right = figures.differences(compared).axes
    for axes, measure in ((left, LOG_PERPLEXITY), (right, BLEU)):
        entries = compared.rows[1:]
        names = [label.get_text() for label in left.get_yticklabels()]
        assert names == [entry.variant for entry in entries]
        assert marks(axes, "o") == {y: entry.effects[measure].ours.value for y, entry in enumerate(entries)}
        assert marks(axes, "D") == {y: entry.effects[measure].paper for y, entry in enumerate(entries)}
        intervals = [entry.effects[measure].ours.interval for entry in entries]
        bars = [tuple(line.get_xdata()) for line in axes.lines if line.get_gid() == "interval"]
        assert bars == [interval for interval in intervals if interval]
        filled = [line.get_markerfacecolor() != "none" for line in axes.lines if line.get_marker() == "o"]
        assert filled == [entry.effects[measure].significant for entry in entries]
        assert f"({'more' if measure is BLEU else 'less'} is better)" in axes.get_xlabel()


@pytest.mark.usefixtures("style")
@pytest.mark.parametrize("share", [0.1, 0.7, 1.0])
def test_axes_without_a_spread_are_not_those_of_rounding(share):
    runs = [made.result(name, seed, bleu=0.0, exact_match=share) for name, n in SEEDS.items() for seed in range(n)]
    compared = compare([*runs, made.result("A-h4", seed=0, bleu=0.0, exact_match=share * (1 + 1e-15))])
    for figure in (figures.differences(compared), figures.scores(compared), figures.curves(compared, EXACT_MATCH)):
        figure.draw_without_rendering()
        for axes in figure.axes:
            for low, high in (axes.get_xlim(), axes.get_ylim()):
                assert high - low > 0.001 or low - high > 0.001  # y of the differences is inverted


@pytest.mark.usefixtures("style")
def test_two_rows_without_a_difference_have_room_for_labels_and_marks():
    own = [made.result(f"{rate}", row="base", changes={"model.dropout": rate}, bleu=0.0) for rate in (0.05, 0.2)]
    figure = figures.differences(compare([made.result("base", bleu=0.0), *own]))
    figure.draw_without_rendering()
    for axes in figure.axes:
        frame = axes.get_window_extent()
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        shown = [box for box in boxes if frame.x0 <= (box.x0 + box.x1) / 2 <= frame.x1]
        assert len(shown) > 2
        assert all(left.x1 + 3 < right.x0 for left, right in itertools.pairwise(shown))
        assert axes.get_ylim() == (1.5, -0.5)


@pytest.mark.usefixtures("style")
def test_where_the_units_differ_the_paper_has_an_axis_of_its_own():
    compared = compare(made.sweep(["base", "A-h1", "C-N2", "C-ff4096"], words=True))
    figure = figures.differences(compared)
    figure.draw_without_rendering()
    _, right = figure.axes
    (top,) = right.child_axes
    theirs = {y: entry.effects[EXACT_MATCH].paper for y, entry in enumerate(compared.rows[1:])}
    stretched = {y: x * top.get_xlim()[0] / right.get_xlim()[0] for y, x in marks(right, "D").items()}
    assert stretched == pytest.approx(theirs)
    assert min(marks(right, "D").values()) == pytest.approx(min(marks(right, "o").values()))
    equal = [made.result(row, bleu=0.0, exact_match=1.0) for row in ("base", "A-h1", "C-N2")]
    assert figures.differences(compare(equal)).axes[1].child_axes


@pytest.mark.usefixtures("style")
def test_each_point_of_the_figure_of_scores_is_told_apart_by_the_legend():
    own = [made.result(f"own {number}", row="base", changes={"a.b": number}) for number in range(30)]
    compared = compare([*made.sweep(), *own])
    figure = figures.scores(compared)
    here, paper = figure.axes
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    looks = [(line.get_marker(), line.get_color()) for line in legend.get_lines()]
    assert names[:20] == list(table3.ROWS)
    assert len(names) == len(set(names)) == len(set(looks)) == 50
    drawn = [(line.get_marker(), line.get_color()) for line in here.lines if line.get_marker() != "None"]
    assert [look for look in drawn if look in looks] == looks
    points = {(line.get_marker(), line.get_color()): line.get_xydata()[0].tolist() for line in paper.lines}
    assert points == {look: [row.perplexity, row.bleu] for look, row in zip(looks, table3.ROWS.values(), strict=False)}
    for entry, (_, _, bars) in zip(compared.rows, here.containers, strict=False):  # across and upright
        ends = [bar.get_segments()[0][:, axis] for axis, bar in enumerate(bars)]
        intervals = [[*map(m.level, entry.means[m].interval)] for m in (LOG_PERPLEXITY, BLEU)]
        np.testing.assert_allclose(ends, intervals)


@pytest.mark.usefixtures("style")
def test_a_curve_is_the_mean_of_its_seeds_where_all_have_a_point():
    curves = [
        [made.point(100, 8.0, 10.0), made.point(200, 4.0, 20.0)],
        [made.point(100, 2.0, 14.0), made.point(150, 2.0, 1.0)],
    ]
    runs = [made.result("base", seed, curve=curve) for seed, curve in enumerate(curves)]
    for measure, mean, first, last in ((BLEU, 12, 10, 20), (LOG_PERPLEXITY, 4, 8, 4)):  # of perplexity the geometric
        (axes,) = figures.curves(compare([*runs, made.result("E", curve=curves[0])]), measure).axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert lines["base"] == [[100, pytest.approx(mean)]]
        assert lines["E"] == [[100, pytest.approx(first)], [200, pytest.approx(last)]]
        assert len(axes.lines) == 2 + 2  # and the two seeds of base


@pytest.mark.usefixtures("style")
def test_seeds_that_differ_much_do_not_move_all_points_into_one():
    results = [made.result("base", seed, perplexity=5 + seed / 10, bleu=30 + seed) for seed in range(3)]
    results += [made.result("A-h1", seed, perplexity=4 + 2 * seed, bleu=20 + 9 * seed) for seed in range(2)]
    compared = compare(results)
    for axes in figures.differences(compared).axes[:2]:
        low, high = axes.get_xlim()
        ends = [end for entry in compared.rows[1:] for end in entry.effects[BLEU].ours.interval]
        assert high - low < 30 < max(ends) - min(ends)
    assert figures.scores(compared).axes[0].get_ylim()[0] > 0


@pytest.mark.usefixtures("style")
def test_long_names_leave_room_for_the_pictures():
    axes = {"model.attention_dropout": (0.0, 0.1), "model.ffn_dropout": (0.0, 0.1), "optimizer.warmup_steps": (4, 8)}
    results = []
    for values in itertools.product(*axes.values()):
        changes = dict(zip(axes, values, strict=True))
        name = " ".join(["base", *(f"{field}={value}" for field, value in changes.items())])
        own = {} if values == (0.0, 0.0, 4) else changes
        results += [made.result(name, seed, row="base", changes=own, bleu=30 + seed) for seed in range(2)]
    for figure in (figures.scores, figures.differences):
        drawn = figure(compare(results))
        drawn.draw_without_rendering()
        widths = [axes.get_position().width * drawn.get_figwidth() for axes in drawn.axes]
        assert min(widths) > 2, widths
    compared = compare(results)
    drawn = figures.curves(compared, BLEU)
    drawn.draw_without_rendering()
    (axes,) = [axes for axes in drawn.axes if axes.get_visible()]
    assert axes.get_legend().get_window_extent().width < axes.get_window_extent().width
    colours = {line.get_label(): line.get_color() for line in axes.lines if not line.get_label().startswith("_")}
    assert colours == {entry.variant: figures._colour(entry, compared) for entry in compared.entries}


def test_variants_have_any_name():
    names = ["$x", "$a$ $b$", "_hidden", "$\\bad{$"]
    own = [made.result(name, row="base", changes={"model.d_ff": 1}) for name in names]
    compared = compare([made.result("base"), *own])
    figures.draw(compared)
    with matplotlib.rc_context(figures.STYLE):
        *_, axes = [axes for axes in figures.curves(compared, BLEU).axes if axes.get_visible()]
        assert {text.get_text() for text in axes.get_legend().get_texts()} == {"base", *names}
        assert {*names} <= {text.get_text() for text in figures.scores(compared).legends[0].get_texts()}


@pytest.mark.usefixtures("style")
def test_curves_have_a_panel_for_each_thing_that_varies():
    compared = compare([*made.sweep(seeds=range(1)), made.result("own", row="base")])
    axes = [axes for axes in figures.curves(compared, BLEU).axes if axes.get_visible()]
    assert [a.get_title(loc="left") for a in axes] == [
        *("num_heads, d_k, d_v", "d_k", "num_layers", "d_model, d_k, d_v", "d_ff", "dropout", "label_smoothing"),
        *("positions", "steps, d_model, d_ff, ...", "own"),
    ]
    labels = {label.get_label() for a in axes for label in a.lines}
    assert labels == {*table3.ROWS, "own"}
    assert all(a.lines[0].get_label() == "base" for a in axes)


def test_a_report_begins_with_what_agrees_with_the_paper():
    first = text_of(made.sweep()).split("\n\n")[1]
    assert first.startswith(
        "- **Log-perplexity**: **18 of the 18** changes that made the paper's log-perplexity better or worse do the "
        "same here. Significant: in the paper's direction A-h1, "
    )
    opposite = text_of(made.sweep(["base", "A-h1", "C-N2", "C-d1024"], effect=-2.0))
    assert opposite.split("\n\n")[1].startswith(
        "- **Log-perplexity**: **0 of the 3** changes that made the paper's log-perplexity better or worse do the same "
        "here (not A-h1, C-N2, C-d1024). Significant: in the paper's direction none; in the other A-h1, C-N2, C-d1024. "
        "They are too few, or too alike, for a rank correlation.\n- **BLEU**: **0 of the 3**"
    )


def test_agreement_over_training_is_that_of_the_evaluations_at_the_same_share_of_the_steps():
    def run(name, seed, early, late, steps=3_000):
        curve = [made.point(steps // 3, early, 1.0), made.point(steps, late, 2.0)]
        changes = {"steps": steps} if steps != 3_000 else {}
        return made.result(name, seed, perplexity=late, curve=curve, changes=changes, steps=steps)

    # Fewer layers are better at first, as in the paper they are not, and `big` is late; A-h1 is as in the paper.
    compared = compare(
        run(name, seed, early + seed / 100, late + seed / 100, **steps)
        for seed in range(2)
        for name, early, late, steps in [
            ("base", 8.0, 4.0, {}),
            ("A-h1", 9.0, 5.0, {}),
            ("C-N2", 7.0, 6.0, {}),
            ("big", 8.5, 3.0, {"steps": 9_000}),
            ("E", 8.0, 4.0, {}),
        ]
    )
    over_time = over_training(compared)
    assert list(over_time) == [1_000, 3_000]
    assert [len(agreement(then, LOG_PERPLEXITY).same) for then in over_time.values()] == [1, 3]
    for entry, now in zip(compared.entries, over_time[3_000].entries, strict=True):
        assert now.means[LOG_PERPLEXITY] == entry.means[LOG_PERPLEXITY]
    signs, ranks = figures.agreement_over_training(compared).axes
    assert signs.lines[0].get_xydata().tolist() == [[1_000, 1], [3_000, 3]]
    assert signs.lines[0].get_label() == "log-perplexity, of 3"
    assert signs.lines[1].get_ydata() == [1.5, 1.5]  # by chance
    rho = {step: agreement(then, LOG_PERPLEXITY).correlation for step, then in over_time.items()}
    assert ranks.lines[0].get_xydata().tolist() == [[step, each.value] for step, each in rho.items()]
    (shade,) = ranks.collections[0].get_paths()
    assert [*shade.get_extents().intervaly] == pytest.approx(rho[1_000].interval)  # at 3,000 rho is 1, without one
    assert all(tick == int(tick) for tick in signs.get_yticks())
    assert ranks.get_ylim() == (-1, 1)
    assert figures.agreement_over_training(compare(small())) is not None
    for without in (small(curve=[]), made.sweep(["base", "A-h1"])):  # evaluations; enough rows for a correlation
        assert figures.agreement_over_training(compare(without)) is None


def test_agreement_over_training_leaves_out_steps_at_which_a_row_was_not_evaluated():
    base, row = made.sweep(["base", "A-h1"], seeds=range(1))
    seldom = dataclasses.replace(row, curve=row.curve[4::5])
    assert [*over_training(compare([base, seldom]))] == [1_500, 3_000]
    out_of_patience = dataclasses.replace(row, curve=row.curve[:4])
    over_time = over_training(compare([base, out_of_patience]))
    assert [*over_time] == [*range(300, 3_001, 300)]
    assert [over_time[step].entries[1].runs[0].scores["valid"]["step"] for step in (900, 1_200, 3_000)] == [
        900,
        1_200,
        1_200,
    ]


def test_variants_beyond_table_3_do_not_change_the_agreement_over_training():
    rows = made.sweep(["base", "A-h1"])
    late = made.result(
        "batch-x4", steps=750, changes={"steps": 750}, curve=[made.point(750, 6.0, 34.0, source_gain=3.0)]
    )
    alone, among_others = (over_training(compare(results)) for results in (rows, [*rows, late]))
    assert [*among_others] == [*alone] == [*range(300, 3_001, 300)]


def test_the_same_results_give_the_same_files_whatever_their_order_and_what_lies_there(written, tmp_path):
    outside, second = tmp_path / "outside", tmp_path / "sweep/report"
    outside.mkdir()
    second.mkdir(parents=True)
    (outside / "notes.md").write_text("five years of work\n")
    for name in ("report.md", "index.html", *PICTURES):
        (second / name).symlink_to(outside / "notes.md")
    report.write(made.BASE, small()[::-1], second)
    files = {file.name: file.read_bytes() for file in written.iterdir()}
    assert files.keys() == {"report.md", "index.html", *PICTURES}
    assert files == {file.name: file.read_bytes() for file in second.iterdir()}
    assert not any(file.is_symlink() for file in second.iterdir())
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"notes.md": "five years of work\n"}
