"""The report: what it says in Markdown, that the page says the same and needs nothing else, what its figures show."""

import base64
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
from transformer_flax.ablation import figures, report, table3
from transformer_flax.ablation.comparison import BLEU, EXACT_MATCH, LOG_PERPLEXITY, agreement, over_training

PICTURES = {f"{name}.png" for name in report.PICTURES}


def unfinished():
    """A sweep with a bit of everything: a row that failed, one not run, one of one seed, and one that lacks a seed."""
    names = [name for name in table3.ROWS if name not in ("C-d256", "big")]
    missing = {("D-ls0.2", 1), ("D-ls0.2", 2), ("A-h32", 1)}
    kept = [result for result in made.sweep(names) if (result.variant, result.seed) not in missing]
    return [*kept, made.failed("big", 0, "out of memory")]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return report.write(unfinished(), made.BASE, tmp_path_factory.mktemp("report") / "table3" / "multi30k").parent


def cells(markdown: str, head: str) -> list[list[str]]:
    """Of the table whose head begins with a word, line by line."""
    lines = markdown.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [rows[0], *rows[2:]]


def small(**fields) -> list:
    """A sweep that is quickly drawn, the more so with `curve=[]`."""
    return made.sweep(["base", "A-h1", "E"], range(2), **fields)


class Page(html.parser.HTMLParser):
    """What a page holds and what it fetches."""

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


def test_every_effect_stands_beside_the_papers(written):
    head, *rows = cells((written / "report.md").read_text(), "row")
    assert head == [
        "row",
        *("log-perplexity, nats a piece", "paper's log-perplexity", "p (corrected)"),
        *("BLEU, points", "paper's BLEU", "p (corrected)"),
        "changes",
    ]
    comparison = compare(unfinished())
    assert [row[0] for row in rows] == [entry.variant for entry in comparison.rows if entry.effects]
    by_name = {row[0]: row for row in rows}
    for entry in comparison.rows[1:]:
        effect, shown = entry.effects[BLEU], by_name[entry.variant][4]
        assert float(re.match(r"[*]*([-+\d.]+)", shown)[1]) == pytest.approx(effect.ours.value, abs=0.005)
        assert shown.startswith("**") == effect.significant
        if effect.ours.interval:
            half = (effect.ours.interval[1] - effect.ours.interval[0]) / 2
            assert float(re.search(r"± ([\d.]+)", shown)[1]) == pytest.approx(half, abs=0.005)
    assert by_name["A-h1"][7] == "num_heads 1, d_k 512, d_v 512"
    assert by_name["C-N2"][2] == f"{math.log(6.11 / 4.92):+.3f} ✓"
    assert by_name["C-N2"][5] == "-2.1 ✓"
    assert by_name["A-h16"][5] == "+0.0"  # the paper's effect has no sign
    assert by_name["D-ls0.2"][4:7] == [
        f"{comparison.rows[-2].effects[BLEU].ours.value:+.2f}",
        "-0.1 ✓",
        "—",
    ]  # one seed


def test_every_score_stands_beside_the_papers(written):
    text = (written / "report.md").read_text()
    _, *rows = cells(text[text.index("## Scores") :], "row")
    by_name = {row[0]: row for row in rows}
    base = compare(unfinished()).base
    mean, (low, high) = base.means[BLEU].value, base.means[BLEU].interval
    assert by_name["base"][2:5] == ["4.92", f"{mean:.2f} [{low:.2f}, {high:.2f}]", "25.8"]
    assert by_name["base"][5:] == ["3.48", "65", "3", "3,000", "20.0", "1.23e14"]
    perplexities = [result.scores["valid"]["perplexity"] for result in unfinished() if result.variant == "base"]
    assert by_name["base"][1].startswith(f"{np.prod(perplexities) ** (1 / 3):.3f} [")
    assert by_name["D-ls0.2"][7] == "1"  # of seeds
    assert re.fullmatch(r"[\d.]+", by_name["D-ls0.2"][3])  # no interval


