"""`results.jsonl`: what a sweep has found, a line for each run that has ended, small enough to be committed.

The first line says what was swept; a report needs no other file. Where it was gone on with by another command, on
another machine or with other versions, a line among the results says so. Lines are there whole or not at all, each with
a checksum. Of several about a run, as of one that failed and was tried again, the last holds.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.files import checked, parse_json, require_plain, signed
from transformer_flax.training.fields import differences, flatten
from transformer_flax.training.run_directory import write_whole

RESULTS = "results.jsonl"
SESSION = {"command": str, "versions": dict, "hardware": str, "commit": str}  # of the time when a sweep went on
HEAD = {"config": dict, "name": str} | SESSION
TRANSLATING, CLASSIFYING = ("bleu", "exact_match"), ("accuracy", "macro_f1")  # what is measured, beside perplexity
FINISHED, FAILED = "finished", "failed"
# Where these differ, results are comparable: seeds belong to the runs, paths to the machine, and the others change at
# most what chance draws.
FREE_FIELDS = (
    "name",
    "seed",
    "max_skipped",
    "on_write_failure",
    "data.path",
    "data.tokenizer_file",
    "data.cache_dir",
    "eval.every",
    "checkpoint.keep",
    "log.",
    "parallel.",
)


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended."""

    variant: str  # "A-h1", "A-h1 model.dropout=0.2", or what a file of variants calls it
    row: str  # of table 3 or beyond it, before the grid's fields
    changes: dict[str, Any]  # flat config fields that differ from the sweep's base, the seed apart
    seed: int
    status: str  # FINISHED or FAILED
    error: str  # why it failed, in one line; else empty
    parameters: int  # of the model
    flops: float  # that training took, as training/loop counts them; 0 where that is not known
    steps: int  # that were made
    seconds: float  # from its beginning to its end, evaluations included; its share of seeds trained together
    scores: dict[str, dict[str, float]]  # of each split at the end
    signature: str  # of the BLEU; empty where texts are classified
    # [step, seconds, perplexity, *measures] of each evaluation on validation data, and of translators the source gain
    curve: list[list[float]]

    @property
    def finished(self) -> bool:
        return self.status == FINISHED

    @property
    def measures(self) -> tuple[str, str]:
        """The names of its task's scores."""
        return TRANSLATING if self.signature else CLASSIFYING


def read(file: pathlib.Path) -> tuple[dict[str, Any], list[Result]]:
    """What was swept, and the last result of each run, in the order of the file.

    What was swept has an entry "sessions" too: the different commands, versions, machines and commits that it was made
    with, the first ones first. A last line that was cut short by a kill is left out.

    Raises:
      UserError: there is none, or it is not what was written.
    """
    done = 0
    try:
        require_plain(file)
        first, *lines = file.read_bytes().split(b"\n")[:-1] or [b""]
        head = _plain(checked(parse_json(first.decode())), HEAD)
        sessions = [_session(head)]
        results: dict[tuple[str, int], Result] = {}
        for done, line in enumerate(lines, 1):  # noqa: B007 (the message tells it)
            values = checked(parse_json(line.decode()))
            if values.keys() == SESSION.keys():
                sessions.append(_plain(values, SESSION))
                continue
            result = _result(values)
            results[result.variant, result.seed] = result
    except FileNotFoundError as error:
        raise UserError(f"there is no {file}: no sweep has been started there") from error
    except (OSError, ValueError) as error:  # ValueError: neither JSON nor UTF-8
        raise UserError(f"{file} is damaged in line {done + 1:,}: {error}; mend it or move the file away") from error
    return head | {"sessions": sessions}, list(results.values())


class Journal:
    """The results of a sweep that goes on; one process has it.

    Args:
      file: made, with `head` in its first line, if it is not there; a last line that was cut short is taken out.
      head: what is swept.

    Raises:
      UserError: the file is of another base, or no results.
    """

    def __init__(self, file: pathlib.Path, head: dict[str, Any]):
        self._file, self._session = file, _session(head)
        self.head, self.results = head | {"sessions": [self._session]}, []
        if file.exists():
            self.head, self.results = read(file)
            require_same_base(self.head["config"], head["config"], file)
            whole = file.read_bytes().split(b"\n")[:-1]
        else:
            whole = [_line(head).encode()]
        write_whole(file, "".join(f"{line.decode()}\n" for line in whole))

    def begin(self) -> None:
        """Notes by what the runs that follow are made, unless it is there."""
        if self._session not in self.head["sessions"]:
            self._write(self._session)
            self.head["sessions"].append(self._session)

    def append(self, result: Result) -> None:
        """Adds a result, which takes the place of an earlier one of the same run."""
        self._write(dataclasses.asdict(result))
        self.results = [r for r in self.results if (r.variant, r.seed) != (result.variant, result.seed)] + [result]

    def find(self, variant: str, seed: int) -> Result | None:
        """The result of a run, if it has ended."""
        return next((r for r in self.results if (r.variant, r.seed) == (variant, seed)), None)

    def _write(self, content: dict[str, Any]) -> None:
        data = f"{_line(content)}\n".encode()
        with self._file.open("ab", buffering=0) as stream:
            length = stream.seek(0, os.SEEK_END)
            try:
                if stream.write(data) != len(data):
                    raise OSError("the disk is full")
            except OSError as error:
                stream.truncate(length)
                raise UserError(f"{self._file} cannot be written: {error}; mend that and run it again") from error


