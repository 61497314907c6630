"""The runner of a sweep: what is done is left alone, what was begun goes on, and what fails takes nothing with it."""

import collections
import contextlib
import fcntl
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from transformer_flax.ablation import live_table
from transformer_flax.ablation.estimate import Estimator
from transformer_flax.ablation.jobs import Job, Recipe, Run, measured, share_out
from transformer_flax.ablation.launch import Launcher, last_of
from transformer_flax.ablation.live_table import Board, Line
from transformer_flax.ablation.measures import LOG_PERPLEXITY
from transformer_flax.ablation.results import CLASSIFYING, RESULTS, Journal, Result, require_same_variants
from transformer_flax.console import counted, duration
from transformer_flax.errors import UserError
from transformer_flax.training.interruption import Interruption
from transformer_flax.training.run_directory import Workdir, is_partial

REPORT = "report"  # a folder
LOCK = ".lock"  # held by the sweep
JOBS_LOCK = ".jobs.lock"  # held by its processes too, as long as one of them lives
POLL = 0.5  # seconds
SHOWN = 5  # lines of the log of a run that failed

logger = logging.getLogger(__name__)


def sweep(
    runs: Sequence[Run],
    recipe: Recipe,
    head: dict[str, Any],
    make_launcher: Callable[[IO], Launcher],
    *,
    together: bool = False,
) -> list[Result]:
    """Trains what has not been trained yet, and writes down what comes out.

    Args:
      runs: of the sweep, in the order in which they are trained.
      recipe: how they are trained.
      head: of the results: what is swept.
      make_launcher: given a file that each process is to keep open.
      together: one process trains all seeds of a variant that are left.

    Returns:
      All results in the file, those of other runs of the same base too.

    Raises:
      UserError: the directory holds another sweep, or one that goes on; or some runs have failed, when all have ended.
      Interrupted: a signal asked for an end; the same call goes on.
    """
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(Interruption())
        inherited = stack.enter_context(_claim(recipe.workdir, interruption))
        journal = Journal(recipe.workdir / RESULTS, head)
        require_same_variants(journal.results, changes(runs), recipe.workdir / RESULTS)
        failed = _Sweep(runs, recipe, journal, make_launcher(inherited), interruption).run(together=together)
        print(f"report: {write_report(recipe.workdir, journal.head, journal.results)}")
    if failed:
        many = f"{len(failed)} of {len(runs)} runs failed" if len(failed) > 1 else f"a run of {len(runs)} failed"
        raise UserError(f"{many}: {', '.join(map(str, failed))}; the same command tries again")
    return journal.results


