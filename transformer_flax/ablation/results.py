"""`results.jsonl` of a sweep: one line for each run that has ended, small enough to be committed.

The first line says what is swept; a report needs no other file. A later session with another command, machine, version
or commit adds a line that says so. Each line has a checksum. The last line of a run holds, so a failed run may be tried
again.
"""

import dataclasses
import importlib.metadata
import itertools
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.files import JsonLines, read_json_lines
from transformer_flax.training.fields import CHANGES_NOTHING, differences, flatten

ROOT = pathlib.Path(__file__).parents[2]
LIBRARIES = ("jax", "flax", "optax", "numpy", "tokenizers", "sacrebleu")
RESULTS = "results.jsonl"
SESSION = ("command", "versions", "hardware", "commit")  # by which command, with what, on what
HEAD = ("config", "name", *SESSION)
TRANSLATING, CLASSIFYING = ("bleu", "exact_match"), ("accuracy", "macro_f1")  # scores of each task beside perplexity
FINISHED, FAILED = "finished", "failed"
# Results stay comparable if these fields differ: seeds belong to runs, and the others change no more than chance does.
MAY_DIFFER = (*CHANGES_NOTHING, "seed", "eval.every", "checkpoint.keep")


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended."""

    variant: str  # "A-h1", "A-h1 model.dropout=0.2", or the name of an entry of a --variants file
    row: str  # of table 3 or beyond it, before the grid
    changes: dict[str, Any]  # flat config fields that differ from the sweep's base, except the seed
    seed: int
    status: str  # FINISHED or FAILED
    error: str  # one line; empty if the run finished
    parameters: int
    flops: float  # of all training steps, as model/flops counts them; 0 if unknown
    steps: int
    seconds: float  # from beginning to end, evaluations included; seeds trained together share them
    scores: dict[str, dict[str, float]]  # of each split at the end
    signature: str  # of BLEU; empty for classifiers
    # [step, seconds, perplexity, *measures] of each evaluation on validation data; translators add the source gain
    curve: list[list[float]]

    @property
    def key(self) -> tuple[str, int]:
        return self.variant, self.seed

    @property
    def finished(self) -> bool:
        return self.status == FINISHED

    @property
    def measures(self) -> tuple[str, str]:
        """The names of its task's scores."""
        return TRANSLATING if self.signature else CLASSIFYING


def read(file: pathlib.Path) -> tuple[dict[str, Any], list[Result]]:
    """Returns the head and the last result of each run, in the order of the file.

    The head gains an entry "sessions": each command, versions, hardware and commit, the first session first. A last
    line without its newline, which a kill has cut short, is ignored.

    Raises:
      UserError: the file is missing or damaged.
    """
    if not file.exists():
        raise UserError(f"there is no {file}: no sweep has been started there")
    parsers = itertools.chain([lambda line: _pick(HEAD, line)], itertools.repeat(_parse_line))
    head, *lines = read_json_lines(file, lambda line: next(parsers)(line)) or [None]
    if head is None:
        raise UserError(f"{file} is damaged in line 1: it is empty; move the file away")
    results = {line.key: line for line in lines if isinstance(line, Result)}
    sessions = [_pick(SESSION, head), *(line for line in lines if not isinstance(line, Result))]
    return head | {"sessions": sessions}, list(results.values())


class Journal:
    """The results of a running sweep; one process has it.

    Args:
      file: created with `head` as its first line if it does not exist; a last line that was cut short is removed.
      head: what is swept.

    Raises:
      UserError: the file has results of another base, or is damaged.
    """

    def __init__(self, file: pathlib.Path, head: dict[str, Any]):
        self._session = _pick(SESSION, head)
        if file.exists():
            self.head, results = read(file)
            require_same_base(self.head["config"], head["config"], file)
            self._lines = JsonLines(file, read_json_lines(file))
        else:
            self.head, results = head | {"sessions": [self._session]}, []
            self._lines = JsonLines(file, [head])
        self.results = {result.key: result for result in results}  # the last of each variant and seed

    def begin(self) -> None:
        """Notes this session, unless one like it is noted."""
        if self._session not in self.head["sessions"]:
            self._lines.write(self._session)
            self.head["sessions"].append(self._session)

    def append(self, result: Result) -> None:
        """Adds a result, which replaces an earlier one of the same run."""
        self._lines.write(dataclasses.asdict(result))
        self.results[result.key] = result


def require_same_variants(
    results: Iterable[Result], changes: Mapping[str, Mapping[str, Any]], file: pathlib.Path
) -> None:
    """Checks that each variant still has the changes that a file of results has for its name.

    Raises:
      UserError: a variant changes other fields now, as after an edit of a --variants file.
    """
    for result in results:
        now = changes.get(result.variant, result.changes)
        if now != result.changes:
            raise UserError(
                f"{file} has results of {result.variant!r} with the overrides {_show(result.changes)}; now they are "
                f"{_show(now)}: rename the variant, or choose another --workdir"
            )


def require_same_base(theirs: Mapping[str, Any], ours: Mapping[str, Any], file: pathlib.Path) -> None:
    """Checks that two flat configs are one base, but for MAY_DIFFER.

    Raises:
      UserError: they differ; the message names each field, and the file of the results.
    """
    if different := differences(theirs, ours, MAY_DIFFER):
        lines = "".join(f"\n  {difference}" for difference in different)
        raise UserError(f"{file} is of a sweep of another base:{lines}\nchoose another --workdir")


def make_head(base: ConfigDict, command: str, hardware: str) -> dict[str, Any]:
    """Makes the first line of results: what is swept, by which command, with what, on what."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
    is_clone = (ROOT / "train.py").exists()  # else git would tell of a repository around the environment
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]) if is_clone else ""
    if commit and _output(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]):
        commit += "+"  # with changes
    return {
        "config": flatten(base.to_dict()),
        "name": base.name,
        "command": command,
        "versions": versions,
        "hardware": hardware,
        "commit": commit,
    }


def hardware() -> str:
    """Names the visible GPUs, or else the cores, without allocating any."""
    if gpus := query_gpus("name"):
        return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    return f"{os.cpu_count()} x {model or platform.machine()}"


def query_gpus(fields: str) -> list[str]:
    """A line for each GPU, with these fields of nvidia-smi; empty if there are none, or the environment hides them."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    return _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]).splitlines()


def _output(command: Sequence[str]) -> str:
    """The standard output of a program; empty if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _show(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in changes.items()) or "none"


def _parse_line(values: dict[str, Any]) -> Any:
    """The result or the session of a line.

    Raises:
      ValueError: it is neither.
    """
    if values.keys() == set(SESSION):
        return values
    try:
        result = Result(**values)
    except TypeError as error:
        raise ValueError(f"it is no result ({error})") from error
    # Older versions left the evaluation after the last step out of the seconds.
    return dataclasses.replace(result, seconds=max([result.seconds, *(point[1] for point in result.curve)]))


def _pick(names: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    """The entries of these names.

    Raises:
      ValueError: one is missing.
    """
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"it does not say what was swept: it has no {missing[0]}")
    return {name: values[name] for name in names}
