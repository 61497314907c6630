"""The page holds what the arrays hold, and works in a browser that has no network."""

import json
import re
import shutil

import numpy as np
import pytest

from tests.analysis.random_run import SOURCE, TARGET, random_run
from transformer_flax.analysis.attention import KINDS
from transformer_flax.analysis.attention_page import attention_page, write_page
from transformer_flax.analysis.plots import head_colours

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def attention():
    return random_run().attention(SOURCE, TARGET)


def data_of(page: str) -> list:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_holds_every_weight_and_needs_nothing_else(attention):
    page = attention_page(attention)
    [data] = data_of(page)
    assert (data["source"], data["target"]) == (SOURCE, TARGET)
    for kind in KINDS:
        np.testing.assert_allclose(
            np.array(data["kinds"][kind]["weights"]) / 1000, getattr(attention, kind), atol=0.00051
        )
        assert (tuple(data["kinds"][kind]["rows"]), tuple(data["kinds"][kind]["columns"])) == attention.labels(kind)
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)


def test_a_text_cannot_break_out_of_the_page():
    evil = "</script><img a=b><!-- {{DATA}}"
    page = attention_page(random_run().attention(evil, evil))
    assert "<img" not in page
    assert data_of(page)[0]["source"] == evil


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason='no playwright: pip install -e ".[browser]"')
    if BROWSER is None:
        pytest.skip("no browser: install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, attention, tmp_path):
    """The page as it is opened: a sentence and a text with everything that HTML could stumble over."""
    other = random_run().attention("</script><b>&amp; Ä", "<i>ö")
    write_page([attention, other], tmp_path / "attention.html")
    context = browser.new_context(offline=True, viewport={"width": 900, "height": 800})
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.extend([message.text] if message.type == "error" else []))
    page.on("request", lambda request: wrong.extend([] if request.url.startswith("file:") else [request.url]))
    page.goto((tmp_path / "attention.html").as_uri())
    yield page
    page.screenshot(path=tmp_path / "attention.png")
    context.close()
    assert wrong == []


def labels(page, side: str) -> tuple[str, ...]:
    return tuple(page.locator(f"#{side} li").all_text_contents())


def drawn(page) -> set[tuple[int, int, int]]:
    """The colours of all lines on the canvas."""
    script = """canvas => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), found = new Set();
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 20) found.add([data[i], data[i + 1], data[i + 2]].join());
        return [...found]; }"""
    return {tuple(map(int, colour.split(","))) for colour in page.locator("canvas").evaluate(script)}


def test_kind_layer_and_heads_are_chosen_by_clicks(page, attention):
    def pressed(group):
        return page.locator(f"#{group} button[aria-pressed=true]").all_text_contents()

    assert (pressed("kinds"), pressed("layers"), pressed("heads")) == (["cross"], ["2"], ["1", "2", "3"])
    for kind in KINDS:
        page.get_by_role("button", name=kind, exact=True).click()
        assert pressed("kinds") == [kind]
        assert (labels(page, "rows"), labels(page, "columns")) == attention.labels(kind)
        assert len(drawn(page)) > 10
    page.locator("#layers button").first.click()
    assert pressed("layers") == ["1"]
    page.locator("#none").click()
    assert pressed("heads") == []
    assert drawn(page) == set()
    page.locator("#heads button").nth(1).click()
    assert pressed("heads") == ["2"]
    assert drawn(page)
    page.locator("#all").click()
    page.locator("#heads button").nth(2).dblclick()
    assert pressed("heads") == ["3"]


def test_a_word_is_highlighted_with_what_it_attends_to(page, attention):
    page.locator("#layers button").nth(0).click()
    page.locator("#heads button").nth(2).dblclick()
    row = 1
    item = page.locator("#rows li").nth(row)
    item.hover()
    assert item.get_attribute("class") == "chosen"
    shares = [float((re.search(r" (\d+) %$", text) or [0, 0])[1]) for text in labels(page, "columns")]
    np.testing.assert_allclose(shares, 100 * attention.cross[0, 2, row], atol=0.56)
    red, green, blue = (int(head_colours(3)[2][i : i + 2], 16) for i in (1, 3, 5))
    stripes = page.locator("#columns li").evaluate_all("items => items.map(item => item.style.backgroundImage)")
    assert all(f"{red}, {green}, {blue}" in stripe for stripe in stripes)
    page.mouse.move(450, 5)
    assert labels(page, "columns") == attention.source.pieces

    # From the other side: who attends to this one. A click holds it.
    page.locator("#columns li").first.click()
    page.mouse.move(450, 5)
    shown = [text for text in labels(page, "rows") if text.endswith(" %")]
    assert len(shown) == sum(np.rint(1000 * attention.cross[0, 2, :, 0]) >= 5)
    page.locator("#columns li").first.click()
    page.mouse.move(450, 5)
    assert labels(page, "rows") == attention.target.pieces


def test_another_sentence_is_chosen_and_shown_to_the_letter(page):
    page.locator("select").select_option("1")
    assert page.locator("#sentences p").all_text_contents() == ["</script><b>&amp; Ä", "→ <i>ö"]
    assert page.locator("b, i").count() == 0
