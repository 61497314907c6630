"""Runs a sweep: skips finished trials, resumes started ones, and continues past failures."""

import collections
import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from transformer_flax.ablation.comparison import LOG_PERPLEXITY
from transformer_flax.ablation.estimate import Estimator
from transformer_flax.ablation.jobs import Job, Recipe, Trial, make_jobs, measure_result
from transformer_flax.ablation.launch import Launcher, last_of
from transformer_flax.ablation.live_table import RUNNING, WAITING, Board, Line
from transformer_flax.ablation.results import CLASSIFYING, RESULTS, Journal, Result, require_same_variants
from transformer_flax.console import counted, duration
from transformer_flax.errors import UserError
from transformer_flax.files import is_partial, try_lock
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.run_directory import RunDirectory

REPORT = "report"  # a folder
LOCK = ".lock"  # held by the sweep
JOBS_LOCK = ".jobs.lock"  # held by the sweep and its processes, so until the last of them ends
POLL = 0.5  # seconds
SHOWN = 5  # lines of a failed job's log

logger = logging.getLogger(__name__)


def sweep(
    trials: Sequence[Trial],
    recipe: Recipe,
    head: dict[str, Any],
    make_launcher: Callable[[IO], Launcher],
    *,
    together: bool = False,
) -> list[Result]:
    """Trains what is left of a sweep, and writes its results and its report.

    Args:
      trials: of the sweep, in the order in which they are trained.
      recipe: how they are trained.
      head: of the results.
      make_launcher: called with a file that each process keeps open.
      together: one process trains all seeds of a variant that are left.

    Returns:
      All results in the file, including those of other variants of the same base.

    Raises:
      UserError: the directory holds another sweep or a running one; or, once all trials have ended, some have failed.
      Interrupted: a signal asked the sweep to end; the same call resumes it.
    """
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        inherited = stack.enter_context(_claim(recipe.workdir, interruption))
        file = recipe.workdir / RESULTS
        journal = Journal(file, head)
        require_same_variants(journal.results, {trial.variant.name: trial.variant.changes for trial in trials}, file)
        failed = _Sweep(trials, recipe, journal, make_launcher(inherited), interruption).run(together=together)
        print(f"report: {write_report(recipe.workdir, journal.head, journal.results)}")
    if failed:
        many = f"{len(failed)} of {len(trials)} runs failed" if len(failed) > 1 else f"a run of {len(trials)} failed"
        raise UserError(f"{many}: {', '.join(map(str, failed))}; the same command tries again")
    return journal.results


def write_report(workdir: pathlib.Path, head: dict[str, Any], results: Sequence[Result]) -> pathlib.Path:
    """Writes the report of a sweep; returns its file."""
    from transformer_flax.ablation import report  # only when needed: drawing takes seconds to load

    return report.write(results, head, workdir / REPORT)


