import dataclasses

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import to_hex, to_rgb

from tests.analysis.random_run import SOURCE, TARGET, random_run
from transformer_flax.analysis.alignment import align, word_weights
from transformer_flax.analysis.plots import head_colours, plot_heads, plot_lines, plot_words
from transformer_flax.errors import UserError


@pytest.fixture(scope="module")
def attention():
    return random_run().attention(SOURCE, TARGET)


def texts(labels) -> tuple[str, ...]:
    return tuple(label.get_text() for label in labels)


def test_a_row_that_heads_do_not_fill_ends_without_axes(attention):
    *shown, _ = plot_heads(attention, "cross", 0, heads=[0, 1, 2, 0, 1]).axes
    assert [axes.axison for axes in shown] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_every_head_is_a_heatmap_with_the_tokens_at_its_sides(attention, kind, tmp_path):
    figure = plot_heads(attention, kind, 0, file=tmp_path / "heads.png")
    *shown, scale = figure.axes
    for head, axes in enumerate(shown[:3]):
        np.testing.assert_array_equal(axes.images[0].get_array(), getattr(attention, kind)[0, head])
        assert axes.get_title() == f"head {head + 1}"
    assert figure.get_suptitle() == f"{kind} attention, layer 1 of 2"
    assert (scale.get_ylabel(), scale.get_ylim()) == ("weight", (0, 1))
    rows, columns = attention.labels(kind)
    assert (texts(shown[0].get_yticklabels()), texts(shown[0].get_xticklabels())) == (rows, columns)
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_heads_and_layers_are_chosen(attention):
    figure = plot_heads(attention, "cross", -1, heads=[2])
    axes, _ = figure.axes
    assert (figure.get_suptitle(), axes.get_title()) == ("cross attention, layer 2 of 2", "head 3")
    np.testing.assert_array_equal(axes.images[0].get_array(), attention.cross[1, 2])


def test_lines_go_from_every_token_to_all_as_strong_as_their_weights(attention):
    figure = plot_lines(attention, "cross", 1)
    [lines] = [part for part in figure.axes[0].collections if isinstance(part, LineCollection)]
    colours = lines.get_colors().reshape(*attention.cross[1].shape, 4)  # [H, T, S]
    np.testing.assert_allclose(colours[..., 3], attention.cross[1], atol=1e-6)
    for head, colour in enumerate(head_colours(3)):
        np.testing.assert_allclose(colours[head, 0, 0, :3], to_rgb(colour))
    # Rows above, columns below, the shorter side centred; both ends of a line are where its words stand.
    texts = figure.axes[0].texts
    assert tuple(text.get_text() for text in texts) == (*attention.target.pieces, *attention.source.pieces)
    begin, end = np.array(lines.get_segments()).reshape(*attention.cross[1].shape, 2, 2)[2, 4, 1]
    beside = 0.3  # of three heads the last
    assert begin.tolist() == pytest.approx([texts[4].get_position()[0] + beside, 1])
    assert end.tolist() == pytest.approx([texts[len(attention.target.pieces) + 1].get_position()[0] + beside, 0])


def test_of_one_word_the_lines_are_drawn_and_what_it_attends_to_is_marked(attention):
    number = attention.target.pieces.index("<end>")
    for word in (number, "<end>"):
        axes = plot_lines(attention, "cross", 1, word=word, heads=[0, 2]).axes[0]
        [lines] = [part for part in axes.collections if isinstance(part, LineCollection)]
        [stripes] = [part for part in axes.collections if isinstance(part, PatchCollection)]
        expected = attention.cross[1][[0, 2], number].ravel()
        np.testing.assert_allclose(lines.get_colors()[:, 3], expected, atol=1e-6)
        np.testing.assert_allclose(stripes.get_facecolor()[:, 3], 0.6 * expected, atol=1e-6)


