"""The runs of a sweep: where they lie, the command that trains them, and how far each is."""

import dataclasses
import pathlib
import re
import shlex
import sys
import zlib
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict, FieldReference

from transformer_flax.ablation.results import CLASSIFYING, FAILED, FINISHED, FREE_FIELDS, ROOT, TRANSLATING, Result
from transformer_flax.ablation.variants import Variant
from transformer_flax.decoding.bleu import score
from transformer_flax.errors import UserError
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.flops import count_parameters
from transformer_flax.model.registry import kind_of
from transformer_flax.training.fields import differences, flatten
from transformer_flax.training.metrics import read_lines
from transformer_flax.training.run_directory import Workdir
from transformer_flax.training.setup import model_config

RESERVED = ("report", "slurm", "results.jsonl")  # names in a sweep's directory that are of no variant
LONGEST = 120  # characters of a folder's name
TRAIN = ROOT / "train.py"


@dataclasses.dataclass(frozen=True)
class Standing:
    """How far a run is, as its metrics tell."""

    step: int = 0
    seconds: float = 0.0  # evaluations included; of seeds that were trained together, its share
    loss: float | None = None
    best: tuple[str, float] | None = None  # the measure and its best value on the validation data
    rate: float | None = None  # steps a second
    curve: tuple[list[float], ...] = ()
    source_gain: float | None = None  # at the last evaluation
    flops: float = 0.0
    scores: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # of the last step, by split


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """A variant with a seed."""

    variant: Variant
    seed: int
    path: pathlib.Path  # its working directory

    def __str__(self) -> str:
        return f"{self.variant.name} seed {self.seed}"

    @property
    def steps(self) -> int:
        return self.variant.config.steps

    def standing(self) -> Standing:
        """How far it is; damaged metrics tell nothing, and training refuses to go on with them."""
        file = Workdir(self.path).metrics_file
        try:
            return measure(read_lines(file), self.steps) if file.exists() else Standing()
        except UserError:
            return Standing()

    def result(self) -> Result | None:
        """What it has found, if it has come to its end.

        Raises:
          UserError: its directory holds another run, or one whose config or tokenizer is damaged.
        """
        standing = self.standing()
        splits = {"valid", "test"} if self.variant.config.eval.test else {"valid"}
        if not splits <= standing.scores.keys():
            return None
        place = Workdir(self.path)
        self._require_config(place)
        model = model_config(self.variant.config, place.load_tokenizer().vocab_size)
        return self._result(FINISHED, "", model, standing)

    def failure(self, error: str) -> Result:
        """What it is known by if it has failed."""
        model = model_config(self.variant.config, self.variant.config.data.vocab_size)
        return self._result(FAILED, error, model, self.standing())

    def _result(self, status: str, error: str, model: ModelConfig, standing: Standing) -> Result:
        # Of BLEU, it depends on nothing but the version of sacreBLEU.
        signature = "" if kind_of(model).classifies else score(["a"], ["a"]).signature
        return Result(
            variant=self.variant.name,
            row=self.variant.row,
            changes=self.variant.changes,
            seed=self.seed,
            status=status,
            error=error,
            parameters=sum(count_parameters(model).values()),
            flops=standing.flops,
            steps=standing.step,
            seconds=standing.seconds,
            scores=standing.scores,
            signature=signature,
            curve=[list(point) for point in standing.curve],
        )

    def _require_config(self, place: Workdir) -> None:
        ours = flatten(self.variant.config.to_dict()) | {"seed": self.seed}
        if different := differences(flatten(place.load_config().to_dict()), ours, FREE_FIELDS):
            raise UserError(
                f"{self.path} holds a run of another config ({'; '.join(different)}); move it away, or choose another "
                "--workdir"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What one process trains: a run, or some seeds of a variant at a time.

    Args:
      runs: of one variant.
      begun_as: the log of a process that was begun with other seeds too, which have ended.
    """

    runs: tuple[Run, ...]
    begun_as: pathlib.Path | None = None

    def __str__(self) -> str:
        seeds = ",".join(str(run.seed) for run in self.runs)
        return f"{self.runs[0].variant.name} seed{'s' * (len(self.runs) > 1)} {seeds}"

    @property
    def log(self) -> pathlib.Path:
        """What it prints, beside the directory of the run."""
        if self.begun_as is not None:
            return self.begun_as
        first = self.runs[0].path
        if len(self.runs) == 1:
            return first.with_name(f"{first.name}.log")
        return first.with_name(f"seeds{','.join(str(run.seed) for run in self.runs)}.log")


def share_out(runs: Sequence[Run], *, together: bool) -> list[Job]:
    """The jobs that train some runs: one for each, or for all seeds of a variant together."""
    if not together:
        return [Job((run,)) for run in runs]
    variants: dict[str, list[Run]] = {}
    for run in runs:
        variants.setdefault(run.variant.name, []).append(run)
    return [Job(tuple(group)) for group in variants.values()]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the runs of a sweep are trained.

    Args:
      config: what --config is given, with an argument behind a colon if there is one.
      base: what that config is with `overrides`.
      overrides: flat fields that the user has set on the command line, or the sweep for all of its runs.
      workdir: of the sweep.
    """

    config: str
    base: ConfigDict
    overrides: dict[str, Any]
    workdir: pathlib.Path

    def runs(self, variants: Sequence[Variant], seeds: int) -> list[Run]:
        """All of them, seed by seed: a sweep that is cut short has every variant as often as another.

        Raises:
          UserError: two variants have one name, or names that some file systems take for one.
        """
        folders, taken = {}, {}
        for variant in variants:
            folder = folder_name(variant.name)
            if (other := taken.get(folder.lower())) is not None:
                raise UserError(f"two variants would lie in one folder, {other!r} and {variant.name!r}; rename one")
            folders[variant.name], taken[folder.lower()] = folder, variant.name
        return [
            Run(variant, seed, self.workdir / folders[variant.name] / f"seed{seed}")
            for seed in range(seeds)
            for variant in variants
        ]

    def command(self, job: Job) -> list[str]:
        """What trains it, for a shell in the current directory."""
        first = job.runs[0]
        name = f"{self.base.name}-{first.path.parent.name}"
        # A field that follows another one would follow what the row makes of that; in the sweep's base it has a value.
        fixed = {field: flatten(self.base.to_dict())[field] for field in _references(self.base)}
        fields = fixed | self.overrides | first.variant.changes | {"name": name}
        train = [f"--workdir={first.path.parent}", f"--seeds={','.join(str(run.seed) for run in job.runs)}"]
        if len(job.runs) == 1:
            fields |= {"name": f"{name}-seed{first.seed}", "seed": first.seed}
            train = [f"--workdir={first.path}"]
        here = pathlib.Path.cwd()
        script = TRAIN.relative_to(here) if TRAIN.is_relative_to(here) else TRAIN
        overrides = [f"--config.{field}={value}" for field, value in fields.items()]
        return [sys.executable, str(script), f"--config={self.config}", *overrides, *train]

    def shown(self, job: Job) -> str:
        """The command as a person types it."""
        return shlex.join(["python", *self.command(job)[1:]])


def measure(lines: Sequence[dict[str, Any]], steps: int) -> Standing:
    """What the lines of a run's metrics say.

    The last step is `steps`, or that of an evaluation which says that it is final. FLOPs are those of the steps that
    were timed, which all but those that compiled are, as a mean over every interval of the log; an interval without any
    takes the mean of all. Seconds are the run's share of those that passed, where it was trained together with others.
    """
    lines = _shared(lines)
    trained = [line for line in lines if "train/learning_rate" in line]
    evaluated = [line for line in lines if "valid/perplexity" in line]
    measures = CLASSIFYING if any("valid/macro_f1" in line for line in evaluated) else TRANSLATING
    made = trained[-1]["step"] if trained else 0
    timed_steps, flops, before = 0, 0.0, 0
    for line in trained:
        if line.get("train/steps_per_second"):
            timed_steps += line["step"] - before
            flops += (line["step"] - before) * line["train/flops_per_second"] / line["train/steps_per_second"]
        before = line["step"]
    names = ("step", "seconds", "valid/perplexity", *(f"valid/{name}" for name in measures))
    if all("valid/source_gain" in line for line in evaluated):
        names += ("valid/source_gain",)
    curve = tuple([line[name] for name in names] for line in evaluated)
    final = [line["step"] for line in lines if "valid/final" in line]
    end = final[-1] if final and final[-1] == lines[-1]["step"] else steps  # else patience was raised afterwards
    last = [line for line in lines if line["step"] == end]
    scores: dict[str, dict[str, float]] = {}
    for line in last:
        for name, value in line.items():
            split, slash, measured = name.partition("/")
            if slash and split != "train" and measured not in ("averaged", "final"):
                scores.setdefault(split, {})[measured] = value
    return Standing(
        step=made,
        seconds=lines[-1]["seconds"] if lines else 0.0,
        loss=trained[-1].get("train/loss") if trained else None,
        best=_best(curve, measures),
        source_gain=evaluated[-1].get("valid/source_gain") if evaluated else None,
        rate=trained[-1].get("train/steps_per_second") if trained else None,
        curve=curve,
        flops=flops * made / timed_steps if timed_steps else 0.0,
        scores=scores,
    )


def _shared(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines with the run's share of the seconds, which are those of all seeds that are trained together."""
    shared, before, share = [], 0.0, 0.0
    at_once = next((line.get("train/seeds_at_once", 1) for line in lines if "train/learning_rate" in line), 1)
    for line in lines:
        if "train/learning_rate" in line:  # an evaluation is of the same process as the training before it
            at_once = line.get("train/seeds_at_once", 1)
        share += (line["seconds"] - before) / max(1, at_once)
        before = line["seconds"]
        shared.append(line | {"seconds": round(share, 2)})
    return shared


def measured(result: Result) -> Standing:
    """How far a run was when it ended, as far as its result tells."""
    return Standing(step=result.steps, seconds=result.seconds, best=_best(result.curve, result.measures), rate=None)


def _best(curve: Sequence[Sequence[float]], measures: tuple[str, str]) -> tuple[str, float] | None:
    """The best validation score: accuracy, or BLEU, or exact matches where BLEU, of four words in a row, is nothing."""
    if not curve:
        return None
    first, second = (max(point[column] for point in curve) for column in (3, 4))
    if measures == CLASSIFYING:
        return "accuracy", first
    return ("BLEU", first) if first else ("exact", second)


def folder_name(variant: str) -> str:
    """A variant's name as that of a folder: unlike for unlike names, and harmless on any system."""
    safe = re.sub(r"[^\w.=+ -]", "_", variant, flags=re.ASCII)
    if safe == variant and len(safe) <= LONGEST and safe[:1] not in ".- " and safe not in RESERVED:
        return safe.replace(" ", ",")
    return f"{safe.replace(' ', ',').lstrip('.-,')[:LONGEST]}-{zlib.crc32(variant.encode()):08x}"


def _references(config: ConfigDict, prefix: str = "") -> list[str]:
    """The fields that take their value from another one."""
    found = []
    for name, value in config.items(preserve_field_references=True):
        if isinstance(value, ConfigDict):
            found += _references(value, f"{prefix}{name}.")
        elif isinstance(value, FieldReference):
            found.append(f"{prefix}{name}")
    return found