@contextlib.contextmanager
def _claim(workdir: pathlib.Path, interruption: Interruption) -> Iterator[IO]:
    """A context that locks a sweep's directory; yields the lock that its processes share.

    Waits for processes that an earlier sweep has left behind, such as one that was killed.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    others = {file.name for file in workdir.iterdir() if not is_partial(file)} - {LOCK, JOBS_LOCK}
    if others and RESULTS not in others:
        raise UserError(f"{workdir} holds no sweep, but {min(others)}; choose another --workdir")
    with (workdir / LOCK).open("a") as own, (workdir / JOBS_LOCK).open("a") as inherited:
        if not try_lock(own):
            raise UserError(f"another sweep runs in {workdir}; wait for it, or choose another --workdir")
        if not try_lock(inherited):
            logger.warning("waiting for the runs of an earlier sweep in %s, which save their step", workdir)
            while not try_lock(inherited):
                interruption.check("before anything was started")
                time.sleep(POLL)
        yield inherited


class _Sweep:
    """A running sweep."""

    def __init__(
        self, trials: Sequence[Trial], recipe: Recipe, journal: Journal, launcher: Launcher, interruption: Interruption
    ):
        self._trials, self._recipe, self._journal = trials, recipe, journal
        self._launcher, self._interruption = launcher, interruption
        self._lines = {trial: Line(str(trial), trial.steps) for trial in trials}
        self._sizes: dict[Trial, int] = {}  # of metrics files when they were last read
        self._failed: list[Trial] = []

    def run(self, *, together: bool) -> list[Trial]:
        """Trains all that is left; returns the trials that failed.

        Raises:
          Interrupted: a signal asked for it.
        """
        with Board() as self._board, contextlib.ExitStack() as stack:
            todo = [trial for trial in self._trials if not self._skip_finished(trial)]
            done = len(self._trials) - len(todo)
            already = f", of which {done:,} had finished before" if done else ""
            self._board.say(f"{counted(len(self._trials), 'run')} in {self._recipe.workdir}{already}")
            if todo:
                self._journal.begin()
            self._launcher.submit(make_jobs(todo, together=together))
            stack.callback(self._launcher.stop)  # whatever ends this
            while self._launcher.left():
                if self._interruption.asked:  # before poll: jobs that the same signal has ended have not failed
                    fate = self._launcher.stop()
                    left = len(self._left())
                    self._interruption.check(f"with {left:,} of {len(self._trials):,} runs left; {fate}")
                for job, problem in self._launcher.poll():
                    self._end(job, problem)
                self._watch()
                time.sleep(POLL)
        self._summarise()
        return self._failed

    def _skip_finished(self, trial: Trial) -> bool:
        """Whether a trial has finished; adds its result if a sweep was killed before it did so."""
        known = self._journal.find(trial.key)
        result = known if known is not None and known.finished else trial.result()
        if result is None:
            return False
        if result is not known:
            self._journal.append(result)
        self._show_end(trial, result)
        return True

    def _end(self, job: Job, problem: str) -> None:
        """Adds the results of a job that has ended."""
        for trial in job.trials:
            why = problem
            try:
                result = trial.result()
            except UserError as error:
                result, why = None, str(error)
            if result is None:
                result = trial.failure(" ".join(why.split()) or "it ended before its last step was evaluated")
            self._journal.append(result)
            self._show_end(trial, result)
            if result.finished:
                self._board.say(f"{trial} has finished in {duration(result.seconds)}: {_show_scores([result])}")
            else:
                self._failed.append(trial)
                self._board.say(f"{trial} FAILED: {result.error}")
        if any(trial in self._failed for trial in job.trials):
            last = [line for line in last_of(job.log).splitlines() if line.strip()][-SHOWN:]
            lines = [*last, f"all of it: {job.log}", f"by hand: {self._recipe.shown(job)}"]
            self._board.say("\n".join(f"    {line}" for line in lines))

    def _show_end(self, trial: Trial, result: Result) -> None:
        line = self._lines[trial]
        line.state, line.note, line.progress = result.status, result.error, measure_result(result)

    def _watch(self) -> None:
        """Shows the progress of the trials."""
        for trial in [trial for job in self._launcher.started() for trial in job.trials]:
            line = self._lines[trial]
            if line.state == WAITING:
                line.state, line.progress = RUNNING, trial.progress()
                step = line.progress.step
                self._board.say(f"{trial} {f'resumes from step {step:,}' if step else 'begins'}")
            elif self._board.is_live:
                file = RunDirectory(trial.path).metrics_file
                if file.exists() and self._sizes.get(trial) != file.stat().st_size:
                    self._sizes[trial] = file.stat().st_size
                    line.progress = trial.progress()
        if self._board.is_live:
            states = collections.Counter(line.state for line in self._lines.values())
            summary = ", ".join(f"{count:,} {state}" for state, count in states.items())
            self._board.update(list(self._lines.values()), f"{summary}{self._show_time_left()}")

    def _left(self) -> list[Trial]:
        return [trial for trial, line in self._lines.items() if not line.has_ended]

    def _show_time_left(self) -> str:
        """The expected time, once a trial of the sweep has finished."""
        estimator = Estimator(self._trials, self._journal.results)
        at_a_time = min(self._launcher.at_a_time, self._launcher.left())
        if not estimator.measured or not self._left() or not at_a_time:
            return ""
        shares = {trial: 1 - self._lines[trial].progress.step / trial.steps for trial in self._left()}
        seconds = sum(estimator.seconds(trial) * share for trial, share in shares.items())
        return f", about {duration(seconds / at_a_time)} left"

    def _summarise(self) -> None:
        """Prints the mean scores of each variant."""
        variants: dict[str, list[Trial]] = {}
        for trial in self._trials:
            variants.setdefault(trial.variant.name, []).append(trial)
        rows = []
        for name, trials in variants.items():
            results = [result for trial in trials if (result := self._journal.find(trial.key))]
            finished = [result for result in results if result.finished]
            counts = f"{len(finished)} of {len(trials)}"
            if finished:
                seconds = sum(result.seconds for result in finished) / len(finished)
                parameters = f"{finished[0].parameters:,}"
                rows.append([name, parameters, counts, _show_scores(finished), duration(seconds)])
            else:
                rows.append([name, "", counts, results[0].error if results else "", ""])
        columns = ["variant", "parameters", "seeds", "validation data, mean of the seeds", "time"]
        self._board.table(f"{self._recipe.workdir}/{RESULTS}", columns, rows)


def _show_scores(results: Sequence[Result]) -> str:
    """The mean validation scores of finished trials, as in the report but shorter."""
    scores = [result.scores["valid"] for result in results]

    def mean(name: str) -> float:
        return sum(each[name] for each in scores) / len(scores)

    if results[0].measures == CLASSIFYING:
        others = f"accuracy {mean('accuracy'):.1%}, macro-F1 {mean('macro_f1'):.1%}"
    else:
        others = f"BLEU {mean('bleu'):.2f}, exact {mean('exact_match'):.1%}"
    return f"perplexity {LOG_PERPLEXITY.mean(scores):.3f}, {others}"
