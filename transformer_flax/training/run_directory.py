"""The files of a working directory.

config.json   tokenizer.json   selection.json   checkpoints/<step>/   metrics.jsonl   skipped.jsonl   events.*
translations/<step>.txt (of a classifier: labels/<step>.txt; of the test split: <step>.test.txt)   profile/
wandb.json   .lock
An exported model: config.json   tokenizer.json   model.safetensors

Working directories from strangers are safe to open: nothing is executed or unpickled, and the content of each file is
checked. Training deletes only old checkpoints, and the lines and outputs of steps that it repeats.
"""

import contextlib
import difflib
import json
import os
import pathlib
import re
import socket
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.data.classes import Classes
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.files import (
    CHECKSUM,
    is_partial,
    read_json,
    read_json_lines,
    refuse_dangling,
    try_lock,
    verify_checksum,
    with_checksum,
    write_whole,
)
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.config_fields import CHANGES_NOTHING, added_fields, complete, differences, flatten
from transformer_flax.training.multihost import from_first, is_first

# A resumed run may have other values of these fields. They do not affect what past steps have learned.
MAY_CHANGE = (*CHANGES_NOTHING, "steps", "eval.", "checkpoint.", "decode.")
# These fields may change if only one split has its final evaluation. They do not affect its scores.
ON_THE_WAY = ("every", "sentences", "average", "patience")  # of config.eval
KEEPS_SCORES = (*CHANGES_NOTHING, "steps", "checkpoint.keep", "eval.test", *(f"eval.{name}" for name in ON_THE_WAY))
NAMED = ("init_from", "embedding_init")  # fields that name a folder, whose content has a fingerprint
RUN = ("config", "data_fingerprints", "tokenizer_crc32", "classes")  # the entries of config.json
LOCK = ".lock"
UNSAFE = "*?[\\"  # Orbax takes these for a pattern: it writes checkpoints below such a folder that cannot be read


