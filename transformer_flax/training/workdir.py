"""What a working directory looks like. Nobody else knows.

config.json   tokenizer.json   checkpoints/<step>/   metrics.jsonl   events.*   translations/<step>.txt
"""

import json
import os
import pathlib

from ml_collections import ConfigDict

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError

# A resumed run may have other values here: none of them changes what is learned from the steps that were made.
FREE_FIELDS = ("steps", "name", "data.path", "data.cache_dir", "eval.", "checkpoint.", "log.", "parallel.", "decode.")


class Workdir:
    """The directory of one run."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.config_file = self.path / "config.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"

    def claim(self, config: ConfigDict, fingerprints: dict[str, str]) -> None:
        """Makes the directory this run's own, or finds that it already is.

        Args:
          config: of the run.
          fingerprints: of the splits it is trained on and measured with.

        Raises:
          UserError: it holds a run of another config or other data, and stays as it is.
        """
        if self.config_file.exists():
            self._refuse_another(config, fingerprints)
        elif self.path.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and holds no run; choose another --workdir")
        self.path.mkdir(parents=True, exist_ok=True)
        run = {"config": config.to_dict(), "data_fingerprints": fingerprints}
        self._write(self.config_file, json.dumps(run, indent=2) + "\n")

    def load_config(self) -> ConfigDict:
        """The config of the run that lies here."""
        return ConfigDict(self._load_run()["config"])

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.tokenizer_file)

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._write(self.tokenizer_file, tokenizer.to_json())

    def save_translations(self, name: str, lines: list[str]) -> pathlib.Path:
        """One translation a line, in the order of the split; line breaks within one become spaces."""
        file = self.path / "translations" / f"{name}.txt"
        file.parent.mkdir(exist_ok=True)
        self._write(file, "".join(" ".join(line.splitlines()) + "\n" for line in lines))
        return file

    def _load_run(self) -> dict:
        try:
            return json.loads(self.config_file.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"{self.config_file} cannot be read: {error}") from error

    def _refuse_another(self, config: ConfigDict, fingerprints: dict[str, str]) -> None:
        run = self._load_run()
        theirs, ours = _flatten(run["config"]), _flatten(config.to_dict())
        different = [
            f"  config.{name}: {theirs.get(name)!r} there, {ours.get(name)!r} now"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name) and not name.startswith(FREE_FIELDS)
        ]
        different += [
            f"  the {split} data have changed"
            for split, fingerprint in fingerprints.items()
            if run["data_fingerprints"].get(split, fingerprint) != fingerprint
        ]
        if different:
            raise UserError(
                "\n".join([f"{self.path} holds a run of another config:", *different, "choose another --workdir"])
            )

    def _write(self, file: pathlib.Path, text: str) -> None:
        partial = file.with_name(f".{file.name}.partial")
        partial.write_text(text)
        partial.replace(file)


def _flatten(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
