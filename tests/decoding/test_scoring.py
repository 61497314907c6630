"""Every score, by hand."""

import math

import numpy as np
import pytest

from transformer_flax.data.normalisation import Normaliser
from transformer_flax.decoding.scoring import full_scores, score, score_labels, table2_tokens

DE = Normaliser("de")
REFERENCES = ["Ein Mann schläft auf der Bank.", "Zwei Hunde spielen im Schnee, sagt er."]


def test_a_perfect_translation_scores_100_and_matches_exactly():
    scores = full_scores(REFERENCES, REFERENCES, DE)
    assert round(scores.bleu, 6) == round(scores.chrf, 6) == round(scores.table2_bleu, 6) == 100
    assert scores.exact_match == scores.length_ratio == 1
    assert scores.warnings == ()


def test_a_reference_with_line_breaks_is_matched_by_its_translation_on_one_line():
    assert score(["a b", "c"], ["a\u2028b", "c\x85"]).exact_match == 1


def test_the_score_is_cased_and_says_how_it_was_measured():
    lowered = score([line.lower() for line in REFERENCES], REFERENCES)
    assert lowered.bleu < 60
    assert lowered.exact_match == 0
    assert "case:mixed" in lowered.signature
    assert "tok:13a" in lowered.signature


@pytest.mark.parametrize(
    ("normalise", "translation", "case", "tokens"),
    [
        (Normaliser("de", lowercase=True), "er sagt: „ja“, und geht.", "case:lc", "tok:13a"),
        (Normaliser("de", tokenized=True), 'Er sagt: "Ja", und geht .', "case:mixed", "tok:moses-de|punct:normalised"),
        (Normaliser("de", True, True), 'er sagt : "ja", und geht .', "case:lc", "tok:moses-de|punct:normalised"),
    ],
    ids=["lower case", "tokens", "both"],
)
def test_normalised_translations_are_compared_with_references_normalised_alike(normalise, translation, case, tokens):
    reference = "Er sagt: „Ja“, und geht."
    plain = score([translation], [reference])
    normalised = score([normalise(translation)], [normalise(reference)], normalise)
    assert plain.bleu < 50
    assert plain.exact_match == 0
    assert normalised.bleu == pytest.approx(100)
    assert normalised.exact_match == normalised.length_ratio == 1
    assert f"|{case}|" in normalised.signature
    assert f"|{tokens}|" in normalised.signature
    assert "tok:none" not in normalised.signature


def test_all_scores_of_normalised_lines_say_so_and_do_not_tokenise_again():
    text = Normaliser("de", lowercase=True, tokenized=True)
    lines = [text(line) for line in REFERENCES]
    scores = full_scores([lines[0].removesuffix(" ."), lines[1].upper()], lines, text)
    assert "case:lc" in scores.chrf_signature
    assert "|tok:moses-de|punct:normalised|" in scores.chrf_signature
    assert "|case:lc|" in scores.table2_signature
    assert "|tok:moses-de|compounds:##AT##|punct:normalised|" in scores.table2_signature
    assert scores.signature == score(lines, lines, text).signature
    assert scores.warnings == ()
    assert table2_tokens(["der rot-weiße &quot; hund &quot; ."], text) == [
        "der rot ##AT##-##AT## weiße &quot; hund &quot; ."
    ]


def test_bleu_of_tokens_is_of_tokens_alone():
    # Moses keeps "2-3" as one token, and 13a splits it at a hyphen behind a digit: 5 or 7 tokens, the last one wrong.
    # Right are 4/5, 3/4, 2/3 and 1/2 of the n-grams: a product of 1/5.
    ours, theirs = ["a b c 2-3 x"], ["a b c 2-3 y"]
    assert score(ours, theirs, Normaliser("en", tokenized=True)).bleu == pytest.approx(100 * (1 / 5) ** (1 / 4))
    assert score(ours, theirs).bleu == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** (1 / 4))


@pytest.mark.parametrize("tokenized", [False, True])
@pytest.mark.parametrize(("language", "tokens"), [("zh", "zh"), ("zh_CN", "zh"), ("cmn", "zh"), ("jpn", "char")])
def test_bleu_of_a_language_without_blanks_counts_characters(language, tokens, tokenized):
    # Right are 5/6, 4/5, 3/4 and 2/3 of the n-grams: a product of 1/3.
    scores = score(["一二三四五六"], ["一二三四五七"], Normaliser(language, tokenized=tokenized))
    assert scores.bleu == pytest.approx(100 * (1 / 3) ** (1 / 4))
    assert (f"|tok:{tokens}|punct:normalised|sacremoses:" in scores.signature) == tokenized
    assert (f"|tok:{tokens}|smooth:" in scores.signature) != tokenized