class RunDirectory:
    """The working directory of one run, or an exported model."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.config_file = self.path / "config.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.skipped_file = self.path / "skipped.jsonl"
        self.wandb_file = self.path / "wandb.json"
        self.checkpoints = self.path / "checkpoints"
        self.profile = self.path / "profile"
        self.params_file = self.path / "model.safetensors"
        self._locked: os.stat_result | None = None  # the directory when `lock` locked it

    def check(self, config: ConfigDict, fingerprints: dict[str, str], tokenizer: Tokenizer | None = None) -> None:
        """Checks that the directory is free for this run or holds this run already. Changes nothing.

        `fingerprints` are those of the run's data, by name. Without a tokenizer, any tokenizer in the directory is
        accepted.
        """
        require_safe(self.path)
        if self.params_file.exists():
            raise UserError(
                f"{self.path} is an exported model, which cannot be resumed; to start from it, set another "
                f"--workdir and --config.init_from={self.path}"
            )
        if self.config_file.exists():
            self._refuse_another(config, fingerprints, tokenizer)
        elif self.path.exists() and any(file.name != LOCK and not is_partial(file) for file in self.path.iterdir()):
            raise UserError(f"{self.path} is not empty and holds no run{self._runs_below()}; choose another --workdir")

    def claim(
        self, config: ConfigDict, fingerprints: dict[str, str], tokenizer: Tokenizer, classes: Classes | None = None
    ) -> None:
        """Claims the directory for this run: writes its config, fingerprints, classes and tokenizer.

        config.json claims the directory, so it is written first. A process that is killed before leaves nothing. A
        process that is killed after leaves a run without a tokenizer, and the tokenizer is then made again.

        A run that has ended and is evaluated keeps the fields with which it was evaluated.
        """
        self.check(config, fingerprints, tokenizer)
        known = self._load_run() if self.config_file.exists() else {"data_fingerprints": {}}
        self.path.mkdir(parents=True, exist_ok=True)
        kept = ("eval", "decode", "checkpoint") if self._evaluated(config) >= {*final_splits(config)} else ()
        run = {
            "config": config.to_dict() | {section: known["config"][section] for section in kept},
            "data_fingerprints": known["data_fingerprints"] | fingerprints,
            "tokenizer_crc32": self._tokenizer_checksum(tokenizer),
            **({"classes": list(classes.names)} if classes else {}),
        }
        self._write(self.config_file, json.dumps(with_checksum(run), indent=2) + "\n")
        if not self.tokenizer_file.exists():  # another version may have formatted the same tokenizer differently
            self._write(self.tokenizer_file, tokenizer.to_json())

    def _evaluated(self, config: ConfigDict) -> set[str]:
        """Returns the splits whose final evaluation is written, and would be kept; none if the run has not ended."""
        lines = read_json_lines(self.metrics_file)
        step = max(saved_steps(self.checkpoints), default=0)
        names = {name for line in lines if line.get("step") == step for name in line}
        has_ended = step == config.steps or is_out_of_patience(lines, config.eval.patience)
        return {split for split in ("valid", "test") if f"{split}/final" in names} if has_ended else set()

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Context manager: no other process can train in the directory. A killed process leaves no lock behind."""
        if not is_first():  # the first process holds the lock for all processes
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._locked = self.path.stat()
        lock = self.path / LOCK
        if lock.is_symlink():  # otherwise the file behind the link would be emptied
            lock.unlink()
        with lock.open("a+") as file:
            if not try_lock(file):
                file.seek(0)
                raise UserError(
                    f"another process trains in {self.path} already ({file.read().strip()}); wait for it, or choose "
                    "another --workdir"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def is_in_place(self) -> bool:
        """Returns whether the directory that `lock` locked is still at this path, as the first process sees it.

        It may have been moved, and another run may have begun there.
        """

        def is_same() -> bool:
            if self._locked is None or not self.config_file.exists():
                return False
            return os.path.samestat(self._locked, self.path.stat())

        return from_first(is_same)

    def load_config(self) -> ConfigDict:
        """Returns the run's config. Fields that are newer than the run have their defaults."""
        return complete(ConfigDict(self._load_run()["config"]))

    def added_fields(self) -> dict[str, Any]:
        """Returns the fields that the run's config lacks because the run is older than the fields; {} without a run."""
        return added_fields(flatten(self._load_run()["config"])) if self.config_file.exists() else {}

    def load_fingerprints(self) -> dict[str, str]:
        """Returns the fingerprints of the data that the run was trained and evaluated on, by name."""
        return self._load_run()["data_fingerprints"]

    def load_tokenizer(self) -> Tokenizer:
        """Returns the run's tokenizer, which must not have changed since the run was made."""
        tokenizer = Tokenizer.load(self.tokenizer_file)
        if self._load_run()["tokenizer_crc32"] != self._tokenizer_checksum(tokenizer):
            raise UserError(
                f"{self.tokenizer_file} has changed since the run was made, so its pieces may no longer be those that "
                "the model has learned; put the original there"
            )
        return tokenizer

    def _tokenizer_checksum(self, tokenizer: Tokenizer) -> int:
        """Returns the checksum of the tokenizer's file or, without a file, of the text that will be written there."""
        file = self.tokenizer_file
        return zlib.crc32(file.read_bytes() if file.exists() else tokenizer.to_json().encode())

    def load_classes(self) -> Classes | None:
        """Returns the run's classes; None if the run does not classify."""
        names = self._load_run().get("classes")
        return None if names is None else Classes(names)

    def save_selection(self, counts: dict) -> None:
        """Writes how many training pairs are used, and how many are left out for each reason."""
        self._write(self.path / "selection.json", json.dumps(counts, indent=2) + "\n")

    def save_outputs(self, what: str, split: str, step: int, outputs: list[str]) -> pathlib.Path:
        """Writes the translations or labels after a step, one per line, in the order of the split."""
        file = self.path / what / (f"{step}.txt" if split == "valid" else f"{step}.{split}.txt")
        self._write(file, "".join(f"{line}\n" for line in outputs))
        return file

    def _outputs(self, what: str) -> Iterator[tuple[int, str, pathlib.Path]]:
        """Yields the step, the split and the file of all outputs that `save_outputs` wrote."""
        for file in (self.path / what).glob("*.txt"):
            if name := re.fullmatch(r"(\d+)(?:\.(.+))?\.txt", file.name):
                yield int(name[1]), name[2] or "valid", file

    def drop_outputs(self, what: str, step: int) -> None:
        """Deletes the translations or labels of steps after `step`, which the run will repeat."""
        for written, _, file in self._outputs(what) if is_first() else ():
            if written > step:
                file.unlink()

    def load_translations(self, split: str) -> list[str]:
        """Reads the translations of a split after the last step at which `save_outputs` wrote them."""
        files = {step: file for step, of, file in self._outputs("translations") if of == split}
        if not files:
            raise UserError(f"{self.path} has no translations of the {split} split")
        return files[max(files)].read_text("utf-8").removesuffix("\n").split("\n")

    def _load_run(self) -> dict:
        refuse_dangling(self.path)
        part = re.fullmatch(r"(.+?)(/checkpoints.*|@[^/]*)", str(self.path))
        if part and not self.config_file.exists() and pathlib.Path(part[1], self.config_file.name).exists():
            raise UserError(f"{self.path} is no run; a checkpoint of one is named as in {part[1]}@STEP")
        if not self.path.is_dir():
            beside = {path.name: str(path) for path in self.path.parent.glob("*/")}
            near = difflib.get_close_matches(self.path.name, beside, n=1)
            hint = f"; did you mean {beside[near[0]]!r}?" if near else ""
            raise UserError(f"there is no directory {self.path}{hint}")
        if not self.config_file.exists():
            raise UserError(f"{self.path} holds no run: it has no {self.config_file.name}{self._runs_below()}")
        try:
            run = verify_checksum(read_json(self.config_file))
        except (OSError, ValueError) as error:  # ValueError: also if not JSON or not UTF-8
            raise UserError(
                f"{self.config_file} cannot be read as the config of a run ({error}); restore the original, or correct "
                f"it and delete its {CHECKSUM!r}"
            ) from error
        if {*run, "classes"} != {*RUN}:  # only classifiers have classes
            raise UserError(
                f"{self.config_file} is not the config of a run: it has the entries {', '.join(run)}, and "
                f"not {', '.join(RUN)}. Word vectors are opened by python -m transformer_flax.vectors, and models for "
                "CTranslate2 by its library"
            )
        return run

    def _runs_below(self) -> str:
        """Names some runs in the directory, such as seeds, for a message; empty if there are none."""
        files = [*self.path.glob(f"*/{self.config_file.name}"), *self.path.glob(f"*/*/{self.config_file.name}")]
        runs = sorted(str(file.parent) for file in files)
        more = f" and {len(runs) - 5:,} more" if len(runs) > 5 else ""
        return f"; there are {', '.join(runs[:5])}{more}" if runs else ""

    def _refuse_another(self, config: ConfigDict, fingerprints: dict[str, str], tokenizer: Tokenizer | None) -> None:
        run = self._load_run()
        evaluated = self._evaluated(config)
        is_partly = bool(evaluated) and not evaluated >= {*final_splits(config)}
        same = {*run["data_fingerprints"].items()} & {*fingerprints.items()}
        moved = (name for name, _ in same if name in NAMED)  # the same content, wherever it lies now
        may_change = (*(KEEPS_SCORES if is_partly else MAY_CHANGE), *moved)
        different = differences(flatten(run["config"]), flatten(config.to_dict()), may_change)
        changed = [
            f"the {split} data have changed"
            for split, fingerprint in fingerprints.items()
            if run["data_fingerprints"].get(split, fingerprint) != fingerprint
        ]
        if tokenizer and not self._is_own(tokenizer, run["tokenizer_crc32"]):
            changed.append(f"the tokenizer given is not {self.tokenizer_file}, which the run was started with")
        if different or changed:
            lines = "".join(f"\n  {difference}" for difference in different + changed)
            aim = "evaluate another split in the same way" if is_partly else "resume it"
            advice = f"to {aim}, give these fields their old values, or " if different else ""
            raise UserError(f"{self.path} holds a run of another config:{lines}\n{advice}choose another --workdir")
        step = max(saved_steps(self.checkpoints), default=0)
        if step > config.steps:
            raise UserError(
                f"{self.path} is at step {step:,} already, past config.steps={config.steps:,}; set config.steps to at "
                f"least {step}, or choose another --workdir"
            )

    def _is_own(self, tokenizer: Tokenizer, checksum: int) -> bool:
        """Returns whether a tokenizer is the run's; `checksum` is the entry in config.json."""
        if self.tokenizer_file.exists():
            return self.load_tokenizer().to_json() == tokenizer.to_json()
        return checksum == self._tokenizer_checksum(tokenizer)

    def _write(self, file: pathlib.Path, text: str) -> None:
        if not is_first():
            return
        try:
            file.parent.mkdir(exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise UserError(f"{file} cannot be written: {error.strerror}; fix this and run the same command") from error


def require_safe(folder: pathlib.Path) -> None:
    """Checks that a folder can hold checkpoints: its path, and that it is no link to a disk that is not mounted."""
    refuse_dangling(folder)
    where = str(folder.resolve())
    bad = [f"{character} in it" for character in UNSAFE if character in where]
    # Orbax takes a path as UTF-8. The locale may have another encoding, and the path may have other bytes.
    if os.fsencode(where) != where.encode(errors="replace"):
        bad.append("characters that this locale does not write as UTF-8")
    if bad:
        raise UserError(f"a path with {' or '.join(bad)} cannot hold checkpoints: {where!r}; choose another --workdir")


def is_out_of_patience(lines: Iterable[dict[str, Any]], patience: int) -> bool:
    """Returns whether the last `patience` evaluations during training brought no better validation loss; 0: never."""
    losses = [line["valid/loss"] for line in lines if "valid/loss" in line and "valid/final" not in line]
    return 0 < patience < len(losses) and not any(loss < min(losses[:-patience]) for loss in losses[-patience:])


def final_splits(config: ConfigDict) -> list[str]:
    """Returns the splits that a run evaluates at its end."""
    return ["valid", "test"] if config.eval.test else ["valid"]
