"""The trials of a sweep: their directories, their progress, and the jobs and commands that train them."""

import dataclasses
import pathlib
import re
import shlex
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict, FieldReference

from transformer_flax.ablation.results import FAILED, FINISHED, REPORT, RESULTS, SLURM, Result, incomparable, read
from transformer_flax.ablation.variants import Variant
from transformer_flax.data.normalisation import normalisers
from transformer_flax.decoding.scoring import score
from transformer_flax.errors import UserError
from transformer_flax.files import read_json_lines
from transformer_flax.model.flops import count_parameters
from transformer_flax.model.registry import kind_of
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.config_checks import model_config
from transformer_flax.training.config_fields import AUTO, flatten
from transformer_flax.training.run_directory import RunDirectory, final_splits

RESERVED = (RESULTS, REPORT, SLURM)  # names in a sweep's directory that no variant's folder may have
MOST_CHARACTERS = 120  # most characters of a folder's name, without the checksum


@dataclasses.dataclass(frozen=True)
class TrialProgress:
    """The progress of a trial, according to its metrics."""

    step: int = 0
    seconds: float = 0.0  # evaluations included; seeds trained together share them
    loss: float | None = None
    flops: float = 0.0
    curve: tuple[dict[str, float], ...] = ()  # as in `Result.curve`
    scores: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # by split; empty before the end

    def __str__(self) -> str:
        """Shows the loss, the best validation score and the source gain: "loss 1.234, BLEU 34.98, source gain 2.11"."""
        shown = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        if self.curve:
            last = self.curve[-1]
            if "macro_f1" in last:
                shown.append(f"accuracy {self._best('accuracy'):.1%}")
            else:  # BLEU of single words is 0
                exact = f"exact {self._best('exact_match'):.1%}"
                shown.append(f"BLEU {self._best('bleu'):.2f}" if last["bleu"] else exact)
            if "source_gain" in last:
                shown.append(f"source gain {last['source_gain']:.2f}")
        return ", ".join(shown)

    def _best(self, name: str) -> float:
        return max(point[name] for point in self.curve)


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A variant with a seed: one run of transformer_flax.train."""

    variant: Variant
    seed: int
    path: pathlib.Path  # the run's working directory

    def __str__(self) -> str:
        return f"{self.variant.name} seed {self.seed}"

    @property
    def key(self) -> tuple[str, int]:
        """The key of the trial's result."""
        return self.variant.name, self.seed

    @property
    def steps(self) -> int:
        return self.variant.config.steps

    def progress(self) -> TrialProgress:
        """Reads the trial's progress. Damaged metrics count as no progress; training will refuse them."""
        try:
            return measure(read_json_lines(RunDirectory(self.path).metrics_file), self.steps)
        except UserError:
            return TrialProgress()

    def result(self) -> Result | None:
        """Returns the trial's result, or None if the metrics do not reach the last step.

        Raises:
          UserError: the working directory holds a run of another config.
        """
        workdir, progress = RunDirectory(self.path), self.progress()
        ended = progress.scores.keys() >= {*final_splits(self.variant.config)}
        if not (ended or workdir.config_file.exists()):
            return None
        theirs, ours = flatten(workdir.load_config().to_dict()), flatten(self.variant.config.to_dict())
        different = incomparable(theirs, ours)
        if theirs["seed"] != self.seed:  # as of a folder that was copied
            different.append(f"config.seed: {theirs['seed']} there, {self.seed} now")
        if different:
            raise UserError(
                f"{self.path} holds a run of another config ({'; '.join(different)}); move it away, or choose another "
                "--workdir"
            )
        if not ended:
            return None
        vocab_size, fingerprints = workdir.load_tokenizer().vocab_size, workdir.load_fingerprints()
        return self._result(progress, vocab_size, status=FINISHED, error="", fingerprints=fingerprints)

    def failure(self, error: str) -> Result:
        """Returns the result of a trial that has failed."""
        return self._result(self.progress(), self.variant.config.data.vocab_size, status=FAILED, error=error)

    def _result(self, progress: TrialProgress, vocab_size: int, **ended: Any) -> Result:
        model = model_config(self.variant.config, vocab_size)
        _, text = normalisers(self.variant.config.data)
        return Result(
            variant=self.variant.name,
            row=self.variant.row,
            changes=self.variant.changes,
            seed=self.seed,
            parameters=sum(count_parameters(model).values()),
            flops=progress.flops,
            steps=progress.step,
            seconds=progress.seconds,
            scores=progress.scores,
            # BLEU's signature does not depend on the translations.
            signature="" if kind_of(model).classifies else score(["a"], ["a"], text).signature,
            curve=[*progress.curve],
            **ended,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """The trials that one process trains: one, or several seeds of a variant at once."""

    trials: tuple[Trial, ...]  # all of one variant

    def __str__(self) -> str:
        return f"{self.trials[0].variant.name} seed{'s' * (len(self.trials) > 1)} {self.seeds}"

    @property
    def seeds(self) -> str:
        return ",".join(str(trial.seed) for trial in self.trials)

    @property
    def log(self) -> pathlib.Path:
        """The log file, beside the working directory."""
        seeds = [trial.seed for trial in self.trials]
        first, last = min(seeds), max(seeds)  # not all, as a file's name has at most 255 bytes
        name = f"seed{first}.log" if first == last else f"seeds{first}-{last}.log"
        return self.trials[0].path.with_name(name)


def make_jobs(trials: Sequence[Trial], results: Iterable[Result], *, together: bool) -> list[Job]:
    """Makes a job for each unfinished trial, or for all seeds of a variant together that resume from the same step.

    A trial that has a result failed before. It has a job of its own, as a seed that fails ends those trained with it.
    """
    failed = {result.key for result in results}
    groups: dict[Any, list[Trial]] = {}
    for trial in trials:
        if together and trial.key not in failed:
            key = trial.variant.name, max(saved_steps(RunDirectory(trial.path).checkpoints), default=0)
        else:
            key = trial
        groups.setdefault(key, []).append(trial)
    return [Job(tuple(group)) for group in groups.values()]


@dataclasses.dataclass(frozen=True)
class TrialFactory:
    """Makes the trials of a sweep, and the commands that train them."""

    config: str  # the value of --config, with the argument after a colon if there is one
    base: ConfigDict  # this config with `overrides` applied, except that a model.dtype "auto" stays "auto"
    # Flat fields that the command line or the sweep sets for all trials. They must include fields that refer to other
    # fields of the config. Otherwise such a field would follow a row's changes to the field it refers to.
    overrides: dict[str, Any]
    workdir: pathlib.Path

    def trials(self, variants: Sequence[Variant], seeds: Sequence[int]) -> list[Trial]:
        """Makes all trials, seed by seed. An interrupted sweep has then trained all variants about equally often."""
        return [
            Trial(variant, seed, self.workdir / folder_name(variant.name) / f"seed{seed}")
            for seed in seeds
            for variant in variants
        ]

    def command(self, job: Job) -> list[str]:
        """Returns the command that trains a job, to be run in the current directory."""
        first = job.trials[0]
        name = f"{self.base.name}-{first.path.parent.name}"
        fields = self.overrides | first.variant.changes
        if len(job.trials) == 1:
            fields |= {"name": f"{name}-seed{first.seed}", "seed": first.seed}
            train = [f"--workdir={first.path}"]
        else:
            fields |= {"name": name}
            train = [f"--workdir={first.path.parent}", f"--seeds={job.seeds}"]
        overrides = [f"--config.{field}={value}" for field, value in fields.items()]
        return [sys.executable, "-m", "transformer_flax.train", f"--config={self.config}", *overrides, *train]

    def shown(self, job: Job) -> str:
        """Returns the command as a person types it."""
        return shlex.join(["python", *self.command(job)[1:]])


def measure(lines: Sequence[dict[str, Any]], steps: int) -> TrialProgress:
    """Measures a trial's progress from the lines of its metrics.

    The trial ends at step `steps`, or at a final evaluation before it, if patience ended the run.
    """
    lines = _share_seconds(lines)
    trained = [line for line in lines if "train/learning_rate" in line]
    evaluated = [line for line in lines if "valid/perplexity" in line]
    final = [line["step"] for line in lines if "valid/final" in line]
    end = final[-1] if final and final[-1] == lines[-1]["step"] else steps  # else resumed with more patience
    scores: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["step"] == end:
            scores |= _scores_of(line)
    return TrialProgress(
        step=trained[-1]["step"] if trained else 0,
        seconds=lines[-1]["seconds"] if lines else 0.0,
        loss=trained[-1].get("train/loss") if trained else None,
        flops=_count_flops(trained),
        curve=tuple(
            {"step": line["step"], "seconds": line["seconds"], **_scores_of(line)["valid"]} for line in evaluated
        ),
        scores=scores,
    )


def _scores_of(line: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the scores in a line of metrics, by split and name."""
    scores: dict[str, dict[str, float]] = {}
    for name, value in line.items():
        split, slash, measured = name.partition("/")
        if slash and split != "train" and measured not in ("averaged", "final"):
            scores.setdefault(split, {})[measured] = value
    return scores


def _count_flops(trained: Sequence[dict[str, Any]]) -> float:
    """Returns the FLOPs of all steps: the mean over timed steps, times the number of steps.

    Steps that compiled are not timed.
    """
    timed_steps, flops, before = 0, 0.0, 0
    for line in trained:
        if rate := line.get("train/steps_per_second"):
            timed_steps += line["step"] - before
            flops += (line["step"] - before) * line["train/flops_per_second"] / rate
        before = line["step"]
    return flops * before / timed_steps if timed_steps else 0.0


def _share_seconds(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines with the trial's share of the seconds: the time divided by the seeds trained together."""
    shared, before, share = [], 0.0, 0.0
    at_once = next((line.get("train/seeds_at_once", 1) for line in lines if "train/learning_rate" in line), 1)
    for line in lines:
        if "train/learning_rate" in line:  # an evaluation belongs to the process that trained before it
            at_once = line.get("train/seeds_at_once", 1)
        share += (line["seconds"] - before) / at_once
        before = line["seconds"]
        shared.append(line | {"seconds": round(share, 2)})
    return shared


def folder_name(variant: str) -> str:
    """Returns the name of a variant's folder, with commas for blanks.

    It is the variant's name if that is safe on any system, else a safe form with a checksum.
    """
    safe = re.sub(r"[^\w.=+ -]", "_", variant, flags=re.ASCII)
    if safe == variant and len(safe) <= MOST_CHARACTERS and safe[:1] not in ".- " and safe not in RESERVED:
        return safe.replace(" ", ",")
    return f"{safe.replace(' ', ',').lstrip('.-,')[:MOST_CHARACTERS]}-{zlib.crc32(variant.encode()):08x}"


def chosen_dtype(workdir: pathlib.Path, variants: Sequence[Variant]) -> str | None:
    """Returns the `model.dtype` that the sweep has used so far; None if no trial has begun.

    It is the one in the results file or, if that says "auto", the one of the first trial in the order of paths. Ignores
    trials of a variant that sets `model.dtype`.
    """
    file = workdir / RESULTS
    if file.exists() and (named := read(file)[0]["config"].get("model.dtype", AUTO)) != AUTO:
        return named
    given = {folder_name(variant.name) for variant in variants if "model.dtype" in variant.changes}
    begun = (RunDirectory(path) for path in sorted(workdir.glob("*/seed*")) if path.parent.name not in given)
    return next((run.load_config().model.dtype for run in begun if run.config_file.exists()), None)


def references(config: ConfigDict) -> list[str]:
    """Returns the fields that take their value from another field."""
    fields = flatten(config.to_dict(preserve_field_references=True))
    return [field for field, value in fields.items() if isinstance(value, FieldReference)]