def test_bleu_is_of_the_corpus_with_a_brevity_penalty():
    # All n-grams of the half that is there are right: precision 1, so BLEU is the penalty exp(1 - 16/6) alone.
    # 13a tokens: 7 (the full stop apart) and 9 (comma and full stop apart) in the references, 6 in the translation.
    short = ["Ein Mann schläft auf der Bank", ""]
    scores = score(short, REFERENCES)
    assert round(scores.bleu, 4) == round(100 * math.exp(1 - 16 / 6), 4)
    assert scores.length_ratio == 6 / 16


def test_full_scores_hold_the_cheap_ones():
    cheap, full = score(REFERENCES[::-1], REFERENCES), full_scores(REFERENCES[::-1], REFERENCES, DE)
    assert vars(cheap).items() <= vars(full).items()


def test_chrf_is_the_f2_of_character_n_grams():
    # 1-, 2- and 3-grams: precision 3/3, 2/2, 1/1 and recall 3/4, 2/3, 1/2, on average 1 and 23/36. There is no longer
    # n-gram in the translation, so none counts. F2 = 5 P R / (4 P + R) = (115/36) / (167/36).
    scores = full_scores(["abc"], ["abcd"], DE)
    assert round(scores.chrf, 6) == round(100 * 115 / 167, 6)
    assert "nc:6|nw:0" in scores.chrf_signature


def test_german_compounds_count_as_their_parts():
    translation, reference = "eine rot-blaue Wand steht heute da", "eine rot-grüne Wand steht heute da"
    # 6 tokens with one of them wrong: 5/6 of the words, 3/5 of the pairs, 2/4 of the triples, 1/3 of the fours: 1/12.
    whole = full_scores([translation], [reference], Normaliser("nl"))
    assert round(whole.table2_bleu, 6) == round(100 * (1 / 12) ** (1 / 4), 6)
    # 8 tokens with one of them wrong, "eine rot ##AT##-##AT## ? Wand steht heute da": 7/8, 5/7, 3/6, 1/5: 1/16.
    split = full_scores([translation], [reference], Normaliser("de_AT"))
    assert round(split.table2_bleu, 6) == round(100 * (1 / 16) ** (1 / 4), 6) == 50
    assert "tok:moses-nl|punct" in whole.table2_signature
    assert "tok:moses-de|compounds:##AT##|punct" in split.table2_signature
    assert "smooth:none" in split.table2_signature
    assert whole.bleu == split.bleu


def test_bleu_of_the_paper_is_not_smoothed():
    # No four tokens in a row are right, so that the last precision is 0; only sacreBLEU's own gives it some credit.
    scores = full_scores(["a b c x d e f"], ["a b c y d e f"], Normaliser("en"))
    assert scores.table2_bleu == 0
    assert scores.bleu > 20


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("Ja, z.B. am 3. Mai 2,5 km!", "Ja , z.B. am 3. Mai 2,5 km !"),  # abbreviations, ordinals and decimals hold
        ("Er sagt: „A“ & [B]…", "Er sagt : „ A &quot; &amp; &#91; B &#93; ..."),  # Moses escapes; „ is not replaced
        ("rot-grün-blau", "rot ##AT##-##AT## grün ##AT##-##AT## blau"),
        # Perl goes on behind its last match, which took the b along: no letter is left before the second hyphen.
        ("a-b-c-d", "a ##AT##-##AT## b-c ##AT##-##AT## d"),
        ("1-2-3", "1 ##AT##-##AT## 2-3"),
        # Two bytes for ü: the first ends the one match, the second begins the next.
        ("a-ü-c", "a ##AT##-##AT## ü ##AT##-##AT## c"),
        ("a - b -c d-", "a - b -c d-"),  # a hyphen beside a blank joins nothing
        ("---", "- ##AT##-##AT## -"),
        ("", ""),
    ],
)
def test_tokens_of_table_2(line, tokens):
    assert table2_tokens([line], DE) == [tokens]


def test_only_german_is_split_and_any_language_works():
    assert table2_tokens(["l'avant-garde"], Normaliser("fr")) == ["l&apos; avant-garde"]
    assert table2_tokens(["don't re-do"], Normaliser("en")) == ["don &apos;t re-do"]
    assert table2_tokens(["Saluton, mond-o!"], Normaliser("xx")) == ["Saluton , mond-o !"]


def test_odd_characters_neither_break_nor_shift_lines():
    odd = ["a\tb\u2028c\x85d e", "a\x00b c d e f", "a\nb\rc\x1cd e", "\ufeff", " ", "\u3000", ""]
    scores = full_scores(odd, odd, DE)
    assert round(scores.bleu, 6) == round(scores.table2_bleu, 6) == 100
    assert len(table2_tokens(odd, DE)) == len(odd)