@pytest.mark.parametrize("heads", [None, [0, 2]])
def test_lines_say_their_layer_and_which_head_has_which_colour(attention, heads):
    figure = plot_lines(attention, "decoder", 0, heads=heads)
    assert figure.get_suptitle() == "decoder attention, layer 1 of 2"
    legend = figure.axes[0].get_legend()
    assert texts(legend.get_texts()) == tuple(f"head {head + 1}" for head in heads or range(3))
    colours = [to_hex(handle.get_facecolor()) for handle in legend.get_patches()]
    assert colours == [head_colours(3)[head] for head in heads or range(3)]


def test_what_is_written_beside_lines_fits_into_the_picture(attention):
    many = dataclasses.replace(attention, cross=np.tile(attention.cross, (1, 6, 1, 1)))  # 18 heads
    for drawn in (many, random_run().attention("x", "y")):
        figure = plot_lines(drawn, "cross")
        figure.draw_without_rendering()
        inside, legend = figure.bbox, figure.axes[0].get_legend().get_window_extent()
        title = figure.get_children()[-1].get_window_extent()
        labels = [text.get_window_extent() for text in figure.axes[0].texts]
        for box in (title, legend, *labels):
            assert inside.x0 <= box.x0
            assert box.x1 <= inside.x1
            assert inside.y0 <= box.y0
            assert box.y1 <= inside.y1
        assert title.y0 >= legend.y1
        assert legend.y0 >= max(label.y1 for label in labels)


@pytest.mark.parametrize(("kind", "word"), [("encoder", "animal"), ("cross", "Tier"), ("decoder", "Tier")])
def test_a_word_of_several_tokens_has_the_lines_of_all(attention, kind, word):
    axes = plot_lines(attention, kind, 0, word=word, heads=[1]).axes[0]
    [lines] = [part for part in axes.collections if isinstance(part, LineCollection)]
    rows, _ = attention.labels(kind)
    chosen = {"animal": ["an", "·im", "·al"], "Tier": ["T", "·ier"]}[word]
    numbers = [rows.index(piece) for piece in chosen]
    np.testing.assert_allclose(lines.get_colors()[:, 3], getattr(attention, kind)[0, 1, numbers].ravel(), atol=1e-6)


def test_a_word_that_cannot_be_meant_is_refused_with_those_that_can():
    attention = random_run().attention("sleeps sleeps", TARGET)
    with pytest.raises(UserError, match=r"word is 'bench'; there is none; the tokens are .*<end>"):
        plot_lines(attention, "encoder", word="bench")
    with pytest.raises(UserError, match=r"there are 2, at \[\d, \d\]; give the number of one"):
        plot_lines(attention, "encoder", word=attention.source.pieces[0])
    with pytest.raises(UserError, match=r"word is 99; there is none; the tokens are .*<end>"):
        plot_lines(attention, "encoder", word=99)


def test_a_text_is_no_formula(tmp_path):
    attention = random_run().attention("$ x_1 $ ^ $", "$$")
    source = dataclasses.replace(attention.source, pieces=("$_$",) * len(attention.source.pieces))
    attention = dataclasses.replace(attention, source=source)  # a piece that has both dollars
    for number, figure in enumerate((plot_heads(attention), plot_lines(attention), plot_words(attention))):
        figure.savefig(tmp_path / f"{number}.svg")  # as a formula it could not be drawn


def test_words_are_shown_with_their_links(attention, tmp_path):
    links = align(attention, layers=[0])
    axes = plot_words(attention, links, layers=[0], file=tmp_path / "words.svg").axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), word_weights(attention, layers=[0]))
    assert {(int(dot.get_xdata()[0]), int(dot.get_ydata()[0])) for dot in axes.lines} == links
    assert texts(axes.get_yticklabels()) == tuple(TARGET.split())


@pytest.mark.parametrize("count", [1, 8, 10, 16])
def test_every_head_has_a_colour_of_its_own(count):
    assert len(set(head_colours(count))) == count
