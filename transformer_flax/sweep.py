"""Trains rows of table 3, or variants of your own, with several seeds: python -m transformer_flax.sweep --rows=A,C-N2.

Each run is a process of transformer_flax.train. It writes to <workdir>/<variant>/seed<k>, and its log lies beside this
directory. Results are written to <workdir>/results.jsonl. The same command resumes a sweep, and retries failed runs.
"""

import math
import pathlib
import re
import shlex
import sys
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from transformer_flax import cli
from transformer_flax.arguments import SeedsParser, define_config
from transformer_flax.console import Progress
from transformer_flax.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformer_flax.ablation.local import Local
    from transformer_flax.ablation.slurm import Slurm
    from transformer_flax.ablation.trials import Trial, TrialFactory

ARGUMENTS = sys.argv[1:]

CONFIG = define_config("table3_small.py")
ROWS = flags.DEFINE_string(
    "rows",
    None,
    "rows of table 3: names and letters of groups, such as A,C-N2,base, or all; rows beyond it: names, such as "
    "rotary,pre-norm, or beyond for all other models and recipes for all other ways to train; "
    "rows are scaled to the sizes of --config; "
    "default: all, or base if there is --grid or --variants",
)
SEEDS = flags.DEFINE(SeedsParser(), "seeds", None, "seeds of each variant; default: 0 alone")
GRID = flags.DEFINE_multi_string(
    "grid",
    [],
    "a field and its values, such as model.dropout=0.0,0.1,0.2, or fields that have the same value, such as "
    "model.d_k,model.d_v=16,32; several are crossed",
)
VARIANTS = flags.DEFINE_string(
    "variants",
    None,
    "a TOML file of variants of your own, a line each: wide = {model.d_ff = 512}, or with a row to start from: "
    'few = {row = "C-N2", model.num_heads = 2}',
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "the sweep's directory, new or to be resumed; default: runs/sweep-<config.name>"
)
JOBS = flags.DEFINE_integer(
    "jobs",
    None,
    "runs at a time; default: 1 on this machine, 256 in Slurm. Runs on this machine divide its GPUs, or its cores if "
    "there are none",
    1,
)
VECTORIZE = flags.DEFINE_bool("vectorize_seeds", False, "train all seeds of a variant together, in one program")
LAUNCHER = flags.DEFINE_enum("launcher", "local", ["local", "slurm"], "train on this machine, or as jobs of Slurm")
PARTITION = flags.DEFINE_string("partition", None, "Slurm partition; default: the cluster's")
TIME_LIMIT = flags.DEFINE_integer("time_limit", 1440, "minutes of a Slurm job; a run that needs more is requeued", 3)
DEVICES = flags.DEFINE_integer("devices", 0, "GPUs of a Slurm job", 0)
SBATCH = flags.DEFINE_multi_string("sbatch", [], "another option of Slurm's sbatch, such as account=lab")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "show the runs with their expected cost and commands, train nothing")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "write the report of --workdir again, train nothing")


