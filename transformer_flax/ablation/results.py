"""`results.jsonl` of a sweep: one line for each run that has ended, small enough to be committed.

The first line describes the sweep, so a report needs no other file. A later session with another command, machine,
version or commit adds a line that describes the session. Each line has a checksum. If a run has several lines, the last
one counts, so a failed run can be tried again.
"""

import dataclasses
import importlib.metadata
import pathlib
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.errors import UserError
from transformer_flax.files import JsonLines, read_json_lines
from transformer_flax.training.config_fields import CHANGES_NOTHING, differences, flatten

ROOT = pathlib.Path(__file__).parents[2]
LIBRARIES = ("jax", "flax", "optax", "numpy", "tokenizers", "sacrebleu")
RESULTS, REPORT, SLURM = "results.jsonl", "report", "slurm"  # a file and two folders in a sweep's directory
SESSION = ("command", "versions", "hardware", "commit")  # what describes a session
HEAD = ("config", "name", *SESSION)
FINISHED, FAILED = "finished", "failed"
DATA = ("data.", "init_from", "embedding_init")  # fields that choose the data
# Results stay comparable if these fields differ: a seed belongs to a run, and the other fields change results no more
# than chance does.
MAY_DIFFER = (*CHANGES_NOTHING, "seed", "checkpoint.keep")


@dataclasses.dataclass(frozen=True)
class Result:
    """A run that has ended."""

    variant: str  # "A-h1", "A-h1 model.dropout=0.2", or the name of an entry of a --variants file
    row: str  # the row of table 3 or beyond it, before the grid's changes
    changes: dict[str, Any]  # flat config fields that differ from the sweep's base, except the seed
    seed: int
    status: str  # FINISHED or FAILED
    error: str  # one line; empty if the run finished
    parameters: int
    flops: float  # of all training steps, as model/flops counts them; 0 if unknown
    steps: int
    seconds: float  # from beginning to end, evaluations included; seeds trained together share them
    scores: dict[str, dict[str, float]]  # by split, at the end of training
    signature: str  # BLEU's signature; empty for classifiers
    curve: list[dict[str, float]]  # "step", "seconds" and the scores of each evaluation on the validation split
    # Fingerprints of the run's data, by name. Failed runs have none, nor had runs of older versions.
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.variant, self.seed

    @property
    def finished(self) -> bool:
        return self.status == FINISHED


def read(file: pathlib.Path) -> tuple[dict[str, Any], list[Result]]:
    """Returns the head and the last result of each run, in the order of the runs' first lines.

    The head gets an entry "sessions": the command, versions, hardware and commit of each session, in order. A last line
    without a newline is ignored: a kill has cut it short.
    """
    lines = read_json_lines(file, _parse_line)
    results = {line.key: line for line in lines if isinstance(line, Result)}
    others = [line for line in lines if not isinstance(line, Result)]
    heads = [line for line in others if "config" in line]
    if not heads or heads != lines[:1]:  # none, a later one, or several
        raise UserError(
            f"{file} is missing or damaged: its first line must describe a sweep, and no other line may describe "
            "another; keep each sweep in its own file, or move this one away"
        )
    head, *sessions = others
    return head | {"sessions": [_session(head), *sessions]}, list(results.values())


def _session(head: Mapping[str, Any]) -> dict[str, Any]:
    return {name: head[name] for name in SESSION}


class Journal:
    """The results of a running sweep. Only one process may use the journal.

    If the file does not exist, it is created with `head` as its first line. A last line that was cut short is removed.
    """

    def __init__(self, file: pathlib.Path, head: dict[str, Any]):
        if not file.exists():
            JsonLines(file, [head]).close()
        self.head, results = read(file)
        require_same_base(self.head["config"], head["config"], file)
        self._lines = JsonLines(file, read_json_lines(file))
        self._session = _session(head)
        self.results = {result.key: result for result in results}  # the last result of each variant and seed

    def begin(self) -> None:
        """Writes this session, unless the last one is equal."""
        if self._session != self.head["sessions"][-1]:
            self._lines.write(self._session)
            self.head["sessions"].append(self._session)

    def append(self, result: Result) -> None:
        """Writes a result, which replaces an earlier result of the same run."""
        self._lines.write(dataclasses.asdict(result))
        self.results[result.key] = result


