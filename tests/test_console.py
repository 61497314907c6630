"""What a run tells."""

from transformer_flax.console import Progress


def test_brackets_in_a_table_are_text(capsys):
    with Progress() as progress:
        progress.table("mine[/b]", ["split"], [["a[bold]b"], ["[/data/x]"]])
    told = capsys.readouterr().out
    for text in ("mine[/b]", "a[bold]b", "[/data/x]"):
        assert text in told