def test_empty_translations_score_0_with_a_warning():
    scores = full_scores(["", " "], REFERENCES, DE)
    assert scores.bleu == scores.chrf == scores.table2_bleu == scores.exact_match == scores.length_ratio == 0
    (warning,) = scores.warnings
    assert "0.000 times" in warning
    assert "2 of 2 are empty" in warning


@pytest.mark.parametrize(("tokens", "hint"), [(8, "0 of 1 are empty"), (9, None), (11, None), (12, "repetitions")])
def test_a_length_ratio_beyond_a_tenth_is_warned_of(tokens, hint):
    scores = full_scores([" ".join("w" * tokens)], [" ".join("w" * 10)], Normaliser("en"))
    assert scores.length_ratio == tokens / 10
    assert bool(scores.warnings) == bool(hint)
    assert all(hint in warning and f"{tokens / 10:.3f} times" in warning for warning in scores.warnings)


PLAIN = ["Ich wusste nicht, ob es 2,50 kostet."] * 10


@pytest.mark.parametrize(
    "line",
    [
        "Ich wusste nicht , ob es 2,50 kostet.",
        "Ich wusste nicht, ob es 2,50 kostet .",
        "Ich wuss@@ te nicht, ob es 2,50 kostet.",
        "▁Ich wusste nicht, ob es 2,50 kostet.",
        "Ich wusste nicht, ob's &apos;s 2,50 kostet.",
        "Ich wusste @-@ nicht, ob es 2,50 kostet.",
    ],
)
def test_tokenised_text_is_warned_of_with_an_example(line):
    assert full_scores([line, *PLAIN[1:]], PLAIN, DE).warnings == ()  # a tenth of the lines may be chance
    (warning,) = full_scores([*PLAIN[2:], line, line], PLAIN, DE).warnings
    assert warning.startswith("2 of 10 translations look tokenised where the references do not")
    assert repr(line) in warning
    (warning,) = full_scores(PLAIN, [*PLAIN[2:], line, line], DE).warnings
    assert warning.startswith("2 of 10 references look tokenised where the translations do not")
    alike = full_scores([line] * 10, [line] * 10, DE).warnings
    assert len(alike) == ("@@" in line or "▁" in line)  # pieces on both sides raise BLEU, and tokens do not
    assert all(f"10 of 10 references are pieces of words, such as {line!r}" in warning for warning in alike)


def test_plain_text_is_not_taken_for_tokens():
    plain = ["Vraiment ; oui !", "3,5 et .5", "Il dit ...", "moi@exemple.fr", "AT&T & Co.", "a-b @ c"]
    assert not any("tokenised" in warning for warning in full_scores(plain, ["Rien."] * 6, Normaliser("fr")).warnings)


def test_sacrebleu_adds_no_warnings_of_its_own(caplog):
    lines = ["Das ist so ."] * 100  # as many as make sacreBLEU speak
    full_scores(lines, lines, DE)
    assert not caplog.records


def test_lines_of_a_word_are_told_to_be_no_matter_for_bleu():
    scores = full_scores(["eins", "zwei", "drei"], ["eins", "zwei", "vier"], DE)
    assert scores.bleu < 1
    (warning,) = scores.warnings
    assert "exact matches" in warning


# Labels


CLASSES = ("a", "b", "c", "never")
RIGHT = ["a", "a", "a", "b", "b", "c"]
FOUND = ["a", "a", "b", "b", "c", "b"]


def test_scores_are_those_of_the_confusion():
    scores = score_labels(FOUND, RIGHT, CLASSES)
    np.testing.assert_array_equal(scores.confusion, [[2, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    assert scores.accuracy == pytest.approx(3 / 6)
    np.testing.assert_allclose(scores.precision, [1, 1 / 3, 0, 0])
    np.testing.assert_allclose(scores.recall, [2 / 3, 1 / 2, 0, 0])
    np.testing.assert_allclose(scores.f1, [0.8, 0.4, 0, 0])
    assert scores.macro_f1 == pytest.approx(1.2 / 3)  # the class that never occurs has no part in it
    assert score_labels(RIGHT, RIGHT, CLASSES).macro_f1 == 1
    assert score_labels(["never"], ["a"], CLASSES).macro_f1 == 0
    assert score_labels([], [], CLASSES).accuracy == score_labels([], [], CLASSES).macro_f1 == 0


def test_a_class_that_is_only_given_counts_in_macro_f1():
    # F1 of a is 2/3; b is given where there is none.
    assert score_labels(["a", "b"], ["a", "a"], CLASSES).macro_f1 == pytest.approx(1 / 3)