def require_same_variants(
    results: Sequence[Result], changes: Mapping[str, Mapping[str, Any]], file: pathlib.Path
) -> None:
    """Refuses names that mean something else in a file, as those of a --variants file may.

    Args:
      results: in the file.
      changes: of each variant, by its name.
      file: the results'.

    Raises:
      UserError: one does.
    """
    for result in results:
        now = changes.get(result.variant, result.changes)
        if now != result.changes:
            raise UserError(
                f"{file} has results of {result.variant!r} with the overrides {_show(result.changes)}; now they are "
                f"{_show(now)}: call it otherwise, or choose another --workdir"
            )


def require_same_base(theirs: Mapping[str, Any], ours: Mapping[str, Any], file: pathlib.Path) -> None:
    """Refuses to mix results of different bases.

    Args:
      theirs, ours: flat configs.
      file: the results', for the message.

    Raises:
      UserError: they differ in a field that results depend on, naming each.
    """
    if different := differences(theirs, ours, FREE_FIELDS):
        lines = "".join(f"\n  {difference}" for difference in different)
        raise UserError(f"{file} is of a sweep of another base:{lines}\nchoose another --workdir")


def _show(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in changes.items()) or "none"


def _line(content: dict[str, Any]) -> str:
    return json.dumps(signed(content), ensure_ascii=False)


def _plain(values: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    for name, kind in kinds.items():
        if type(values.get(name)) is not kind:
            raise ValueError(f"it does not say what was swept: its {name} is {values.get(name)!r}")
    return {name: values[name] for name in kinds}


def _session(head: Mapping[str, Any]) -> dict[str, Any]:
    return {name: head[name] for name in SESSION}


def _result(values: dict[str, Any]) -> Result:
    kinds = {field.name: field.type for field in dataclasses.fields(Result)}
    if values.keys() != kinds.keys():
        raise ValueError(f"it has {', '.join(sorted(values.keys() ^ kinds.keys()))} too much or too little")
    for name, kind in kinds.items():
        plain = getattr(kind, "__origin__", kind)
        if type(values[name]) is not plain and not (plain is float and type(values[name]) is int):
            raise ValueError(f"its {name} is {values[name]!r}")
    if values["status"] not in (FINISHED, FAILED):
        raise ValueError(f"its status is {values['status']!r}")
    for name in ("seed", "parameters", "flops", "steps", "seconds"):
        if not 0 <= values[name] < math.inf:
            raise ValueError(f"its {name} is {values[name]!r}")
    numbers: list[Sequence] = [*(list(scores.values()) for scores in _dicts(values["scores"])), *values["curve"]]
    if not all(isinstance(row, list) and all(type(value) in (int, float) for value in row) for row in numbers):
        raise ValueError("its scores or its curve are no numbers")
    if not all(len(point) in (5, 6) for point in values["curve"]):
        raise ValueError("a point of its curve has not five or six numbers")
    # Older versions counted the seconds to the last step, and left out the evaluation after it.
    seconds = max([values["seconds"], *(point[1] for point in values["curve"])])
    result = Result(**values | {"seconds": seconds})
    measures = {"perplexity", *result.measures}
    if result.finished and not result.scores.get("valid", {}).keys() >= measures:
        raise ValueError(f"it has finished, and has not {', '.join(sorted(measures))} of the validation data")
    return result


def _dicts(scores: dict[str, Any]) -> list[dict[str, Any]]:
    if not all(isinstance(split, dict) for split in scores.values()):
        raise ValueError("its scores are not of splits")
    return list(scores.values())


LIBRARIES = ("jax", "flax", "optax", "numpy", "tokenizers", "sacrebleu")
ROOT = pathlib.Path(__file__).parents[2]


def head(base: ConfigDict, command: str, hardware: str) -> dict[str, Any]:
    """The first line of results: what was swept, by which command, with what, on what."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "config": flatten(base.to_dict()),
        "name": base.name,
        "command": command,
        "versions": versions,
        "hardware": hardware,
        "commit": _commit(),
    }


def hardware() -> str:
    """The GPUs that are seen, or else the cores, without taking any."""
    if not os.environ.get("JAX_PLATFORMS", "").startswith("cpu") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
        if gpus:
            return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return f"{os.cpu_count()} x {model or platform.machine()}"


def _commit() -> str:
    """That of the clone, with a plus where it has been changed since; empty if it is none."""
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    return f"{commit}+" if commit and _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) else commit


def _output(command: Sequence[str]) -> str:
    """What a program prints; empty where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
