"""Downloads a text to train on: python -m transformer_flax.fetch multi30k [--output=data/multi30k].

Each file is decompressed, checked against the published text, and named as training expects: train, valid and test in
both languages. The same command resumes the download. Without a network, the command lists the files to put into the
folder by hand, and reads the files that are already there.
"""

import pathlib

from absl import flags

from transformer_flax import cli
from transformer_flax.console import Progress
from transformer_flax.data.downloads import TEXTS, fetch
from transformer_flax.errors import UserError, did_you_mean

OUTPUT = flags.DEFINE_string("output", None, "the folder to fill; default: data/NAME")


def main(*names: str) -> None:
    known = f"there are {', '.join(TEXTS)}"
    if len(names) != 1:
        raise UserError(f"name one text, as in python -m transformer_flax.fetch multi30k; {known}")
    [name] = names
    if name not in TEXTS:
        raise UserError(f"there is no text {name!r}; {did_you_mean(name, TEXTS) or known}")
    text, folder = TEXTS[name], pathlib.Path(OUTPUT.value or f"data/{name}")
    with Progress() as progress:
        size = sum(file.size for file in text.files.values())
        files = f"{len(text.files)} files, {size / 1e6:.1f} MB, for {folder}"
        progress.say(f"{text.about}\nlicence: {text.licence}\n{files}")
        with progress.bar(name) as update:
            fetch(text, folder, update)
        progress.say(f"train on it with --config.data.path={folder}")


if __name__ == "__main__":
    cli.run(main)
