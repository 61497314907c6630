"""Runs a sweep: skips finished trials, resumes started trials, and continues past failures."""

import contextlib
import logging
import pathlib
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from transformer_flax.ablation.expected_cost import assumed_flops, assumed_left, estimate
from transformer_flax.ablation.local import JOBS_LOCK, Local, last_of
from transformer_flax.ablation.results import REPORT, RESULTS, Journal, Result, require_same_data, require_same_variants
from transformer_flax.ablation.slurm import Slurm
from transformer_flax.ablation.trials import Job, Trial, TrialFactory, make_jobs
from transformer_flax.console import Progress, counted, duration
from transformer_flax.errors import UserError
from transformer_flax.files import is_partial, try_lock
from transformer_flax.training.checkpoint_files import saved_steps
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.run_directory import LOCK, RunDirectory, require_safe

POLL = 0.5  # seconds
SHOWN = 5  # last lines of a failed job's log that are printed

logger = logging.getLogger(__name__)


def sweep(
    trials: Sequence[Trial],
    factory: TrialFactory,
    head: dict[str, Any],
    launcher: Local | Slurm,
    *,
    together: bool = False,
) -> None:
    """Trains the unfinished trials of a sweep, and writes the results and the report.

    First waits for jobs that an earlier sweep, for example a killed one, has left behind. With `together`, one process
    trains all unfinished seeds of a variant. If trials fail, a UserError is raised once all have ended.
    """
    with Interruption() as interruption, _claim(factory.workdir):
        if earlier := launcher.left_behind():
            logger.warning("waiting for %s in %s", earlier, factory.workdir)
        while launcher.left_behind():
            if interruption.asked:
                interruption.end("before anything was started")
            time.sleep(POLL)
        file = factory.workdir / RESULTS
        journal = Journal(file, head)
        variants = {trial.variant for trial in trials}
        changes = {variant.name: variant.changes for variant in variants}
        require_same_variants(journal.results.values(), changes, file)
        if not any(one.row == "base" and not one.changes for one in (*variants, *journal.results.values())):
            logger.warning(
                "no run is of the base itself, so the report cannot say what a change does: add base to --rows, and "
                "the base's value to each --grid"
            )
        running = _Sweep(trials, factory, journal, launcher, interruption)
        failed = running.run(together=together)
        from transformer_flax.ablation import report  # here, because drawing takes seconds to load

        file = report.write(journal.head, journal.results.values(), factory.workdir / REPORT)
        running.progress.say(f"report: {file}")
    if failed:
        many = f"{len(failed):,} of {counted(len(trials), 'run')}"
        raise UserError(f"{many} failed: {', '.join(map(str, failed))}; the same command tries again")