def test_what_is_missing_is_told_with_the_command_that_finishes_it(written):
    text = (written / "report.md").read_text()
    section = text[text.index("## What is missing") : text.index("## Effects")]
    for line in (
        "- big, seed 0, failed: out of memory",
        "- big: no seed 1 or 2",
        "- A-h32: no seed 1",
        "- D-ls0.2: no seed 1 or 2",
        "- of table 3, not run: C-d256",
        made.SESSION["command"],
    ):
        assert line in section.split("\n")


def test_the_summary_counts_signs_and_ranks(written):
    first = (written / "report.md").read_text().split("\n## ")[0]
    assert "51 finished runs: 18 rows of the paper's table 3, 1 to 3 seeds each" in first
    assert re.search(
        r"\*\*BLEU\*\*: of 16 rows in which the paper sees an effect, \*\*\d+\*\* have its sign here\. "
        r"In \d+ of the 15 that can be tested the effect is significant, in \d+ of these with the paper's sign\. "
        r"Rank correlation of our effects and the paper's, over 17 rows: \*\*0\.\d\d\*\* \[0\.\d\d, \d\.\d\d\]",
        first,
    )
    assert "**Log-perplexity**: of 16 rows" in first


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


def test_the_same_results_give_the_same_files_whatever_their_order(tmp_path):
    first = report.write(small(), made.BASE, tmp_path / "first").parent
    second = report.write(small()[::-1], made.BASE, tmp_path / "second").parent
    files = {file.name: file.read_bytes() for file in first.iterdir()}
    assert files.keys() == {"report.md", "index.html", *PICTURES}
    assert files == {file.name: file.read_bytes() for file in second.iterdir()}


def test_number_words_are_scored_by_exact_matches(tmp_path):
    results = made.sweep(["base", "A-h1", "A-h4", "B-dk16", "C-N2"], range(2), words=True, curve=[])
    text = report.write(results, made.BASE, tmp_path).read_text()
    assert cells(text, "row")[0][4:7] == ["exact match, % of sentences", "paper's BLEU", "p (corrected)"]
    assert "**Exact match**, beside the paper's BLEU: of 4 rows" in text
    assert "BLEU, which counts four words, is 0 in all runs" in text
    assert "nrefs" not in text


def test_variants_of_ones_own_have_a_table_of_their_own(tmp_path):
    own = [made.result("base model.dropout=0.3", seed, row="base", bleu=30 + seed, curve=[]) for seed in range(2)]
    text = report.write([*small(curve=[]), *own], made.BASE, tmp_path).read_text()
    head, row = cells(text, "variant")
    assert not any("paper" in name for name in head)
    assert row[0] == "base model.dropout=0.3"
    assert "base model.dropout=0.3" not in [row[0] for row in cells(text, "row")]
    assert "3 rows of the paper's table 3 and 1 variant of other fields" in text


def test_a_grid_alone_is_not_held_against_the_paper(tmp_path):
    grid = [
        made.result(f"base model.dropout={rate}", row="base", changes={"model.dropout": rate} if rate else {}, curve=[])
        for rate in (0.0, 0.1)
    ]
    path = report.write(grid, made.BASE | {"sessions": [made.SESSION | {"commit": ""}]}, tmp_path)
    text = path.read_text().split("## What was swept")[0]
    assert text.startswith("# A sweep on multi30k\n\n2 finished runs: 2 variants of other fields, one seed each.")
    assert cells(text, "variant")[1][0] == "base model.dropout=0.1"
    assert "Differences from base model.dropout=0.0" in text
    assert "Rank correlation" not in text
    assert "not run" not in text


def test_one_seed_says_that_it_tells_nothing_of_chance(tmp_path):
    text = report.write(made.sweep(["base", "A-h1"], range(1), curve=[]), made.BASE, tmp_path).read_text()
    assert "**One seed tells nothing about chance:** there are no intervals and no tests." in text
    assert "significant, in" not in text
    assert "±" not in text.split("## How")[0]


