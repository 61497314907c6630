"""`python -m transformer_flax.fetch` as a user meets it; tests/data/test_downloads.py has the rest."""

import pytest

from tests.commands.process import refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one text, as in python -m transformer_flax.fetch multi30k; there are multi30k"),
        (["multi30"], "there is no text 'multi30'; did you mean 'multi30k'?"),
    ],
)
def test_an_unknown_text_is_refused_with_those_there_are(arguments, message):
    assert refused("fetch", *arguments) == message