@contextlib.contextmanager
def _claim(workdir: pathlib.Path) -> Generator[None]:
    """Context manager: creates a sweep's directory if needed, and keeps other sweeps out of it."""
    require_safe(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    names = {file.name for file in workdir.iterdir() if not is_partial(file)} - {LOCK}
    if names and not names & {RESULTS, JOBS_LOCK}:  # a damaged file of results may have been moved away
        raise UserError(f"{workdir} holds no sweep, but {min(names)}; choose another --workdir")
    with (workdir / LOCK).open("a") as lock:
        if not try_lock(lock):
            raise UserError(f"another sweep runs in {workdir}; wait for it, or choose another --workdir")
        yield


class _Sweep:
    """A running sweep. On a terminal, each trial that is being trained has a bar."""

    def __init__(
        self,
        trials: Sequence[Trial],
        factory: TrialFactory,
        journal: Journal,
        launcher: Local | Slurm,
        interruption: Interruption,
    ):
        self._trials, self._factory, self._journal = trials, factory, journal
        self._launcher, self._interruption = launcher, interruption
        self._jobs: list[Job] = []  # jobs that have not ended
        self._left: dict[Trial, int] = {}  # the trials of these jobs, each with its step
        self._failed: list[Trial] = []
        self.progress = Progress()
        self._bars: dict[Trial, tuple[contextlib.ExitStack, Callable]] = {}  # of trials that are being trained
        self._sizes: dict[Trial, int] = {}  # bytes of each metrics file when it was last read
        self._uncounted = iter({trial.variant for trial in trials})  # their operations are not counted yet

    def run(self, *, together: bool) -> list[Trial]:
        """Trains the unfinished trials; returns the trials that failed."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.progress)
            self._left = {trial: 0 for trial in self._trials if not self._has_finished(trial)}
            done = len(self._trials) - len(self._left)
            already = f", of which {done:,} had finished before" if done else ""
            self.progress.say(f"{counted(len(self._trials), 'run')} in {self._factory.workdir}{already}")
            if self._left:
                self._journal.begin()
            stack.callback(self._launcher.stop)  # also after an error
            self._jobs = make_jobs(list(self._left), self._journal.results.values(), together=together)
            if self._launcher.at_a_time > 1:  # the longest of each seed first: a long job that begins last runs alone
                self._count_all()
                seeds = [trial.seed for trial in self._trials]
                self._jobs.sort(
                    key=lambda job: (seeds.index(job.trials[0].seed), -assumed_flops(job.trials[0].variant))
                )
            self._launcher.submit(self._jobs)
            show = stack.enter_context(self.progress.bar("runs", done))
            while self._jobs:
                if self._interruption.asked:  # before poll: a job that the same signal ended has not failed
                    fate = self._launcher.stop()
                    left = f"{len(self._left):,} of {len(self._trials):,} runs left"
                    self._interruption.end(f"with {left}; {fate}")
                for job, problem in self._launcher.poll():
                    self._end(job, problem)
                for job in self._launcher.started():
                    self._watch(job)
                note = f"{len(self._bars):,} running, {len(self._failed):,} failed"
                show(len(self._trials) - len(self._left), len(self._trials), note=note, left=self._seconds_left())
                time.sleep(POLL)
        self._summarise()
        return self._failed

    def _has_finished(self, trial: Trial) -> bool:
        """Returns whether a trial has finished. Adds its result if an earlier sweep was killed before adding it."""
        known = self._journal.results.get(trial.key)
        if known is not None and known.finished:
            return True
        if result := self._result(trial):
            self._journal.append(result)
        return result is not None

    def _result(self, trial: Trial) -> Result | None:
        """Returns a trial's result if the trial has ended. Its data must be those of the sweep's other runs."""
        result = trial.result()
        if result:
            require_same_data(result, self._journal.results.values())
        return result

    def _end(self, job: Job, problem: str) -> None:
        """Adds the results of a job that has ended."""
        self._jobs.remove(job)
        for trial in job.trials:
            try:
                result, why = self._result(trial), problem
            except UserError as error:
                result, why = None, str(error)
            if result is None:
                ended = "it ended before its last step was evaluated" if job.log.exists() else "it never began"
                result = trial.failure(" ".join(why.split()) or ended)
            self._journal.append(result)
            del self._left[trial]
            if trial in self._bars:
                bar, _ = self._bars.pop(trial)
                bar.close()
            if result.finished:
                self.progress.say(f"{trial} has finished in {duration(result.seconds)}: {_show_scores([result])}")
            else:
                self._failed.append(trial)
                self.progress.say(f"{trial} FAILED: {result.error}")
        if any(trial in self._failed for trial in job.trials):
            lines = [line for line in last_of(job.log).splitlines() if line.strip()][-SHOWN:]
            lines += [f"all of it: {job.log}"] if job.log.exists() else []
            lines += [f"by hand: {self._factory.shown(job)}"]
            self.progress.say("\n".join(f"    {line}" for line in lines))

    def _watch(self, job: Job) -> None:
        """Shows the progress of a job's trials whose metrics have changed."""
        for trial in job.trials:
            file = RunDirectory(trial.path).metrics_file
            size = file.stat().st_size if file.exists() else 0
            if self._sizes.get(trial) == size:
                continue
            self._sizes[trial] = size
            progress = trial.progress()
            self._left[trial] = progress.step
            if trial not in self._bars:
                saved = max(saved_steps(RunDirectory(trial.path).checkpoints), default=0)
                step = f"resumes from step {saved:,}" if saved else "begins"
                self.progress.say(f"{trial} {step}; log: {job.log}")
                bar = contextlib.ExitStack()
                self._bars[trial] = bar, bar.enter_context(self.progress.bar(str(trial), progress.step))
            _, show = self._bars[trial]
            show(progress.step, trial.steps, note=str(progress))

    def _count_all(self) -> None:
        """Counts the operations of all variants, each of which takes about a second."""
        variants = {job.trials[0].variant for job in self._jobs}
        with self.progress.bar("counting operations") as update:
            for done, variant in enumerate(variants):
                update(done, len(variants))
                assumed_flops(variant)
                if self._interruption.asked:
                    self._interruption.end("before anything was started")

    def _seconds_left(self) -> float | None:
        """Returns the expected seconds left; None until a trial has finished and all variants are counted."""
        at_a_time = min(self._launcher.at_a_time, len(self._jobs))
        if not at_a_time or len(self._trials) == len(self._left) + len(self._failed):
            return None
        if variant := next(self._uncounted, None):  # one at a time, so that the sweep goes on meanwhile
            assumed_flops(variant)
            return None
        _, seconds = estimate(self._trials, self._journal.results.values())  # for each assumed FLOP
        return seconds * sum(assumed_left(trial, step) for trial, step in self._left.items()) / at_a_time

    def _summarise(self) -> None:
        """Prints the mean scores of each variant."""
        rows = []
        for name in dict.fromkeys(trial.variant.name for trial in self._trials):
            trials = [trial for trial in self._trials if trial.variant.name == name]
            results = [result for trial in trials if (result := self._journal.results.get(trial.key))]
            finished = [result for result in results if result.finished]
            counts = f"{len(finished)} of {len(trials)}"
            if finished:
                seconds = sum(result.seconds for result in finished) / len(finished)
                parameters = f"{finished[0].parameters:,}"
                rows.append([name, parameters, counts, _show_scores(finished), duration(seconds)])
            else:
                rows.append([name, "", counts, results[0].error if results else "", ""])
        columns = ["variant", "parameters", "seeds", "validation data, mean of the seeds", "time"]
        self.progress.table(f"{self._factory.workdir}/{RESULTS}", columns, rows)


def _show_scores(results: Sequence[Result]) -> str:
    """Returns the mean validation scores of finished trials, as in the report but shorter."""
    scores = [result.scores["valid"] for result in results]

    def mean(name: str) -> float:
        return statistics.fmean(each[name] for each in scores)

    if "macro_f1" in scores[0]:
        others = f"accuracy {mean('accuracy'):.1%}, macro-F1 {mean('macro_f1'):.1%}"
    else:
        others = f"BLEU {mean('bleu'):.2f}, exact {mean('exact_match'):.1%}"
    return f"perplexity {statistics.geometric_mean(each['perplexity'] for each in scores):.3f}, {others}"