def test_without_base_there_are_scores_but_no_effects(tmp_path):
    report.write(small(), made.BASE, tmp_path)
    text = report.write([made.result("A-h1", curve=[])], made.BASE, tmp_path).read_text()
    assert "**There is no base among the finished runs,**" in text
    assert "## Effects" not in text
    assert cells(text, "row")[1][0] == "A-h1"
    assert {file.name for file in tmp_path.glob("*.png")} == {"scores.png"}  # those of the former report are gone


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ([made.result("A-h1", curve=[])], "add `base` to `--rows`"),
        ([made.result("A-h1", curve=[]), made.failed("base", 0, "killed")], "it has failed"),
        (
            [made.result(f"base steps={n}", row="base", changes={"steps": n}, curve=[]) for n in (1, 2)],
            "give the grid the base's own values, too",
        ),
    ],
)
def test_how_a_base_is_come_by_is_told(tmp_path, results, why):
    text = report.write(results, made.BASE, tmp_path).read_text()
    assert f"**There is no base among the finished runs,** so no effects: {why}." in text


def test_seeds_may_differ_by_whatever_a_float_can_hold(tmp_path):
    results = [made.result(perplexity=value, seed=seed) for seed, value in enumerate([5.0, 1e50])]
    text = report.write([*results, *made.sweep(["A-h1"], range(2))], made.BASE, tmp_path).read_text()
    assert cells(text, "row")[1][0] == "A-h1"


def test_curves_say_of_how_many_sentences_they_are(tmp_path):
    base = made.BASE | {"config": made.CONFIG | {"eval.sentences": 100}}
    text = report.write(small(), base, tmp_path).read_text()
    assert "Scores before the last step are of the first 100 sentences, perplexities of all." in text
    assert "of the first" not in report.write(small(), made.BASE, tmp_path).read_text()


def test_all_commands_machines_and_versions_are_named_once(tmp_path):
    there = {"hardware": "1 x H100", "versions": {"jax": "0.11.2"}, "commit": "89ab"}
    sessions = [made.SESSION, made.SESSION | there, made.SESSION | {"command": "python -m transformer_flax.sweep"}]
    results = [made.result("base", curve=[]), made.failed("base", 1, "killed")]
    text = report.write(results, made.BASE | {"sessions": sessions}, tmp_path).read_text()
    section = text[text.index("## What was swept") :].split("The base,")[0]
    assert section.count(made.SESSION["command"]) == 1
    assert section.count("\npython -m transformer_flax.sweep\n") == 1
    assert (
        "- Commit 0123abc, on 2 cores, with flax 0.12.8, jax 0.10.2.\n- Commit 89ab, on 1 x H100, with jax" in section
    )
    assert section.count("- ") == 2
    missing = text[text.index("## What is missing") : text.index("## Scores")]
    assert "```\npython -m transformer_flax.sweep\n```" in missing  # the newest


def test_a_row_that_is_no_change_is_told(tmp_path):
    base = made.BASE | {"config": made.CONFIG | {"model.dropout": 0.2}}
    results = [made.result(name, changes={}, curve=[]) for name in ("base", "D-drop0.2")]
    text = report.write(results, base, tmp_path).read_text()
    assert "as they change this base in no or the opposite direction: D-drop0.2." in text
    assert cells(text, "row")[1][2] == "—"
    assert "of 0 rows" in text


def test_seeds_that_all_find_the_same_cannot_be_tested(tmp_path):
    scores = {"base": (30.0, 30.0), "A-h1": (29.0, 29.0), "C-N2": (20.0, 21.0)}
    results = [made.result(name, seed, bleu=scores[name][seed], curve=[]) for name in scores for seed in range(2)]
    text = report.write(results, made.BASE, tmp_path).read_text()
    assert re.search(r"BLEU\*\*: of 2 rows .* have its sign here\. In [01] of the 1 that can be tested", text)


def test_a_sweep_in_which_every_run_failed_is_told(tmp_path):
    text = report.write([made.failed("base", 0, "out of memory")], made.BASE, tmp_path).read_text()
    assert "No run has finished." in text
    assert "- base, seed 0, failed: out of memory" in text