def require_same_variants(
    results: Iterable[Result], changes: Mapping[str, Mapping[str, Any]], file: pathlib.Path
) -> None:
    """Checks that each variant has the changes of its finished runs in a results file: --variants may be edited."""
    for result in results:
        now = changes.get(result.variant, result.changes)
        if result.finished and now != result.changes:
            raise UserError(
                f"{file} has results of {result.variant!r} with the overrides {_show(result.changes)}; now they are "
                f"{_show(now)}: rename the variant, or choose another --workdir"
            )


def incomparable(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two flat configs that make their results incomparable, as `differences` does."""
    with_patience = ours.get("eval.patience", 0)  # counts evaluations
    return differences(theirs, ours, MAY_DIFFER if with_patience else (*MAY_DIFFER, "eval.every"))


def require_same_data(result: Result, others: Iterable[Result]) -> None:
    """Checks that a run had the same data as others that do not differ from it in the config of the data."""

    def chosen(run: Result) -> dict[str, Any]:
        return {name: value for name, value in run.changes.items() if name.startswith(DATA) or name in run.fingerprints}

    for other in others:
        names = [name for name, value in result.fingerprints.items() if other.fingerprints.get(name, value) != value]
        if names and chosen(other) == chosen(result):
            raise UserError(
                f"{result.variant} seed {result.seed} has other data ({', '.join(names)}) than {other.variant} seed "
                f"{other.seed}, so their scores do not compare; restore the data and move away the run of other data, "
                "or choose another --workdir"
            )


def require_same_base(theirs: Mapping[str, Any], ours: Mapping[str, Any], file: pathlib.Path) -> None:
    """Checks that the results of two flat configs of a base can be compared."""
    if different := incomparable(theirs, ours):
        lines = "".join(f"\n  {difference}" for difference in different)
        raise UserError(
            f"{file} is of a sweep of another base:{lines}\nto resume it, give these fields their old values, or "
            "choose another --workdir"
        )


def make_head(base: ConfigDict, command: str, hardware: str) -> dict[str, Any]:
    """Makes the first line of the results: the base's config and name, the command, versions, hardware and commit."""
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
    is_clone = (ROOT / "train.py").exists()  # else git would report a repository around the environment
    commit = output_of(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]) if is_clone else ""
    if commit and output_of(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]):
        commit += "+"  # with uncommitted changes
    return {
        "config": flatten(base.to_dict()),
        "name": base.name,
        "command": command,
        "versions": versions,
        "hardware": hardware,
        "commit": commit,
    }


def output_of(command: Sequence[str]) -> str:
    """Returns the standard output of a program; empty if the program is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _show(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in changes.items()) or "none"


def _parse_line(values: dict[str, Any]) -> Any:
    """Returns the result of a line; or the line itself, if it is a head or describes a session."""
    if {*HEAD} <= values.keys() or values.keys() == {*SESSION}:
        return values
    try:
        result = Result(**values)
        # Older versions wrote points without names, and left the evaluation after the last step out of the seconds.
        scores = ("bleu", "exact_match", "source_gain") if result.signature else ("accuracy", "macro_f1")
        names = ("step", "seconds", "perplexity", *scores)
        curve = [dict(zip(names, point, strict=False)) if isinstance(point, list) else point for point in result.curve]
        seconds = max([result.seconds, *(point["seconds"] for point in curve)])
        return dataclasses.replace(result, curve=curve, seconds=seconds)
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is no result ({error})") from error