def main() -> None:
    workdir = pathlib.Path(WORKDIR.value or f"runs/sweep-{CONFIG().name}")
    if REPORT_ONLY.value:
        from transformer_flax.ablation import report
        from transformer_flax.ablation.results import REPORT, RESULTS, read

        if not (workdir / RESULTS).exists():
            raise UserError(f"there is no sweep in {workdir}: it has no {RESULTS}")
        Progress().say(f"report: {report.write(*read(workdir / RESULTS), workdir / REPORT)}")
        return
    given = config_flags.get_override_values(flags.FLAGS["config"])  # by field or section
    if "seed" in given:
        raise UserError("--config.seed has no effect in a sweep: set --seeds, as in --seeds=101,102")
    if LAUNCHER.value != "slurm":
        cli.refuse_idle(("partition", "time_limit", "devices", "sbatch"), "without --launcher=slurm")
    import jax

    jax.config.update("jax_platforms", "cpu")  # this process computes nothing, and the GPUs' memory is for the runs

    from transformer_flax.ablation.expected_cost import show_plan
    from transformer_flax.ablation.local import hardware
    from transformer_flax.ablation.results import make_head
    from transformer_flax.ablation.sweep import sweep
    from transformer_flax.ablation.trials import TrialFactory, chosen_dtype, references
    from transformer_flax.ablation.variants import make_variants
    from transformer_flax.training.config_fields import AUTO, flatten
    from transformer_flax.training.fine_tuning import complete_run
    from transformer_flax.training.vectorized_seeds import check_seeds

    config = CONFIG()
    base = complete_run(config)
    if not {"eval", "eval.final_average"} & given.keys():
        base.eval.final_average = 1  # the paper averages no checkpoints for table 3
    rows = ROWS.value if ROWS.value is not None else "base" if GRID.value or VARIANTS.value else "all"
    file = pathlib.Path(VARIANTS.value) if VARIANTS.value else None
    variants = make_variants(base, rows, axes=GRID.value, file=file)
    # The fields that each run's command sets: those set here, and references, which would follow a row's changes.
    set_here = {*given, *references(config), "eval.final_average"}
    if base.init_from:  # else a variant that starts from nothing would have the file's values of these
        set_here |= {"data.tokenizer", "data.vocab_size"}
    overrides = {
        field: value for field, value in flatten(base.to_dict()).items() if {field, field.rpartition(".")[0]} & set_here
    }
    if base.model.get("dtype") == AUTO and (chosen := chosen_dtype(workdir, variants)):
        overrides["model.dtype"] = chosen  # base keeps "auto", from which the changes of variants are computed
    seeds = SEEDS.value or [0]
    if VECTORIZE.value and len(seeds) > 1:
        for variant in variants:
            check_seeds(variant.config)
    config_file = _short(config_flags.get_config_filename(flags.FLAGS["config"]))
    factory = TrialFactory(config_file, base, overrides, workdir)
    trials = factory.trials(variants, seeds)
    if DRY_RUN.value:
        show_plan(trials, factory, together=VECTORIZE.value)
        return
    command = shlex.join(["python", "-m", "transformer_flax.sweep", *map(_short, ARGUMENTS)])
    machine = hardware() if LAUNCHER.value == "local" else f"Slurm, partition {PARTITION.value or 'by default'}"
    sweep(trials, factory, make_head(base, command, machine), _launcher(factory, trials), together=VECTORIZE.value)


def _launcher(factory: "TrialFactory", trials: "Sequence[Trial]") -> "Local | Slurm":
    """Returns the launcher that the flags ask for."""
    from transformer_flax.ablation.local import Local, slots
    from transformer_flax.ablation.slurm import MOST_AT_A_TIME, Slurm, require_no_jobs

    if LAUNCHER.value == "local":
        require_no_jobs(factory.workdir)
        configs = [trial.variant.config for trial in trials]
        rows = math.gcd(*(c.data.rows_multiple_of // (c.accumulation_steps * c.loss_chunks) for c in configs))
        return Local(factory.workdir, slots(JOBS.value or 1, factory.base.parallel.num_devices, rows), factory.command)
    options = {}
    for option in SBATCH.value:
        name, equals, value = option.removeprefix("--").partition("=")
        options[name] = value if equals else True
    return Slurm(
        factory.workdir,
        factory.command,
        at_a_time=JOBS.value or MOST_AT_A_TIME,
        time=TIME_LIMIT.value,
        partition=PARTITION.value or None,
        gpus_per_node=DEVICES.value or None,
        options=options,
    )


def _short(text: str) -> str:
    """Returns a flag with its path relative to the current directory."""
    return re.sub(rf"(^|=){re.escape(str(pathlib.Path.cwd()))}/", r"\1", text)


if __name__ == "__main__":
    cli.run(main, afterwards="the same command resumes the sweep, and with --report_only reports what has finished")