def test_what_others_wrote_is_shown_and_not_obeyed(tmp_path):
    evil = "<script>alert(1)</script> | ![x](http://evil/x.png) [y](javascript:z) `*_b_*"
    bad = [made.failed("base", 9, f"{evil}\n# no title"), made.result(f"own {evil}", row="base", curve=[])]
    base = made.BASE | {"sessions": [made.SESSION | {"hardware": evil}], "name": evil}
    path = report.write([*made.sweep(["base", "A-h1"], range(2), curve=[]), *bad], base, tmp_path)
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
    """Where the marks of a form are, by line."""
    drawn = [line for line in axes.lines if line.get_marker() == marker]
    return {round(line.get_ydata()[0]): line.get_xdata()[0] for line in drawn}


@pytest.mark.usefixtures("style")
def test_the_figure_of_differences_shows_ours_and_the_papers():
    comparison = compare(unfinished())
    left, right = figures.differences(comparison).axes
    for axes, measure in ((left, LOG_PERPLEXITY), (right, BLEU)):
        entries = comparison.rows[1:]
        names = [label.get_text() for label in left.get_yticklabels()]
        assert names == [entry.variant for entry in entries]
        assert marks(axes, "o") == {y: entry.effects[measure].ours.value for y, entry in enumerate(entries)}
        assert marks(axes, "D") == {y: entry.effects[measure].paper for y, entry in enumerate(entries)}
        intervals = [entry.effects[measure].ours.interval for entry in entries]
        bars = [tuple(line.get_xdata()) for line in axes.lines if line.get_gid() == "interval"]
        assert bars == [interval for interval in intervals if interval]


@pytest.mark.usefixtures("style")
def test_where_the_units_differ_the_paper_has_an_axis_of_its_own():
    comparison = compare(made.sweep(["base", "A-h1", "C-N2", "C-ff4096"], words=True))
    figure = figures.differences(comparison)
    figure.draw_without_rendering()
    _, right = figure.axes
    (top,) = right.child_axes
    theirs = {y: entry.effects[EXACT_MATCH].paper for y, entry in enumerate(comparison.rows[1:])}
    stretched = {y: x * top.get_xlim()[0] / right.get_xlim()[0] for y, x in marks(right, "D").items()}
    assert stretched == pytest.approx(theirs)
    assert min(marks(right, "D").values()) == pytest.approx(min(marks(right, "o").values()))


@pytest.mark.usefixtures("style")
def test_no_name_covers_another_in_the_figure_of_scores():
    figure = figures.scores(compare(made.sweep()))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = {text.get_text(): matplotlib.text.Text.get_window_extent(text) for text in axes.texts}
        assert boxes.keys() == table3.ROWS.keys()
        covered = [(a, b) for a, b in itertools.combinations(boxes, 2) if boxes[a].padded(-1).overlaps(boxes[b])]
        assert covered == []


@pytest.mark.usefixtures("style")
def test_a_curve_is_the_mean_of_its_seeds_where_all_have_a_point():
    curves = [[[100, 1, 8.0, 10.0, 0.1], [200, 2, 4.0, 20.0, 0.2]], [[100, 1, 2.0, 14.0, 0.1], [150, 2, 2.0, 1, 0.1]]]
    runs = [made.result("base", seed, curve=curve) for seed, curve in enumerate(curves)]
    for measure, mean, first, last in ((BLEU, 12, 10, 20), (LOG_PERPLEXITY, 4, 8, 4)):  # of perplexity the geometric
        (axes,) = figures.curves(compare([*runs, made.result("E", curve=curves[0])]), measure).axes
        lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert lines["base"] == [[100, pytest.approx(mean)]]
        assert lines["E"] == [[100, pytest.approx(first)], [200, pytest.approx(last)]]
        assert len(axes.lines) == 2 + 2  # and the two seeds of base


def test_variants_have_any_name(tmp_path):
    names = ["$x", "$a$ $b$", "_hidden", "$\\bad{$"]
    own = [made.result(name, row="base", changes={"model.d_ff": 1}) for name in names]
    comparison = compare([*made.sweep(["base", "E"], range(2)), *own])
    figures.draw(comparison)
    with matplotlib.rc_context(figures.STYLE):
        *_, axes = [axes for axes in figures.curves(comparison, BLEU).axes if axes.get_visible()]
        assert {text.get_text() for text in axes.get_legend().get_texts()} == {"base", *names}
        (texts,) = {tuple(text.get_text() for text in axes.texts) for axes in figures.scores(comparison).axes[:1]}
        assert {*names} <= {*texts}


