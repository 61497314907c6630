import math

from transformer_flax.decoding.bleu import score

REFERENCES = ["Ein Mann schläft auf der Bank.", "Zwei Hunde spielen im Schnee, sagt er."]


def test_a_perfect_translation_scores_100_and_matches_exactly():
    scores = score(REFERENCES, REFERENCES)
    assert round(scores.bleu, 6) == 100
    assert scores.exact_match == 1


def test_the_score_is_cased_and_says_how_it_was_measured():
    lowered = score([line.lower() for line in REFERENCES], REFERENCES)
    assert lowered.bleu < 60
    assert lowered.exact_match == 0
    assert "case:mixed" in lowered.signature
    assert "tok:13a" in lowered.signature


def test_bleu_is_of_the_corpus_with_a_brevity_penalty():
    # All n-grams of the half that is there are right: precision 1, so BLEU is the penalty exp(1 - 16/6) alone.
    # 13a tokens: 7 (the full stop apart) and 9 (comma and full stop apart) in the references, 6 in the translation.
    short = ["Ein Mann schläft auf der Bank", ""]
    assert round(score(short, REFERENCES).bleu, 4) == round(100 * math.exp(1 - 16 / 6), 4)