def changes(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What each variant changes, by its name."""
    return {run.variant.name: run.variant.changes for run in runs}


def write_report(workdir: pathlib.Path, head: dict[str, Any], results: Sequence[Result]) -> pathlib.Path:
    """Makes the report of a sweep anew; returns its file."""
    from transformer_flax.ablation import report  # now that it is needed: drawing takes seconds to load

    return report.write(results, head, workdir / REPORT)


@contextlib.contextmanager
def _claim(workdir: pathlib.Path, interruption: Interruption) -> Iterator[IO]:
    """A context in which no other sweep works in a directory; yields the lock that this one's processes share.

    Processes that a sweep has left behind, as one that was killed may for a moment, are waited for.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    others = {file.name for file in workdir.iterdir() if not is_partial(file)} - {LOCK, JOBS_LOCK}
    if others and RESULTS not in others:
        raise UserError(f"{workdir} holds no sweep, but {min(others)}; choose another --workdir")
    with (workdir / LOCK).open("a") as own, (workdir / JOBS_LOCK).open("a") as inherited:
        if not _lock(own, workdir):
            raise UserError(f"another sweep goes on in {workdir}; wait for it, or choose another --workdir")
        told = False
        while not _lock(inherited, workdir):
            if not told:
                logger.warning("waiting for the runs of an earlier sweep in %s, which save their step", workdir)
                told = True
            interruption.check("before anything was started")
            time.sleep(POLL)
        yield inherited


def _lock(file: IO, workdir: pathlib.Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        logger.warning("%s cannot be locked: see to it that no other sweep goes on there", workdir)
    return True


class _Sweep:
    """A sweep that goes on."""

    def __init__(
        self, runs: Sequence[Run], recipe: Recipe, journal: Journal, launcher: Launcher, interruption: Interruption
    ):
        self._runs, self._recipe, self._journal = runs, recipe, journal
        self._launcher, self._interruption = launcher, interruption
        self._lines = {run.path: Line(str(run), run.steps) for run in runs}
        self._sizes: dict[pathlib.Path, int] = {}  # of metrics files that were read
        self._failed: list[Run] = []

    def run(self, *, together: bool) -> list[Run]:
        """Trains all that is left; returns the runs that failed.

        Raises:
          Interrupted: it was asked to end.
        """
        with Board() as self._board, contextlib.ExitStack() as stack:
            todo = [run for run in self._runs if not self._is_done(run)]
            done = len(self._runs) - len(todo)
            already = f", of which {done:,} had finished before" if done else ""
            self._board.say(f"{counted(len(self._runs), 'run')} in {self._recipe.workdir}{already}")
            if todo:
                self._journal.begin()
            self._launcher.submit(share_out(todo, together=together))
            stack.callback(self._launcher.stop)  # whatever ends this
            while self._launcher.left():
                if self._interruption.asked:  # first: runs that the same signal has ended have not failed
                    fate = self._launcher.stop()
                    left = sum(line.state in (live_table.WAITING, live_table.RUNNING) for line in self._lines.values())
                    self._interruption.check(f"with {left:,} of {len(self._runs):,} runs left; {fate}")
                for job, problem in self._launcher.poll():
                    self._end(job, problem)
                self._watch()
                time.sleep(POLL)
        self._report()
        return self._failed

    def _is_done(self, run: Run) -> bool:
        """Whether a run has finished, here or where the results come from."""
        known = self._journal.find(run.variant.name, run.seed)
        result = finished(run, known)
        if result is None:
            return False
        if result is not known:
            self._journal.append(result)
        self._show_end(run, result)
        return True

    def _end(self, job: Job, problem: str) -> None:
        """Writes down what became of a job."""
        for run in job.runs:
            why = problem
            try:
                result = run.result()
            except UserError as error:
                result, why = None, str(error)
            if result is None:
                result = run.failure(" ".join(why.split()) or "it ended before its last step was evaluated")
            self._journal.append(result)
            self._show_end(run, result)
            if result.finished:
                self._board.say(f"{run} has finished in {duration(result.seconds)}: {_scores([result])}")
            else:
                self._failed.append(run)
                self._board.say(f"{run} FAILED: {result.error}")
        if any(run in self._failed for run in job.runs):
            last = [line for line in last_of(job.log).splitlines() if line.strip()][-SHOWN:]
            told = [*last, f"all of it: {job.log}", f"by hand: {self._recipe.shown(job)}"]
            self._board.say("\n".join(f"    {line}" for line in told))

    def _show_end(self, run: Run, result: Result) -> None:
        line = self._lines[run.path]
        line.state, line.note = result.status, result.error
        line.standing = measured(result)

    def _watch(self) -> None:
        """Shows how far the runs are."""
        for job in self._launcher.started():
            for run in job.runs:
                line = self._lines[run.path]
                if line.state == live_table.WAITING:
                    line.state = live_table.RUNNING
                    line.standing = run.standing()
                    begins = f"goes on from step {line.standing.step:,}" if line.standing.step else "begins"
                    self._board.say(f"{run} {begins}")
                elif self._board.is_live:
                    self._refresh(run)
        if self._board.is_live:
            states = collections.Counter(line.state for line in self._lines.values())
            summary = ", ".join(f"{count:,} {state}" for state, count in states.items())
            self._board.update(list(self._lines.values()), f"{summary}{self._left()}")

    def _refresh(self, run: Run) -> None:
        file = Workdir(run.path).metrics_file
        if file.exists() and self._sizes.get(file) != file.stat().st_size:
            self._sizes[file] = file.stat().st_size
            self._lines[run.path].standing = run.standing()

    def _left(self) -> str:
        """About how long it will take, once a run of the sweep has finished."""
        estimator = Estimator(self._runs, self._journal.results)
        left = [run for run in self._runs if self._lines[run.path].state in (live_table.WAITING, live_table.RUNNING)]
        at_a_time = min(self._launcher.at_a_time, self._launcher.left())
        if not estimator.measured or not left or not at_a_time:
            return ""
        seconds = sum(estimator.seconds(run) * (1 - self._lines[run.path].standing.step / run.steps) for run in left)
        return f", about {duration(seconds / at_a_time)} left"

    def _report(self) -> None:
        rows = []
        for name in dict.fromkeys(run.variant.name for run in self._runs):
            results = [
                r for run in self._runs if run.variant.name == name and (r := self._journal.find(name, run.seed))
            ]
            ended = [result for result in results if result.finished]
            counts = f"{len(ended)} of {sum(run.variant.name == name for run in self._runs)}"
            if ended:
                seconds = sum(result.seconds for result in ended) / len(ended)
                rows.append([name, f"{ended[0].parameters:,}", counts, _scores(ended), duration(seconds)])
            else:
                rows.append([name, "", counts, results[0].error if results else "", ""])
        columns = ["variant", "parameters", "seeds", "validation data, mean of the seeds", "time"]
        self._board.table(f"{self._recipe.workdir}/{RESULTS}", columns, rows)


def finished(run: Run, known: Result | None) -> Result | None:
    """The result of a run that has finished, here or where the results come from.

    Args:
      run: one of the sweep.
      known: its result, as the results have it.

    Raises:
      UserError: its directory holds another run, or a damaged one.
    """
    # A sweep that was killed has not written down all that its runs have found.
    return known if known is not None and known.finished else run.result()


def _scores(results: Sequence[Result]) -> str:
    """The means of finished runs on the validation data, in short, as the report has them."""
    scores = [result.scores["valid"] for result in results]

    def mean(name: str) -> float:
        return sum(each[name] for each in scores) / len(scores)

    if results[0].measures == CLASSIFYING:
        others = f"accuracy {mean('accuracy'):.1%}, macro-F1 {mean('macro_f1'):.1%}"
    else:
        others = f"BLEU {mean('bleu'):.2f}, exact {mean('exact_match'):.1%}"
    return f"perplexity {LOG_PERPLEXITY.mean(scores):.3f}, {others}"