@pytest.mark.usefixtures("style")
def test_curves_have_a_panel_for_each_thing_that_varies():
    comparison = compare([*made.sweep(seeds=range(1)), made.result("own", row="base")])
    axes = [axes for axes in figures.curves(comparison, BLEU).axes if axes.get_visible()]
    assert [a.get_title(loc="left") for a in axes] == [
        title for title in figures.FAMILIES.values() if title != "base"
    ] + ["own"]
    labels = {label.get_label() for a in axes for label in a.lines}
    assert labels == {*table3.ROWS, "own"}
    assert all(a.lines[0].get_label() == "base" for a in axes)


def test_a_report_begins_with_what_agrees_with_the_paper(tmp_path):
    agreeing = report.write(made.sweep(curve=[]), made.BASE, tmp_path / "agreeing").read_text().split("\n\n")[1]
    assert agreeing.startswith(
        "**18 of the 18 changes of table 3 that made the paper's perplexity better or worse do the same here**. "
        "Significant in the paper's direction: A-h1, "
    )
    opposite = report.write(
        made.sweep(["base", "A-h1", "C-N2", "C-d1024"], effect=-2.0, curve=[]), made.BASE, tmp_path / "opposite"
    ).read_text()
    assert opposite.split("\n\n")[1] == (
        "**0 of the 3 changes of table 3 that made the paper's perplexity better or worse do the same here** "
        "(not A-h1, C-N2, C-d1024). Significant in the paper's direction: none. Significant in the other direction: "
        "A-h1, C-N2, C-d1024."
    )
    once = report.write(made.sweep(["base", "A-h1", "C-N2"], range(1), curve=[]), made.BASE, tmp_path / "once")
    assert "One seed cannot tell how much of it is chance." in once.read_text()


def test_agreement_over_training_is_that_of_the_evaluations_at_the_same_share_of_the_steps():
    def run(name, seed, early, late, steps=3_000):
        curve = [[steps // 3, 1, early, 1.0, 0.1], [steps, 2, late, 2.0, 0.1]]
        changes = {"steps": steps} if steps != 3_000 else {}
        return made.result(name, seed, perplexity=late, curve=curve, changes=changes, steps=steps)

    # Fewer layers are better at first, as in the paper they are not, and `big` is late; A-h1 is as in the paper.
    comparison = compare(
        run(name, seed, early + seed / 100, late + seed / 100, **steps)
        for seed in range(2)
        for name, early, late, steps in [
            ("base", 8.0, 4.0, {}),
            ("A-h1", 9.0, 5.0, {}),
            ("C-N2", 7.0, 6.0, {}),
            ("big", 8.5, 3.0, {"steps": 9_000}),
        ]
    )
    over_time = over_training(comparison)
    assert list(over_time) == [1_000, 3_000]
    assert [agreement(then, LOG_PERPLEXITY).same_sign for then in over_time.values()] == [1, 3]
    for entry, now in zip(comparison.entries, over_time[3_000].entries, strict=True):
        assert now.means[LOG_PERPLEXITY] == entry.means[LOG_PERPLEXITY]
    signs, ranks = figures.agreement_over_training(comparison).axes
    assert signs.lines[0].get_xydata().tolist() == [[1_000, 1], [3_000, 3]]
    assert ranks.get_ylim() == (-1, 1)
    assert figures.agreement_over_training(compare(made.sweep(["base", "A-h1"], curve=[]))) is None


def test_what_links_lead_to_is_not_changed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "notes.md").write_text("five years of work\n")
    folder = tmp_path / "sweep/report"
    folder.mkdir(parents=True)
    for name in ("report.md", "index.html", ".report.md.partial", *PICTURES):
        (folder / name).symlink_to(outside / "notes.md")
    written = report.write(small(), made.BASE, folder)
    assert written.read_text().startswith("# Table 3")
    assert {file.name for file in folder.iterdir()} == {"report.md", "index.html", *PICTURES}
    assert not any(file.is_symlink() for file in folder.iterdir())
    assert {file.name: file.read_text() for file in outside.iterdir()} == {"notes.md": "five years of work\n"}
